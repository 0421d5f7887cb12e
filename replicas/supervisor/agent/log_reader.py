"""Read the logs of a node for readers at the supervisor, one request at a time.

A reply is bounded in encoded bytes (:data:`REPLY_NBYTES`): names and escapes count, so
an empty line takes fifty bytes and a control character six. Lines that do not fit wait
for the reader's next request.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import anyio.to_thread
import msgspec

from replicas import errors
from replicas.control.log_files import LogFollower, LogLine, Selection
from replicas.supervisor.agent.messages import LogQuery, LogReply

_READERS_MAX = 64
REPLY_NBYTES = 1 << 20
"""A longer line comes alone: up to 7.6 MiB, in a frame of at most 8 MiB."""


class _Reader:
    """One reader of the node's logs, and its lines that are not sent yet."""

    def __init__(self, follower: LogFollower) -> None:
        """Take over ``follower``, which reads the files; no line waits yet."""
        self.follower = follower
        self.waiting: deque[LogLine] = deque()
        """Lines that did not fit into the previous reply."""

    def reply(self, number: int) -> LogReply:
        """Take as many waiting lines as fit into one reply, and return the reply.

        :param number: of the reader, which the reply carries.
        """
        body = bytearray()
        while self.waiting and len(body) < REPLY_NBYTES:
            line = msgspec.json.encode(self.waiting[0])
            if body and len(body) + len(line) > REPLY_NBYTES:
                break
            body += line + b"\n"
            self.waiting.popleft()
        return LogReply(number=number, body=bytes(body))


class NodeLogReaders:
    """The open readers of one node's logs, by the number that the supervisor chose.

    A finished reader closes its files.
    """

    def __init__(self, folder: Path) -> None:
        """Begin without readers.

        :param folder: folder of the node's logs.
        """
        self._folder = folder
        self._readers: dict[int, _Reader] = {}

    async def answer(self, query: LogQuery) -> LogReply:
        """Return the lines that a reader has not had yet, as JSON Lines, or an error.

        Never raises for logs that cannot be read. The first query of a reader opens the
        files; files are read in a thread. A query without a selection says that the
        reader is done: it gets its last lines, over one or more queries, and is
        forgotten when none are left.
        """
        reader = self._readers.get(query.number)
        if reader is None and query.selection is None:
            return LogReply(number=query.number)
        try:
            reader = reader or self._open(query)
            if query.selection is None:
                reader.waiting.extend(reader.follower.close())
            elif not reader.waiting:
                reader.waiting.extend(await anyio.to_thread.run_sync(reader.follower.poll))
        except errors.UsageError as error:
            self._readers.pop(query.number, None)
            return LogReply(number=query.number, error=error.message, hint=error.hint)
        except (OSError, msgspec.ValidationError) as error:
            return LogReply(number=query.number, error=f"the logs of this node cannot be read: {error}")
        reply = reader.reply(query.number)
        if query.selection is None and not reader.waiting:
            self._readers.pop(query.number, None)
        return reply

    def _open(self, query: LogQuery) -> _Reader:
        """Create and keep the reader of a query; drop the oldest if there are too many.

        :raises msgspec.ValidationError: the selection is malformed.
        """
        while len(self._readers) >= _READERS_MAX:  # drop the oldest: it may have gone without a last request
            self._readers.pop(next(iter(self._readers))).follower.close()
        selection = msgspec.convert(query.selection, Selection)
        reader = self._readers[query.number] = _Reader(LogFollower(self._folder, selection))
        return reader

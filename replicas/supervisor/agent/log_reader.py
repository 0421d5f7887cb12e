"""Read the logs of a node for readers at the supervisor, one request at a time."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import msgspec

from replicas import errors
from replicas.control.log_files import Follower, LogLine, Selection
from replicas.supervisor.agent.messages import LogQuery, LogReply

__all__ = ["LogReader"]

_READERS_MAX = 64


class LogReader:
    """The readers of one node's logs, by number; one that is done closes its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[int, Follower] = {}

    async def answer(self, query: LogQuery) -> LogReply:
        """The lines that a reader has not had yet, as JSON, one in each line."""
        if query.selection is None:
            follower = self._followers.pop(query.number, None)
            rest = follower.rest() if follower is not None else []
            if follower is not None:
                follower.close()
            return _reply(query, rest)
        try:
            follower = self._followers.get(query.number) or self._open(query)
            lines = await anyio.to_thread.run_sync(follower.poll)
        except errors.UsageError as error:
            self._followers.pop(query.number, None)
            return LogReply(number=query.number, error=error.message, hint=error.hint)
        except (OSError, msgspec.ValidationError) as error:
            return LogReply(number=query.number, error=f"the logs of this node cannot be read: {error}")
        return _reply(query, lines)

    def _open(self, query: LogQuery) -> Follower:
        while len(self._followers) >= _READERS_MAX:  # of readers that went away without a word
            self._followers.pop(next(iter(self._followers))).close()
        selection = msgspec.convert(query.selection, Selection)
        follower = self._followers[query.number] = Follower(self._folder, selection)
        return follower


def _reply(query: LogQuery, lines: list[LogLine]) -> LogReply:
    return LogReply(number=query.number, body=b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

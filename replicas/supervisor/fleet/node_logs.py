"""Read the logs of a run from all of its nodes, through their agents.

All nodes are read concurrently, so a frozen one does not delay lines of the others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from replicas import errors
from replicas.common.tasks import cancelled
from replicas.control.log_files import POLL_S, FolderReader, LogLine, LogReader, Selection
from replicas.supervisor.agent.messages import LogQuery, LogReply
from replicas.supervisor.fleet.cluster import Cluster

_numbers = itertools.count(1)


class _NodeReader:
    """A :class:`~replicas.control.log_files.LogReader` of another machine's logs."""

    def __init__(self, cluster: Cluster, node: str, selection: Selection) -> None:
        """Keep the arguments.

        The first :meth:`poll` asks the agent to open the files.
        """
        self._cluster, self._node, self._selection = cluster, node, selection
        self._number = next(_numbers)
        self._seen: set[tuple[str, int]] = set()
        self._begun = False

    @property
    def many(self) -> bool:
        """True if lines of more than one rank were read."""
        return len(self._seen) > 1

    async def poll(self) -> list[LogLine]:
        """Ask the node's agent for the next lines, and return them.

        Return none while the node is away.

        :raises replicas.errors.UsageError: the node has no such log.
        """
        try:
            lines = await self._ask(msgspec.structs.asdict(self._selection))
        except TimeoutError:
            return []  # the node is away; its lines are read when it is back
        self._begun = True
        self._seen |= {(line.replica, line.rank) for line in lines}
        return lines

    async def aclose(self) -> list[LogLine]:
        """Return the node's last lines, and let its agent close the files."""
        if not self._begun:
            return []
        self._begun = False
        found: list[LogLine] = []
        try:
            while lines := await self._ask(None):
                found += lines
        except (TimeoutError, errors.UsageError):
            pass  # the agent closes the files of readers that stop asking
        return found

    async def _ask(self, selection: dict[str, object] | None) -> list[LogLine]:
        """Send the agent a query, and return the lines of its reply.

        :param selection: which logs to read; None ends the reader and asks for its last
            lines.
        :raises TimeoutError: the agent is away or does not answer.
        :raises replicas.errors.UsageError: the node has no such log.
        """
        reply = await self._cluster.ask(self._node, LogQuery(number=self._number, selection=selection), LogReply)
        if reply.error:
            raise errors.UsageError(reply.error, hint=reply.hint)
        return [msgspec.json.decode(line, type=LogLine) for line in reply.body.splitlines()]


class NodesReader:
    """The logs of this machine and of all others that are up when it is created.

    :param newest: returns the present generation of each replica, by name. Older ones
        are left out unless one is selected, even if they are the newest of their node.
    """

    def __init__(
        self, folder: Path, cluster: Cluster, selection: Selection, newest: Callable[[], Mapping[str, int]]
    ) -> None:
        """Make a reader for this machine and one for each other node that is up.

        Read nothing.

        :param folder: the logs of this machine. :param selection: which lines to read.
        :param newest: returns the present generation of each replica, by name. Older
            ones are left out unless one is selected.
        """
        self._older = selection.generation is not None
        self._newest = newest
        self._readers: list[LogReader] = [FolderReader(folder, selection)]
        self._readers += [_NodeReader(cluster, node, selection) for node in cluster.others()]
        self._polls: dict[LogReader, asyncio.Task[list[LogLine]]] = {}
        self._begun = False
        self._problem: errors.UsageError | None = None

    @property
    def many(self) -> bool:
        """True if lines may be of more than one rank or node."""
        return any(reader.many for reader in self._readers) or len(self._readers) > 1

    async def poll(self) -> list[LogLine]:
        """Wait for new lines of any node, and return them; empty if no node has any.

        A node that answers late does not delay the others: its lines come with a later
        call.

        :raises replicas.errors.UsageError: no node has such a log.
        """
        while True:
            for reader in self._readers:
                if reader not in self._polls:
                    self._polls[reader] = asyncio.create_task(reader.poll())
            await asyncio.wait(self._polls.values(), timeout=POLL_S)
            found = await self._answered()
            if found or not self._polls:
                self._begun = True
                return self._wanted(found)

    async def _answered(self) -> list[LogLine]:
        """Return the lines of readers that have answered; drop readers without the log.

        Once :meth:`poll` has returned lines, the last reader is never dropped: a new
        agent of its node may write the log again.

        :raises replicas.errors.UsageError: no reader is left.
        """
        found: list[LogLine] = []
        for reader, poll in [*self._polls.items()]:
            if not poll.done():
                continue
            del self._polls[reader]
            try:
                found += poll.result()
            except errors.UsageError as error:  # its node has no such log
                self._problem = self._problem or error
                if not self._begun or len(self._readers) > 1:
                    self._readers.remove(reader)
                    await reader.aclose()
        if self._problem is not None and not self._readers:
            raise self._problem
        return found

    def _wanted(self, lines: list[LogLine]) -> list[LogLine]:
        """Return the lines, without older generations unless one is selected."""
        newest = {} if self._older else self._newest()
        return [line for line in lines if line.generation >= newest.get(line.replica, 0)]

    async def aclose(self) -> list[LogLine]:
        """End the readers of all nodes, wait for their last lines, and return those."""
        polls, self._polls = self._polls, {}
        await cancelled(*polls.values())
        found = await asyncio.gather(*(reader.aclose() for reader in self._readers))
        return self._wanted([line for lines in found for line in lines])

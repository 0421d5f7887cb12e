"""Drains: replicas that finish their work in progress and get no new work.

A *draining* replica gets no new version, is not caught up or admitted again, and no new
round is opened for it, nor for its ranks that join only now. It is *busy* while it
packs or moves a version of its own, takes part in a transfer (also as a giver), has
ranks that load a version which its other ranks have loaded already, or has posted an
operation that runs or, as long as the replica is live, may begin. The replica that
archives goes on until it has the version that is served. When a replica is no longer
busy, :class:`~replicas.core.base.effects.ReplicaIdle` is emitted once, so that the
supervisor may end it.
"""

from __future__ import annotations

from replicas.common.reason import Reason
from replicas.core.base.effects import ReplicaIdle
from replicas.core.members.member_state import MemberState
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.operations.running import Operations
from replicas.core.versions.commits import Commits
from replicas.core.versions.load_rounds import LoadRounds


class Drains:
    """The drains of one channel: its replicas that finish their work and get no new."""

    def __init__(self, context: ChannelContext, commits: Commits, rounds: LoadRounds, operations: Operations) -> None:
        """Start without drains.

        :param context: the channel's members, and the queue that gets ReplicaIdle.
        :param commits: tells what a replica publishes or receives now.
        :param rounds: tell what it loads.
        :param operations: tell what it runs.
        """
        self._context = context
        self._commits, self._rounds, self._operations = commits, rounds, operations
        self._waiting: dict[tuple[str, int], int] = {}
        """Generations that are still busy."""
        self._ending: dict[tuple[str, int], int] = {}
        """The last generation of each replica that was ended on request."""

    def start_drain(self, group: str, replica: int, generation: int) -> None:
        """Mark the members of this generation, and of earlier ones, as draining.

        They, and ranks of these generations that join later, get no new work.
        :meth:`advance` reports the replica once it has none, unless no member is here
        now.
        """
        self._ending[group, replica] = generation
        states = self._of(group, replica, generation)
        for state in states:
            state.draining = not state.archives
        if states:
            self._waiting[group, replica] = generation

    def end(self, group: str, replica: int) -> None:
        """End a replica's drain: its members, present and future, get new work.

        No ReplicaIdle is queued for it then. Without a drain nothing changes.
        """
        self._ending.pop((group, replica), None)
        self._waiting.pop((group, replica), None)
        for state in self._context.roster.replica(group, replica):
            state.draining = False

    def joined(self, state: MemberState) -> None:
        """Mark a rank that joins as draining if a drain of its generation has begun;
        otherwise as not draining."""
        member = state.member
        ends = state.hello.generation <= self._ending.get((member.group, member.replica), -1)
        state.draining = ends and not state.archives

    def advance(self) -> None:
        """Queue the event ReplicaIdle, once, for each draining replica that is not busy
        now."""
        for (group, replica), generation in list(self._waiting.items()):
            if not self.busy(group, replica):
                del self._waiting[group, replica]
                if states := self._of(group, replica, generation):
                    newest = max(state.hello.generation for state in states)
                    self._context.emit(ReplicaIdle(self._context.config.name, group, replica, newest))

    def busy(self, group: str, replica: int) -> Reason | None:
        """Return what the replica still works on in this channel, as text; None if it
        is idle, or has no members here. Nothing is changed."""
        name = self._context.config.name
        states = self._context.roster.replica(group, replica)
        members = [state.member for state in states]
        if not members:
            return None
        for publish in self._commits.publishes.without_verdict():
            if (publish.group, publish.replica) == (group, replica):
                return f"it publishes version {publish.version} of {name}"
        for transfer in self._commits.transfers:
            concerned = transfer.attempt.concerned | transfer.needers
            if not concerned.isdisjoint(members):
                return f"version {transfer.payload.version} of {name} is being transferred"
        if self._rounds.loading(group, replica):
            return f"it loads version {self._rounds.of(group, replica).version} of {name}"
        current = self._context.ledger.current()
        if any(state.archives and state.loaded < current for state in states):
            return f"it archives version {current} of {name}"
        if any(self._operations.matching.may_run(state) for state in states):
            return f"an operation on {name} has not ended"
        return None

    def _of(self, group: str, replica: int, generation: int) -> list[MemberState]:
        """Return the replica's present members of this generation and earlier ones."""
        states = self._context.roster.replica(group, replica)
        return [state for state in states if state.hello.generation <= generation]

"""Newcomers: what a Hello is checked for, before it gets a session."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from replicas import errors
from replicas import messages as wire
from replicas.common.logs import Log
from replicas.coordinator.sessions import MemberSession, ProcessWatch
from replicas.core.channel_state import ChannelState
from replicas.messages.identity import Member, ProcessIdentity

log = Log("replicas.coordinator")


class NotYet(Exception):
    """A Hello that cannot be answered now; its member comes again by itself."""


class Newcomers:
    """Checks the Hellos of one run.

    :param sessions: of all members, by member; the caller keeps it up to date.
    :param process: this process.
    """

    def __init__(
        self,
        run: str,
        channels: Mapping[str, ChannelState],
        sessions: Mapping[Member, MemberSession],
        process: ProcessIdentity,
    ) -> None:
        self.run = run
        self.process = process
        self._channels = channels
        self._sessions = sessions

    def channel(self, hello: wire.Hello) -> ChannelState:
        """Return the channel that the member wants to join.

        :raises errors.ReplicasError: it speaks another protocol, or belongs elsewhere.
        """
        if hello.protocol != wire.PROTOCOL:
            raise errors.UsageError(
                f"protocol {hello.protocol} is spoken by the member, {wire.PROTOCOL} by the coordinator",
                hint="install the same version of torch-replicas everywhere",
            )
        if hello.run and hello.run != self.run:
            raise errors.UsageError(
                f'the member belongs to run "{hello.run}", this coordinator serves run "{self.run}"',
                hint="check REPLICAS_ENDPOINT and REPLICAS_RUN",
            )
        channel = self._channels.get(hello.channel)
        if channel is None:
            known = ", ".join(sorted(self._channels)) or "none"
            raise errors.UnknownChannel(
                f'there is no channel "{hello.channel}" in run "{self.run}"',
                channel=hello.channel,
                hint=f"its channels: {known}",
            )
        return channel

    def check_incarnation(self, hello: wire.Hello, channel: ChannelState) -> None:
        """Raise Fenced for a Hello that names another member's incarnation.

        All members know that, and an observer, which shows no mark, is not that member.
        """
        session = self._sessions.get(hello.member)
        owner = session.channel if session is not None else None
        state = owner.roster.get(hello.member) if owner is not None else None
        if state is not None and (owner is not channel or state.observes != hello.observe):
            raise errors.Fenced(f"{hello.member} is another member's incarnation", members=[hello.member.name])

    def replica(self, hello: wire.Hello, channel: ChannelState) -> int:
        """Return an index that no replica has, for rank 0, which tells its other ranks.

        It is the one that this process has already, on this channel (its Welcome was
        lost) or another one; else the lowest.

        :raises NotYet: members of an earlier coordinator may come back for theirs.
        """
        if hello.rank != 0:
            text = f'replica="auto" is for rank 0 of a replica, not for rank {hello.rank}'
            raise errors.UsageError(text, channel=hello.channel, hint="give it the index that rank 0 was given")
        if channel.recovery.active:
            raise NotYet("members of an earlier coordinator may come back for their indices")
        for member in self._sessions:
            if member.incarnation == hello.incarnation:
                return member.replica
        same = (one for other in self._channels.values() for one in other.roster if one.hello.process == hello.process)
        known = (one.member.replica for one in same if one.member.group == hello.group)
        wanted = itertools.chain(known, itertools.count())
        return next(index for index in wanted if not channel.roster.replica(hello.group, index))

    def watch(self, hello: wire.Hello, member: Member) -> ProcessWatch | None:
        """Return a watch of the member's process; None: it cannot be watched here.

        :raises errors.Fenced: the process has ended already.
        """
        process, here = hello.process, self.process
        if (process.boot_id, process.pid_namespace) != (here.boot_id, here.pid_namespace):
            return None
        try:
            return ProcessWatch(process, asyncio.get_running_loop())
        except ProcessLookupError:
            raise errors.Fenced(f"{member}: process {process.pid} is already gone") from None
        except OSError as exc:
            log.warning("%s: its process cannot be watched (%s): only its lease tells of its death", member, exc)
            return None

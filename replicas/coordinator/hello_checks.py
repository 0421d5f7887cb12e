"""Check a Hello before it gets a session: protocol, run, channel, incarnation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from replicas import errors
from replicas import messages as wire
from replicas.common.logs import Log
from replicas.config.values import nearest
from replicas.coordinator.sessions import MemberSession, ProcessWatch
from replicas.core.channel_state import ChannelState
from replicas.messages.identity import Member, ProcessIdentity

log = Log("replicas.coordinator")


class NotYet(Exception):
    """The handshake cannot be answered yet; the client retries."""


class HelloChecks:
    """Checks each Hello, the first message of a member that joins, in one run."""

    def __init__(
        self,
        run: str,
        channels: Mapping[str, ChannelState],
        sessions: Mapping[Member, MemberSession],
        process: ProcessIdentity,
    ) -> None:
        """Keep the arguments, and check nothing yet.

        :param run: name of the run, which members must give.
        :param channels: by name. :param sessions: of all members. The caller keeps both
            mappings up to date.
        :param process: this process.
        """
        self.run = run
        self.process = process
        self._channels = channels
        self._sessions = sessions

    def channel(self, hello: wire.Hello) -> ChannelState:
        """Return the channel that the member wants to join, by its first message.

        :raises errors.ReplicasError: its protocol, run or channel is not ours.
        """
        if hello.protocol != wire.PROTOCOL:
            raise errors.UsageError(
                f"this program speaks protocol {hello.protocol} of replicas, the coordinator protocol {wire.PROTOCOL}",
                hint="install the same version of torch-replicas everywhere",
            )
        if hello.run and hello.run != self.run:
            raise errors.UsageError(
                f'this program belongs to run "{hello.run}", and the coordinator serves run "{self.run}"',
                hint="correct REPLICAS_ENDPOINT, or REPLICAS_RUN",
            )
        channel = self._channels.get(hello.channel)
        if channel is None:
            text = f'there is no channel "{hello.channel}" in run "{self.run}"'
            raise errors.UnknownChannel(f"{text}{nearest(hello.channel, self._channels)}", channel=hello.channel)
        return channel

    def check_incarnation(self, hello: wire.Hello, channel: ChannelState) -> None:
        """Raise Fenced if the Hello (first message) uses another member's incarnation.

        An incarnation names one join; all members know those of others. A member that
        comes back with its own on the same channel passes.
        """
        session = self._sessions.get(hello.member)
        owner = session.channel if session is not None else None
        state = owner.roster.get(hello.member) if owner is not None else None
        if state is not None and (owner is not channel or state.observes != hello.observe):
            raise errors.Fenced(f"{hello.member} uses the identity of a member that lives", members=[hello.member.name])

    def replica(self, hello: wire.Hello, channel: ChannelState) -> int:
        """Return the replica index for a rank 0 that joins with ``replica="auto"``.

        It is the index that this process has already, on this channel (its Welcome was
        lost) or another one; otherwise the lowest free one. It is not reserved.

        :raises NotYet: members of an earlier coordinator may come back for theirs.
        :raises errors.UsageError: the rank is not 0.
        """
        if hello.rank != 0:
            text = f'join: replica="auto" is for rank 0 of a replica, not for rank {hello.rank}'
            raise errors.UsageError(text, channel=hello.channel, hint="pass the index that rank 0 was given")
        if channel.recovery.active:
            raise NotYet("earlier members may reconnect, whose replica numbers must not be given away")
        for member in self._sessions:
            if member.incarnation == hello.incarnation:
                return member.replica
        same = (one for other in self._channels.values() for one in other.roster if one.hello.process == hello.process)
        known = (one.member.replica for one in same if one.member.group == hello.group)
        wanted = itertools.chain(known, itertools.count())
        return next(index for index in wanted if not channel.roster.replica(hello.group, index))

    def watch(self, hello: wire.Hello, member: Member) -> ProcessWatch | None:
        """Return a watch of the joining member's process, which the caller starts.

        It reports the process's end by a pidfd, and the caller must close it. Return
        None if the process is not of this machine, or cannot be watched.

        :raises errors.Fenced: the process has ended already.
        """
        process, here = hello.process, self.process
        if (process.boot_id, process.pid_namespace) != (here.boot_id, here.pid_namespace):
            return None
        try:
            return ProcessWatch(process, asyncio.get_running_loop())
        except ProcessLookupError:
            raise errors.Fenced(f"process {process.pid}, which joins as {member}, has already ended") from None
        except OSError as exc:
            log.warning("not watching the process of %s (%s): only heartbeat_timeout notices its death", member, exc)
            return None

"""`FakeRun`: a coordinator and its members in the test's own process.

Theory of operation
===================

Only the transport is faked. The channels are real :class:`~replicas.channel.Channel`
objects, the coordinator's engine and its channel states are the real ones, and every
message is encoded and decoded; a :class:`Wire` passes messages between them in memory.
The engine runs on the session thread, beside the sessions of the channels. So a test
sees the versions, errors, deadlines and leases of a real run, but not the deaths,
sidecars and process groups of real processes.

Faults act on the wire: frames of a frozen member wait, a session replaces a cut
connection, and a killed member is declared lost as if its process had ended.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from msgspec.structs import replace

from replicas import environ, errors
from replicas.channel import Channel, Update, join
from replicas.channel.session.connection import in_process
from replicas.channel.session.loop import session_loop
from replicas.config.structs import ChannelConfig
from replicas.coordinator import Coordinator, GroupShape
from replicas.messages.identity import Member
from replicas.status import ChannelStatus
from replicas.testing.fake_wire import Wire
from replicas.testing.virtual_target import VirtualTarget

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
POLICY: Mapping[str, Mapping[str, Any]] = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
_numbers = itertools.count(1)


class FakeRun:
    """A run without processes, for tests of programs that use channels.

    ::

        with replicas.testing.FakeRun() as run:
            trainer, rollout = run.join("trainer"), run.join("rollout")
            trainer.publish({"weight": torch.ones(3)}, meta={"step": 1}).wait()
            with rollout.receive().wait() as update:
                assert update.meta["step"] == 1

    All members live in this process, on CPU memory, and behave as in a run: only
    deaths of processes, process groups and sidecars do not exist. So ``transport``,
    ``encrypt`` and ``staging`` of a channel have no effect: bytes go through mapped
    memory. Nothing listens, and nothing is left at the end: leaving the block closes
    all channels.

    A program that calls :func:`replicas.join` joins this run if the variables of
    :meth:`environ` are set.

    :param channels: as for :class:`replicas.Coordinator`; default: a channel "policy"
        from the group "trainer" to the group "rollout".
    :param groups: as for :class:`replicas.Coordinator`, such as the lease of a group's
        members: ``GroupShape(heartbeat_timeout_s=2.5)``.
    :raises replicas.errors.BadConfig: the channels are not valid.
    :raises replicas.errors.UsageError: a channel has peers, which need processes.
    """

    def __init__(
        self,
        channels: Mapping[str, ChannelConfig | Mapping[str, Any]] | None = None,
        *,
        groups: Mapping[str, GroupShape | int] | None = None,
    ) -> None:
        """Check channels and groups; the run begins with its ``with`` block.

        :param channels: settings by name; None: "policy", from "trainer" to "rollout".
        :param groups: shape, or number of replicas, by name.
        :raises replicas.errors.BadConfig: the channels are not valid.
        :raises replicas.errors.UsageError: a channel has peers, which need processes.
        """
        self._number = next(_numbers)
        self._channels = POLICY if channels is None else channels
        self._groups = groups
        self._coordinator = self._new_coordinator()
        known = {name: one.config for name, one in self._coordinator.engine.channels.items()}
        self._channels = {
            name: replace(one, transport="auto", encrypt=False, staging="host") for name, one in known.items()
        }
        self._coordinator = self._new_coordinator()
        with_peers = [name for name, one in self._coordinator.engine.channels.items() if one.config.peers]
        if with_peers:
            text = f'channel "{with_peers[0]}" has peers, whose operations need processes'
            raise errors.UsageError(text, hint="test it with replicas.Coordinator(...).in_thread() and processes")
        self._loop = session_loop()
        self._tick: asyncio.Task[None] | None = None
        self._token_fd = -1
        self._wires: dict[Member, Wire] = {}
        self._came = asyncio.Event()
        self._frozen: dict[Member, asyncio.Event] = {}
        self._joined: list[Channel] = []
        self._targets: list[VirtualTarget] = []

    def _new_coordinator(self, token: str | None = None) -> Coordinator:
        """Return a coordinator of this run's channels that is never entered: it has no
        port, store or file.

        :param token: the members' secret; None: a new one.
        """
        return Coordinator(self._channels, groups=self._groups, token=token)

    @property
    def endpoint(self) -> str:
        """Address of this run, to pass to ``replicas.join``; nothing listens there."""
        return f"fake-run-{self._number}.invalid:1"

    @property
    def token(self) -> str:
        """Secret of this run, to pass to ``replicas.join``."""
        return self._coordinator.token

    def __enter__(self) -> Self:
        """Begin the run: let :func:`replicas.join` in this process find it, write its
        token to a memfd, and start the engine's timers on the session thread."""
        self._token_fd = os.memfd_create("replicas-token")  # never on disk, even if this process is killed
        os.write(self._token_fd, self.token.encode())
        in_process[self.endpoint] = self._connect
        self._on_loop(self._start_ticks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the run: deliver what frozen members wait for, close all channels, join
        the targets' threads (30 s at most for each), and stop the engine."""
        try:
            self._on_loop(self._thaw_all)
            for target in self._targets:
                target.end()
            for channel in self._joined:
                channel.close(wait=False)
        finally:
            self._on_loop(self._lose_all)
            in_process.pop(self.endpoint, None)
            self._on_loop(self._stop)
            os.close(self._token_fd)
            self._token_fd = -1

    def environ(
        self, group: str, replica: int | Literal["auto"] = 0, rank: int = 0, world_size: int = 1
    ) -> dict[str, str]:
        """Return the environment variables with which :func:`replicas.join` joins this
        run as this rank; set none here.

        :param replica: index in the group; "auto": the coordinator chooses it at the
            join.
        :param rank: number of the rank in its replica, which has ``world_size`` ranks.

        ::

            for name, value in run.environ("rollout").items():
                monkeypatch.setenv(name, value)
        """
        self._check_begun()
        return {
            environ.ENDPOINT: self.endpoint,
            environ.TOKEN_FILE: f"/proc/{os.getpid()}/fd/{self._token_fd}",
            environ.RUN: self._coordinator.engine.hello_checks.run,
            environ.GROUP: group,
            environ.REPLICA: str(replica),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
        }

    def join(
        self,
        group: str,
        replica: int | Literal["auto"] = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        channel: str | None = None,
        **more: Any,
    ) -> Channel:
        """Join as a member; return its channel, which the end of the run closes.

        :param channel: name of the channel; default: the first.
        :param more: ``observe``, ``info`` and ``timeout`` of :func:`replicas.join`.
        :raises replicas.errors.ReplicasError: as :func:`replicas.join`.
        :raises replicas.errors.UsageError: outside the ``with`` block.
        """
        self._check_begun()
        identity: dict[str, Any] = {"group": group, "replica": replica, "rank": rank, "world_size": world_size}
        name = next(iter(self._channels)) if channel is None else channel
        joined = join(name, endpoint=self.endpoint, token=self.token, **{**identity, **more})
        self._joined.append(joined)
        return joined

    def target(
        self,
        group: str,
        replica: int = 0,
        *,
        channel: str | None = None,
        load: Callable[[Update], object] | None = None,
    ) -> VirtualTarget:
        """Join a target that loads each version, in a thread of its own until the run
        ends; return it.

        :param load: called with each :class:`replicas.Update`; if it raises, the
            version is reported as failed. Default: copy its tensors.
        """
        target = VirtualTarget(self.join(group, replica, channel=channel), load)
        self._targets.append(target)
        return target

    # ------------------------------------------------------------ faults

    def kill(self, channel: Channel) -> None:
        """Declare this channel's member lost, as if its process had been killed.

        Blocks until that is done. The channel has ended: its calls raise Fenced. Join
        again for a restart.
        """
        self._on_loop(self._kill, channel.member)

    def freeze(self, channel: Channel) -> None:
        """Hold back all messages to and from the channel's member, as if its process
        were stopped.

        When its lease is over (``heartbeat_timeout_s`` of its group), it is lost.
        """
        self._on_loop(self._freeze, channel.member)

    def thaw(self, channel: Channel) -> None:
        """End :meth:`freeze`: deliver the messages that waited. Do nothing for a member
        that is not frozen."""
        self._on_loop(self._thaw, channel.member)

    def disconnect(self, channel: Channel) -> None:
        """Break the connection of the channel's member; its session reconnects and
        resumes."""
        self._on_loop(self._cut, channel.member)

    def restart_coordinator(self) -> None:
        """Replace the coordinator by a new one, which learns its state from the
        members.

        Return when all members that are not frozen have reconnected; raise TimeoutError
        after 30 s.
        """
        self._loop.run(self._restart, CALL_TIMEOUT_S)

    # ------------------------------------------------------------ state, for the test

    def status(self, channel: str | None = None) -> ChannelStatus:
        """Return the state of a channel as the coordinator sees it; default: the first.

        Blocks until the session thread has answered.

        :raises replicas.errors.UnknownChannel: there is no such channel.
        """
        name = next(iter(self._channels)) if channel is None else channel
        found = {one.name: one for one in self._on_loop(self._coordinator.channel_statuses)}
        if name not in found:
            raise errors.UnknownChannel(f'this fake run has no channel "{name}"', hint=f"it has {', '.join(found)}")
        return found[name]

    # ------------------------------------------------------------ on the session thread

    def _check_begun(self) -> None:
        """Raise UsageError before the ``with`` block was entered, and after its end."""
        if self._token_fd < 0:
            raise errors.UsageError("this fake run has not begun, or is over", hint="use it in its `with` block")

    def _on_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the session thread (the loop of all channels of this
        process), and block until it has ended; return its result, or raise its error.

        :raises TimeoutError: the function did not end within 30 s.
        """

        async def call() -> T:
            """Call the given function with its arguments, on the session thread.

            Return its result.
            """
            return function(*arguments)

        make: Callable[[], Coroutine[Any, Any, T]] = call
        return self._loop.run(make, CALL_TIMEOUT_S)

    def _connect(self, token: str) -> Wire:
        """Return a new in-memory connection for a session that shows this token; a
        wrong token is refused when the session sends its first message. Runs on the
        session thread."""
        return Wire(self._coordinator.engine, self._welcome, accepted=hmac.compare_digest(token, self.token))

    def _welcome(self, wire: Wire, member: Member) -> None:
        """Register the wire (in-memory connection) of a member that the engine has
        accepted, and hold its messages back if the member is frozen. Runs on the
        session thread."""
        self._wires[member] = wire
        self._came.set()
        wire.frozen = self._frozen.get(member)

    def _start_ticks(self) -> None:
        """Start the task that runs the engine's timers, until :meth:`_stop`. Call it on
        the session thread."""
        self._tick = self._loop.spawn(self._coordinator.engine.tick_forever(), f"{self.endpoint} ticks")

    def _stop(self) -> None:
        """Cancel the timers' task, cut the connections of all members, and close the
        engine. Call it on the session thread."""
        if self._tick is not None:
            self._tick.cancel()
        for wire in self._wires.values():
            wire.abort()
        self._wires.clear()
        self._coordinator.engine.close()

    async def _restart(self) -> None:
        """Replace the coordinator by a new one with the same token; return when all
        members that are not frozen have reconnected. Call it on the session thread."""
        known = {state.member for one in self._coordinator.engine.channels.values() for state in one.roster}
        self._stop()
        old = self._coordinator
        self._coordinator = self._new_coordinator(old.token)
        decisions, last = self._coordinator.engine.decisions, old.engine.decisions
        decisions.term = max(decisions.term, last.term + 1)
        self._start_ticks()
        while known - self._frozen.keys() - self._wires.keys():
            self._came.clear()
            await self._came.wait()

    def _kill(self, member: Member) -> None:
        """Have the engine declare the member lost, as after the exit of its process;
        deliver its messages that were held back. Call it on the session thread."""
        self._coordinator.engine.lose(member, "exited")
        self._thaw(member)

    def _freeze(self, member: Member) -> None:
        """Hold back the messages to and from the member, also over later connections,
        until :meth:`_thaw`. Call it on the session thread."""
        thawed = self._frozen.setdefault(member, asyncio.Event())
        if (wire := self._wires.get(member)) is not None:
            wire.frozen = thawed

    def _thaw(self, member: Member) -> None:
        """Let the messages of the member's connection pass again; do nothing for a
        member that is not frozen. Call it on the session thread."""
        if (thawed := self._frozen.pop(member, None)) is not None:
            thawed.set()
        if (wire := self._wires.get(member)) is not None:
            wire.frozen = None

    def _thaw_all(self) -> None:
        """Let the messages of all frozen members pass again."""
        for member in list(self._frozen):
            self._thaw(member)

    def _lose_all(self) -> None:
        """Have the engine declare every member lost; this ends the channels that the
        program joined itself. Call it on the session thread."""
        for member in list(self._wires):
            self._kill(member)

    def _cut(self, member: Member) -> None:
        """Cut the member's connection, if it has one; its session then connects again.
        Call it on the session thread."""
        if (wire := self._wires.get(member)) is not None:
            wire.abort()

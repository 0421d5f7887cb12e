"""The engine: channel states, sessions and the effects between them. No sockets of its
own.

Theory of operation
===================

Everything runs on one asyncio loop, and each event is handled to its end without an
await: a message, a loss or a tick goes into a
:class:`~replicas.core.channel.ChannelState`, and the effects that come out are applied
in order, a decision being written and synced to disk before the commit is queued to
anyone. Sending only queues: nothing here waits for a member.

Time is the loop's monotonic clock. A tick that comes late means that this process did
not run (a stopped machine, a long pause): the members could not be heard in that time,
so the pause is added to everyone's lease, and the sockets are read before anybody or
any deadline is judged. Nor is a member on another host judged by a time in which nobody
at all was heard: then this host was cut off (:mod:`replicas.core.members.silence`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from replicas import errors
from replicas.config.structs import ChannelConfig
from replicas.coordinator.decisions import DecisionLog
from replicas.coordinator.reach import check_reach
from replicas.coordinator.sessions import Connection, Encoded, MemberSession, ProcessWatch
from replicas.core.channel import ChannelState
from replicas.core.effects import (
    CaughtUp,
    Effect,
    Emit,
    Event,
    Keep,
    LetGo,
    MemberLost,
    MemberQuarantined,
    Read,
    RecordDecision,
    ReplaceStore,
    Send,
    SweepStore,
    SyncEnded,
)
from replicas.core.members.roster import GroupShape
from replicas.core.members.silence import Silence
from replicas.core.moving.lanes import SECRET_NBYTES
from replicas.core.versions.manifests import Joined, read
from replicas.memory.beacon import own_beacon
from replicas.memory.kept import MemoryHolder
from replicas.memory.process import own_process
from replicas.messages import (
    PROTOCOL,
    Ack,
    Bye,
    FromMember,
    Heartbeat,
    Hello,
    MemberFrame,
    Refused,
    Welcome,
    WireError,
)
from replicas.messages.identity import Member

__all__ = ["Engine", "Store"]

log = logging.getLogger("replicas.coordinator")

TICK_S = 0.1
LAST_WORDS_S = 0.25
"""How long the socket of an ended process is read for: forked children of it may keep
it open for ever."""
ACK_BYTES_S = 1.0
"""How often a member is answered of which part of a message comes in."""
PAUSE_S = 1.0
"""A tick this much late is a pause of this process, and nobody's fault."""
SETTLE_S = 0.5
"""After a pause: from the first turn of the loop to the first judgement."""


class _Outlet:
    """The effects of one channel that are due, in order; what waits there for the disk
    holds up no other channel."""

    def __init__(self) -> None:
        self.due: deque[Effect] = deque()
        self.applying = False
        self.disk_problem = ""


class Store(Protocol):
    """What the engine needs of the store's process."""

    @property
    def address(self) -> tuple[str, int]: ...

    def sweep(self, prefix: str) -> None: ...

    def replace(self, address: tuple[str, int]) -> None: ...


class Engine:
    """All channels of a run."""

    def __init__(
        self,
        channels: Mapping[str, ChannelConfig],
        groups: Mapping[str, GroupShape],
        *,
        run: str,
        decisions: DecisionLog,
        store: Store,
        epochs: Mapping[str, int] | None = None,
    ) -> None:
        self.run = run
        self.decisions = decisions
        self._store = store
        self._keeper = MemoryHolder()
        beacon, process = own_beacon(), own_process()
        self._process = process
        here = ((process.boot_id, process.pid_namespace, beacon.uid), beacon)
        self.channels = {
            name: ChannelState(
                config,
                groups,
                run=run,
                term=decisions.term,
                store=lambda: store.address,
                secret=secrets.token_bytes(SECRET_NBYTES),
                past=decisions.past(name, (epochs or {}).get(name, 0)),
                here=here,
            )
            for name, config in channels.items()
        }
        self._sessions: dict[Member, MemberSession] = {}
        self._channel_of: dict[Member, ChannelState] = {}
        self._callbacks: list[Callable[[Event], None]] = []
        self._outlets = {name: _Outlet() for name in channels}
        self._encoded = Encoded()
        self._silence = Silence()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lag_s = 0.0
        self.refusals: dict[str, int] = {}
        self.tap: Callable[[ChannelState, Effect | FromMember], None] | None = None
        """For tests that must act at one very moment: called with each effect just
        before it is applied (a decision: once it is on disk) and each message just
        before it is handled. It must neither raise nor wait."""

    @property
    def term(self) -> int:
        return self.decisions.term

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        self._callbacks.append(callback)

    def emit(self, event: Event) -> None:
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception:
                log.exception("a subscriber failed on %r", event)

    # ------------------------------------------------------------ sessions

    def open(self, hello: Hello, connection: Connection, address: str, seen_as: str = "") -> MemberSession:
        """Bind a connection to a session: a new one, or the one that this incarnation
        already has.

        :param address: of the member, as seen from here. :param seen_as: ours, to which
            it connected.
        :raises errors.ReplicasError: the Hello is refused.
        """
        now = self._now()
        channel = self._accept(hello)
        self._break_silence(now)
        member = Member(hello.group, hello.replica, hello.rank, hello.incarnation)
        session = self._sessions.get(member)
        state = channel.roster.get(member)
        if session is not None and state is not None and hello.resume_term == self.term:
            channel.connected(member, now)
            self._attach(session, connection, hello.received, channel.welcome(state, session.received))
            return session
        if hello.resume_term == self.term:
            raise errors.Fenced(f"{member} was declared lost while it could not be heard", members=[member.name])
        if session is not None:
            self.lose(member, "left")  # its Welcome never arrived, and it starts anew
        store = self._store.address[0]
        check_reach(hello, self._process, address, seen_as or store, store)
        watch = self._watch(hello, member)
        session = MemberSession(member)
        session.watch = watch
        self._sessions[member] = session
        self._channel_of[member] = channel
        try:
            state, older = channel.join(hello, address, now)
        except errors.ReplicasError:
            self._forget(member)
            raise
        self._attach(session, connection, 0, channel.welcome(state, 0))
        if older is not None:
            self._fence(older.member)
        self._apply(channel)
        if watch is not None:
            watch.start(lambda: self._exited(session))
        return session

    def _attach(self, session: MemberSession, connection: Connection, received: int, welcome: Welcome) -> None:
        session.attach(connection, received, welcome)
        connection.on_bytes = lambda: self._heard(session)

    def _heard(self, session: MemberSession) -> None:
        """Part of a message has come. Over a slow link the rest may take long: both
        sides hear of each other meanwhile."""
        channel, now = self._channel_of.get(session.member), self._now()
        if channel is None:
            return
        channel.seen(session.member, now)
        if now - session.wrote_at >= ACK_BYTES_S:
            session.send(Ack())

    def detach(self, session: MemberSession, connection: Connection) -> None:
        """A connection has ended; its member may come back with another one."""
        channel = self._channel_of.get(session.member)
        if session.detach(connection) and channel is not None:
            channel.disconnected(session.member, self._now())

    def _accept(self, hello: Hello) -> ChannelState:
        if hello.protocol != PROTOCOL:
            raise errors.UsageError(
                f"protocol {hello.protocol} is spoken by the member, {PROTOCOL} by the coordinator",
                hint="install the same version of torch-replicas everywhere",
            )
        if hello.run and hello.run != self.run:
            raise errors.UsageError(
                f'the member belongs to run "{hello.run}", this coordinator serves run "{self.run}"',
                hint="check REPLICAS_ENDPOINT and REPLICAS_RUN",
            )
        channel = self.channels.get(hello.channel)
        if channel is None:
            known = ", ".join(sorted(self.channels)) or "none"
            raise errors.UnknownChannel(
                f'there is no channel "{hello.channel}" in run "{self.run}"',
                channel=hello.channel,
                hint=f"its channels: {known}",
            )
        return channel

    def _watch(self, hello: Hello, member: Member) -> ProcessWatch | None:
        try:
            return ProcessWatch.open(hello.process, asyncio.get_running_loop())
        except ProcessLookupError:
            raise errors.Fenced(f"{member}: process {hello.process.pid} is already gone") from None
        except OSError as exc:
            log.warning("%s: its process cannot be watched (%s): only its lease tells of its death", member, exc)
            return None

    def _fence(self, member: Member) -> None:
        session = self._sessions.get(member)
        if session is not None:
            error = errors.Fenced(f"another process joined as {member}", members=[member.name], unanimous=False)
            session.send(Refused(WireError.of(error)))
        self._forget(member)

    def _forget(self, member: Member) -> None:
        session = self._sessions.pop(member, None)
        self._channel_of.pop(member, None)
        if session is not None:
            session.close()

    def _exited(self, session: MemberSession) -> None:
        """The member's process has ended. What it said last may still lie in its
        socket: read that to the end first."""
        if session.watch is not None:
            session.watch.close()
            session.watch = None
        if session.connection is None:
            self.lose(session.member, "exited")
            return
        session.on_detach = lambda: self.lose(session.member, "exited")
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.lose, session.member, "exited")

    def lose(self, member: Member, reason: str) -> None:
        """The member is gone for good."""
        channel = self._channel_of.get(member)
        if channel is None:
            return
        channel.lose(member, reason, self._now())
        self._apply(channel)

    def set_draining(self, group: str, replica: int, generation: int) -> None:
        """The generation is being ended: see :meth:`ChannelState.set_draining`."""
        for channel in self.channels.values():
            channel.set_draining(group, replica, generation, self._now())
            self._apply(channel)

    def expel(self, session: MemberSession, error: errors.ReplicasError, reason: str) -> None:
        """Lose a member that says what no member can mean: it is told why, and would
        only say it again."""
        session.send(Refused(WireError.of(error)))
        self.lose(session.member, reason)

    def store_lost(self) -> None:
        """The store has ended."""
        for channel in self.channels.values():
            channel.store_lost()

    def store_moved(self) -> None:
        """There is a new store at another address."""
        for channel in self.channels.values():
            channel.store_moved(self._now())
            self._apply(channel)

    def receive(self, session: MemberSession, frame: MemberFrame) -> bool:
        """A frame of the member; False when the connection must be closed (the frame is
        out of order)."""
        member, channel = session.member, self._channel_of.get(session.member)
        if channel is None:
            return False
        now = self._now()
        self._break_silence(now)
        channel.seen(member, now)
        session.acknowledge(frame.ack)
        if isinstance(frame.body, Heartbeat):
            if session.connection is not None:
                channel.measured(member, session.connection.rtt_s())
            session.send(Ack())
            return True
        accepted = session.accept(frame.seq)
        if accepted is None:
            return False
        if accepted:
            if self.tap is not None:
                self.tap(channel, frame.body)
            if isinstance(frame.body, Bye):
                channel.lose(member, "left", now)
            else:
                channel.receive(member, frame.body, now)
            self._apply(channel)
        return True

    def close(self) -> None:
        """Let go of the memory that is kept for others."""
        for task in self._tasks:
            task.cancel()
        self._keeper.close()

    def refused(self, reason: str) -> None:
        """Count a connection or message that was turned away."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    # ------------------------------------------------------------ effects

    def _apply(self, channel: ChannelState) -> None:
        outlet = self._outlets[channel.config.name]
        outlet.due.extend(channel.drain())
        if outlet.applying:
            return
        outlet.applying = True
        try:
            while outlet.due:
                effect = outlet.due[0]
                if isinstance(effect, RecordDecision) and not self._recorded(channel, outlet, effect):
                    return
                outlet.due.popleft()
                self._do(channel, effect)
        finally:
            outlet.applying = False

    def _recorded(self, channel: ChannelState, outlet: _Outlet, effect: RecordDecision) -> bool:
        """Whether the decision is on disk. If not, nothing behind it happens on its
        channel: the next tick tries again."""
        decision = effect.decision
        try:
            self.decisions.append(decision)
        except OSError as exc:
            if outlet.disk_problem != str(exc):
                outlet.disk_problem = str(exc)
                log.error("%s: version %d waits to be recorded: %s", decision.channel, decision.version, exc)
            return False
        outlet.disk_problem = ""
        channel.told.recorded(decision)
        return True

    def _do(self, channel: ChannelState, effect: Effect) -> None:
        if self.tap is not None:
            self.tap(channel, effect)
        match effect:
            case Send():
                session = self._sessions.get(effect.member)
                if session is not None and not session.send(effect.message, self._encoded.of(effect.message)):
                    self.refused("overflow")
                    channel.lose(effect.member, "overflow", self._now())
                    self._apply(channel)
            case SweepStore():
                self._store.sweep(effect.prefix)
            case ReplaceStore():
                self._store.replace((effect.host, effect.port))
            case Keep():
                place = self._keeper.keep((effect.channel, effect.owner), effect.place, effect.version)
                channel.kept(effect.owner, effect.version, place)
            case Read():
                task = asyncio.create_task(self._read(channel, effect), name="manifest")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case LetGo():
                self._keeper.let_go((effect.channel, effect.owner))
            case Emit():
                if isinstance(effect.event, MemberLost):
                    self._on_lost(effect.event)
                elif isinstance(effect.event, SyncEnded):
                    channel.told.ended(effect.event.record)
                elif isinstance(effect.event, CaughtUp):
                    channel.told.nbytes += effect.event.moved_nbytes
                elif isinstance(effect.event, MemberQuarantined):
                    log.warning(
                        "%s: %s is quarantined: %s", channel.config.name, effect.event.member, effect.event.reason
                    )
                self.emit(effect.event)

    async def _read(self, channel: ChannelState, effect: Read) -> None:
        found: Joined | errors.ReplicasError
        try:
            found = await asyncio.to_thread(read, effect)
        except errors.ReplicasError as error:
            found = error
        except Exception as error:
            log.exception("a bug: a manifest of channel %s could not be read", channel.config.name)
            found = errors.InternalError(f"{type(error).__name__}: {error}")
        channel.read(effect, found, self._now())
        self._apply(channel)

    def _on_lost(self, event: MemberLost) -> None:
        log.info("%s: %s is lost (%s)", event.channel, event.member, event.reason)
        if event.reason == "fenced":
            return  # told by _fence, once the new incarnation has been welcomed
        session = self._sessions.get(event.member)
        if session is not None and event.reason != "left":
            error = errors.Fenced(
                f"{event.member} was declared lost ({event.reason})",
                members=[event.member.name],
                hint="join again",
            )
            session.send(Refused(WireError.of(error)))
        self._forget(event.member)

    # ------------------------------------------------------------ time

    def _break_silence(self, now: float) -> None:
        """Somebody is heard."""
        grace_s = self._silence.heard(now)
        if grace_s:
            log.warning("nobody could be heard; who comes back last is given %.1f s more than who comes first", grace_s)
            self._pardon(0.0, now, grace_s)

    def _pardon(self, silence_s: float, now: float, grace_s: float = 0.0) -> None:
        """Of members on other hosts, those whose connections nobody has closed."""
        sessions = self._sessions.items()
        far = {member for member, session in sessions if session.watch is None and session.connection is not None}
        for channel in self.channels.values():
            channel.roster.pardon(far, silence_s, now, grace_s=grace_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    async def tick_forever(self) -> None:
        """Leases and deadlines, ten times a second.

        After a pause of this process what has arrived meanwhile is read first, and
        those who were paused with us have a moment to say something: only then is
        anybody, or any deadline, judged.
        """
        due = self._now() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - self._now()))
            now = self._now()
            late = max(0.0, now - due)
            self.lag_s = max(late, self.lag_s * 0.9)
            due = now + TICK_S
            if late > PAUSE_S:
                log.warning("this process did not run for %.1f s: leases are extended by as much", late)
                for channel in self.channels.values():
                    channel.roster.forgive(late, now)
                due = now + SETTLE_S
                continue
            silence_s = self._silence.passed(now)
            if silence_s:
                self._pardon(silence_s, now)
            for name, channel in self.channels.items():
                try:
                    channel.tick(now)
                    self._apply(channel)
                except Exception:  # deadlines and leases of all channels hang on this loop
                    log.exception("a bug: the tick of channel %s failed", name)

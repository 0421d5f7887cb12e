"""Feed events to the channel states, and apply the effects that they return.

The engine runs on one asyncio loop. Each event (a message, a loss or a tick) is handled
to its end without an await: it goes into a
:class:`~replicas.core.channel_state.ChannelState`, and the returned effects are applied
in order, a decision synced to disk before the commit is queued to any member.

Time is the loop's monotonic clock. A late tick means that this process was suspended
and could not hear its members. So the pause is added to every lease, and the sockets
are read before leases and deadlines are checked. A silence of all members does not
count against those on other hosts, because this host had lost its network.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from replicas import errors
from replicas import messages as wire
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import keep_until_done
from replicas.config.structs import ChannelConfig
from replicas.coordinator.addresses import check_reach
from replicas.coordinator.decisions import DecisionLog
from replicas.coordinator.hello_checks import HelloChecks
from replicas.coordinator.sessions import Encoded, MemberConnection, MemberSession
from replicas.coordinator.store import StoreWatcher
from replicas.coordinator.subscribers import Subscribers
from replicas.core.base import effects
from replicas.core.base.effects import Effect, Event, StoreChanged
from replicas.core.base.ledger import Decision
from replicas.core.channel_state import ChannelState
from replicas.core.members.heartbeats import ChannelSilence
from replicas.core.members.roster import GroupShape
from replicas.core.operations.lanes import SECRET_NBYTES
from replicas.core.versions.manifests import Joined, read
from replicas.memory.beacon import own_beacon, own_process
from replicas.memory.held_memory import MemoryHolder
from replicas.messages.identity import Member

log = Log("replicas.coordinator")

TICK_S = 0.1  # deadlines and leases are checked this late at most
LAST_WORDS_S = 0.25
"""How long to read the socket of an ended process: its children may keep it open."""
ACK_BYTES_S = 1.0
"""Interval of the acks to a member while a long message arrives in parts."""
SETTLE_S = 0.5
"""Time after a pause before leases and deadlines are checked."""


class _PendingEffects:
    """Queue of one channel's effects (sends, decisions, events) still to be applied."""

    def __init__(self) -> None:
        """Begin with no effect pending."""
        self.due: deque[Effect] = deque()
        self.applying = False
        self.tried_at = 0.0  # of the decision that waits for the disk


class Engine:
    """Feeds messages, losses and ticks to a run's channels, and applies the effects."""

    def __init__(
        self,
        channels: Mapping[str, ChannelConfig],
        groups: Mapping[str, GroupShape],
        *,
        run: str,
        decisions: DecisionLog,
        store: StoreWatcher,
        epochs: Mapping[str, int] | None = None,
        carry_port: int = 0,
    ) -> None:
        """Restore the channels from ``decisions`` and ``epochs`` (last membership
        numbers); start nothing. ``carry_port``: for pulls of versions between hosts."""
        self.decisions = decisions
        self._store = store
        self._keeper = MemoryHolder()
        process = own_process()
        here = (process.boot_id, own_beacon())
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
                carry_port=carry_port,
                wall_offset_s=time.time() - time.monotonic(),
            )
            for name, config in channels.items()
        }
        self._sessions: dict[Member, MemberSession] = {}
        self.hello_checks: HelloChecks = HelloChecks(run, self.channels, self._sessions, process)
        self._subscribers = Subscribers()
        self._outlets = {name: _PendingEffects() for name in channels}
        self._encoded = Encoded()
        self._silence = ChannelSilence()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lag_s = 0.0
        self.refusals: dict[str, int] = {}
        self.is_started_here: Callable[[wire.Hello], bool] = lambda hello: False
        """True if a supervisor started the process; raises for a forged claim."""
        self.tap: Callable[[ChannelState, Effect | wire.FromMember], None] | None = None
        """Test hook, called with each effect and message just before it is applied (a
        decision: when it is on disk). It must not raise or block."""

    def subscribe(self, callback: Callable[[Event], None]) -> None:
        """Have ``callback`` called on the loop with each event of the channels."""
        self._subscribers.add(callback)

    # ------------------------------------------------------------ sessions

    def open(self, hello: wire.Hello, connection: MemberConnection, address: str, seen_as: str = "") -> MemberSession:
        """Bind a member's new connection to its session, or to a new one; send Welcome.
        ``address``: the member's, as seen from here. ``seen_as``: ours, as seen by it.

        :raises errors.ReplicasError: the join is refused. :raises NotYet: retry later.
        """
        now = self._now()
        channel = self.hello_checks.channel(hello)
        self._end_silence(now)
        if hello.any_replica:
            hello = msgspec.structs.replace(hello, replica=self.hello_checks.replica(hello, channel), any_replica=False)
        if hello.observe or not self.is_started_here(hello):
            hello = msgspec.structs.replace(hello, proof="")  # no supervisor vouches for it
        member = hello.member
        self.hello_checks.check_incarnation(hello, channel)
        session = self._sessions.get(member)
        state = channel.roster.get(member)
        if session is not None and state is not None and hello.resume_term == self.decisions.term:
            channel.roster.connected(member, now)
            self._attach(session, connection, hello.received, channel.welcome(state, session.received))
            return session
        if hello.resume_term == self.decisions.term:
            raise channel.roster.fenced_error(hello)
        if session is not None:
            self.lose(member, "left")  # its Welcome never arrived, so it starts again
        store = self._store.address[0]
        check_reach(hello, self.hello_checks.process, address, seen_as or store, store)
        watch = self.hello_checks.watch(hello, member)
        session = MemberSession(member, channel)
        session.watch = watch
        self._sessions[member] = session
        try:
            state, older = channel.join(hello, address, now)
            state.granted_at = now
        except errors.ReplicasError:
            self._close_session(member)
            raise
        self._attach(session, connection, 0, channel.welcome(state, 0))
        if older is not None:
            self._fence(older.hello)
        self._apply(channel)
        if watch is not None:
            watch.start(lambda: self._exited(session))
        return session

    def _attach(
        self, session: MemberSession, connection: MemberConnection, received: int, welcome: wire.Welcome
    ) -> None:
        """Use ``connection``: write ``welcome``, then messages above ``received``."""
        session.attach(connection, received, welcome)
        connection.on_bytes = lambda: self._heard(session)

    def _heard(self, session: MemberSession) -> None:
        """Called when a member's bytes come: renew its lease, send an ack if due."""
        channel, now = self._channel(session.member), self._now()
        if channel is not None:
            channel.roster.note_heard(session.member, now)
            if now - session.wrote_at >= ACK_BYTES_S:
                session.send(wire.Ack())

    def detach(self, session: MemberSession, connection: MemberConnection) -> None:
        """Stop writing to ``connection``, which has ended; its member may reconnect."""
        channel = self._channel(session.member)
        if session.detach(connection) and channel is not None:
            channel.roster.disconnected(session.member, self._now())

    def _channel(self, member: Member) -> ChannelState | None:
        """Return the channel of a member, or None if the member has no session."""
        session = self._sessions.get(member)
        return session.channel if session is not None else None

    def _fence(self, hello: wire.Hello) -> None:
        """Tell ``hello``'s member that a later join replaced it; end its session."""
        session = self._sessions.get(hello.member)
        if session is not None:
            error = session.channel.roster.fenced_error(hello, heard=True)
            session.send(wire.Refused(wire.WireError.of(error)))
        self._close_session(hello.member)

    def _close_session(self, member: Member) -> None:
        """End the member's session, if any; the server still writes its messages."""
        session = self._sessions.pop(member, None)
        if session is not None:
            session.close()

    def _exited(self, session: MemberSession) -> None:
        """Lose an ended process's member once its input is read, or after 0.25 s."""
        if session.watch is not None:
            session.watch.close()
            session.watch = None
        if session.connection is None:
            self.lose(session.member, "exited")
            return
        session.on_detach = lambda: self.lose(session.member, "exited")  # or the timer below, if others hold its socket
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self.lose, session.member, "exited")

    def lose(self, member: Member, reason: str) -> None:
        """Remove the member for this reason; it can come back only by a new join."""
        if (channel := self._channel(member)) is not None:
            channel.lose(member, reason, self._now())
            self._apply(channel)

    def change(self, channel: ChannelState, change: Callable[[ChannelState, float], None]) -> None:
        """Call ``change(channel, loop time)``; send and record what follows from it."""
        change(channel, self._now())
        self._apply(channel)

    def change_all(self, change: Callable[[ChannelState, float], None]) -> None:
        """Call ``change(channel, loop time)`` for each; carry out what follows."""
        for channel in self.channels.values():
            self.change(channel, change)

    def expel(self, session: MemberSession, error: errors.ReplicasError, reason: str) -> None:
        """Send the member of a session ``error``, then lose it for ``reason``."""
        session.send(wire.Refused(wire.WireError.of(error)))
        self.lose(session.member, reason)

    def without_store(self) -> None:
        """Have all channels form no process groups until a store is up."""
        self.change_all(lambda channel, _: channel.lanes.store_lost())

    def store_changed(self, up: bool) -> None:
        """Tell all channels that a store is ``up`` at a new address, or has ended."""
        for name in self.channels:
            self._subscribers.emit(StoreChanged(name, up))
        if up:
            self.change_all(ChannelState.store_moved)
        else:
            self.without_store()

    def receive(self, session: MemberSession, frame: wire.MemberFrame) -> bool:
        """Handle a member's message, and renew its lease. Return False if the caller
        must cut the connection: there is no session, or a message before is missing."""
        member, channel = session.member, self._channel(session.member)
        if channel is None:
            return False
        now = self._now()
        self._end_silence(now)
        channel.roster.note_heard(member, now)
        session.acknowledge(frame.ack)
        if isinstance(frame.body, wire.Heartbeat):
            if session.connection is not None:
                channel.roster.note_heard(member, now, session.connection.rtt_s())
            session.send(wire.Ack())
            return True
        accepted = session.accept(frame.seq)
        if accepted is None:
            return False
        if accepted:
            if self.tap is not None:
                self.tap(channel, frame.body)
            if isinstance(frame.body, wire.Bye):
                channel.lose(member, "left", now)
            else:
                channel.receive(member, frame.body, now)
            self._apply(channel)
        return True

    def close(self) -> None:
        """Cancel reads of manifests; release memory that is held for the channels."""
        for task in self._tasks:
            task.cancel()
        self._keeper.close()

    def refused(self, reason: str) -> None:
        """Count a connection or message that was refused for this reason."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    # ------------------------------------------------------------ effects

    def _apply(self, channel: ChannelState) -> None:
        """Apply queued effects until a write to disk fails; a later call goes on."""
        outlet = self._outlets[channel.config.name]
        outlet.due.extend(channel.take_effects())
        if outlet.applying:  # called by _do(): the loop below continues with it
            return
        outlet.applying = True
        try:
            while outlet.due:
                effect = outlet.due[0]  # stays the first until it is on disk
                if isinstance(effect, Decision) and not self._recorded(channel, outlet, effect):
                    return
                outlet.due.popleft()
                self._do(channel, effect)
        finally:
            outlet.applying = False

    def _recorded(self, channel: ChannelState, outlet: _PendingEffects, decision: Decision) -> bool:
        """Write ``decision``, the first effect of ``outlet``, to disk; blocks. Return
        False if that failed, after a log line: the caller must keep it and retry."""
        outlet.tried_at = outlet.tried_at or self._now()
        decision = decision if decision.at else msgspec.structs.replace(decision, at=time.time())
        try:
            self.decisions.append(decision)
        except OSError as exc:
            if channel.told.disk_problem != str(exc):
                channel.told.disk_problem = str(exc)
                log.error("writing version %d of %s to disk again: %s", decision.version, decision.channel, exc)
            return False
        outlet.due = deque(effects.with_commit(outlet.due, decision.version, self._now() - outlet.tried_at))
        channel.told.disk_problem, outlet.tried_at = "", 0.0
        channel.told.recorded(decision)
        return True

    def _do(self, channel: ChannelState, effect: Effect) -> None:
        """Carry out one effect (send, sweep, keep); pass an event to subscribers."""
        if self.tap is not None:
            self.tap(channel, effect)
        match effect:
            case effects.Send(member, message):
                session = self._sessions.get(member)
                if isinstance(message, wire.ReceiveGrant | wire.LoadDecided) and (state := channel.roster.get(member)):
                    state.granted_at = self._now()
                if session is not None and not session.send(message, self._encoded.of(message)):
                    self.refused("overflow")
                    channel.lose(member, "overflow", self._now())
                    self._apply(channel)
            case effects.SweepStore():
                self._store.sweep(effect.prefix)
            case effects.ReplaceStore():
                self._store.replace((effect.host, effect.port))
            case effects.Keep():
                place = self._keeper.keep((effect.channel, effect.owner), effect.place, effect.version)
                channel.keeping.kept(effect.owner, effect.version, place)
            case effects.Read():
                keep_until_done(asyncio.create_task(self._read(channel, effect), name="manifest"), self._tasks)
            case effects.LetGo():
                self._keeper.let_go((effect.channel, effect.owner))
            case Decision():
                pass  # it is on disk
            case effects.Reply(tell, outcome):
                tell(outcome)
            case event:
                if isinstance(event, effects.MemberLost):
                    self._on_lost(event)
                elif isinstance(event, effects.SyncEnded):
                    channel.told.last = event.record
                elif isinstance(event, effects.StepFell):
                    text = 'channel %s: version %d has meta["step"] = %s, an earlier one had %s: was a checkpoint lost?'
                    log.warning(text, event.channel, event.version, event.step, event.before)
                elif isinstance(event, effects.LoadFailed):
                    what = "keeps its version and refuses" if event.kept else "failed to load"
                    about = (event.group, event.replica, what, event.version, event.channel, event.reason)
                    log.warning("%s/%d %s version %d of channel %s: %s", *about)
                self._subscribers.emit(event)

    async def _read(self, channel: ChannelState, effect: effects.Read) -> None:
        """Read the manifests named by ``effect`` on a thread; give them, or the error,
        to the channel, and carry out what follows."""
        found: Joined | errors.ReplicasError
        try:
            found = await asyncio.to_thread(read, effect)
        except errors.ReplicasError as error:
            found = error
        except Exception as error:
            log.exception("failing a publish on channel %s after a bug; please report this", channel.config.name)
            found = errors.InternalError(f"{type(error).__name__}: {error}")
        channel.read(effect, found, self._now())
        self._apply(channel)

    def _on_lost(self, event: effects.MemberLost) -> None:
        """Log a member's loss; tell the member the reason, and close its session."""
        why = event.reason
        log.info("removed %s from channel %s: %s", event.member, event.channel, effects.LOSS_WORDS.get(why, why))
        if event.reason == "fenced":
            return  # _fence sends the reason, after the Welcome of the new incarnation
        session = self._sessions.get(event.member)
        if session is not None and event.reason != "left":
            text = f"{event.member} was declared lost ({effects.LOSS_WORDS.get(why, why)})"
            error = errors.Fenced(text, channel=event.channel, members=[event.member.name], hint="join again")
            session.send(wire.Refused(wire.WireError.of(error)))
        self._close_session(event.member)

    # ------------------------------------------------------------ time

    def _end_silence(self, now: float) -> None:
        """Record that a member is heard at loop time ``now``. If that ends an excused
        silence of all, extend the remote members' leases by it, 10 s at most."""
        grace_s = self._silence.end_silence(now)
        if grace_s:
            log.warning("extending heartbeat timeouts by %.1f s, after a time in which no member was heard", grace_s)
            self._extend_leases(0.0, now, grace_s)

    def _extend_leases(self, silence_s: float, now: float, grace_s: float = 0.0) -> None:
        """Extend leases of connected remote members by ``silence_s``, in which none was
        heard; those that were not suspect before get ``grace_s``, too."""
        for channel in self.channels.values():
            channel.roster.extend_leases(self._remote_members, silence_s, now, grace_s=grace_s)

    @property
    def _remote_members(self) -> set[Member]:
        """Members on other hosts that are still connected."""
        sessions = self._sessions.items()  # a member with a watch is on this machine, where its death is seen
        return {member for member, session in sessions if session.watch is None and session.connection is not None}

    @staticmethod
    def _now() -> float:
        """Return the loop's time in seconds."""
        return asyncio.get_running_loop().time()

    async def tick_forever(self) -> None:
        """Check leases and deadlines ten times a second. If this process was suspended,
        extend the leases by that time first, and check them a bit later."""
        clock = PauseClock(self._now() + TICK_S)
        while True:
            await asyncio.sleep(max(0.0, clock.due - self._now()))
            now = self._now()
            self.lag_s = max(now - clock.due, self.lag_s * 0.9)  # decays in a second or so
            pause_s = clock.measure_pause(now)
            clock.due = now + (SETTLE_S if pause_s else TICK_S)
            if pause_s:
                log.warning("extending all heartbeat timeouts by %.1f s, in which this process did not run", pause_s)
                for channel in self.channels.values():
                    channel.roster.skip_pause(pause_s, now)
                continue  # check leases after the sockets were read
            if not self._remote_members:
                self._silence.note_no_members()
            elif silence_s := self._silence.take_uncounted_s(now):
                self._extend_leases(silence_s, now)
            for name, channel in self.channels.items():
                try:
                    channel.tick(now)
                    self._apply(channel)
                except Exception:  # the deadlines and leases of all channels depend on this loop
                    log.exception("continuing after a bug in the timers of channel %s; please report this", name)

"""The session thread's side of one channel: what all parts of it share.

Theory of operation
===================

A :class:`Hub` belongs to one channel of this process. It receives every message of the session and gives it to the part
that knows it (publishes, receives, transfers, lanes, operations, watches); each part registers its own handlers. All of
this runs on the session thread, without locks. The few values that other threads read (``latest``, ``loaded``, ``epoch``,
``members``, ``over``) are replaced as a whole, never changed in place.

**Slots.** The arena is used from several threads, but what must be kept is decided here. Protected are: the newest
committed version, the one assigned to this replica and not yet loaded, those being published, and those received and not
yet committed or discarded. Open updates and running transfers pin theirs. After each change those who wait for a slot
(a publish on its own thread, a transfer here) look again.

**Two ways to lose the coordinator.** A broken connection alone changes nothing: the session goes on after the reconnect.
A new coordinator (another term) knows nothing of what was under way: publishes and operations end (``OutcomeUnknown``
where the decision may have been taken, else ``Disconnected``), transfers and lanes are dropped, asks and watches are sent
again. Whatever happens, each operation also has a timer of its own here, a little behind its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch

from replicas import errors
from replicas.channel.loop import SessionLoop
from replicas.channel.pending import Pending
from replicas.channel.session import Session
from replicas.core.identity import Member
from replicas.messages import (
    Ack,
    Assigned,
    ChannelSettings,
    Commit,
    Discard,
    Dropped,
    FromCoordinator,
    FromMember,
    HeldVersion,
    Hello,
    Meta,
    Progress,
    View,
    Welcome,
    WireError,
)
from replicas.sidecar.client import SidecarDied, SidecarFailed
from replicas.weights.arena import Arena

__all__ = ["GRACE_S", "Hub", "Part", "as_wire_error"]

logger = logging.getLogger("replicas.channel")

GRACE_S = 5.0
"""How long after its deadline an operation waits for the coordinator's verdict before it ends by itself."""
DOWN_S = 60.0
"""How long without a session before that which has no deadline of its own fails."""


class Part(Protocol):
    """One part of a channel; called on the session thread."""

    def handlers(self) -> dict[type, Callable[[Any], None]]: ...

    def new_term(self) -> None:
        """The coordinator is a new one."""

    def fail_all(self, error: errors.ReplicasError) -> None:
        """The session is over: end everything with ``error``."""


class Hub:
    """See the module's header."""

    settings: ChannelSettings
    arena: Arena

    def __init__(self, loop: SessionLoop, hello: Hello, forkserver: str | None, name: str) -> None:
        self.loop = loop
        self.name = name
        self.member = Member(hello.group, hello.replica, hello.rank, hello.incarnation)
        self.forkserver_name = forkserver
        self.latest = 0
        self.loaded = 0
        self.epoch = 0
        self.members: tuple[Member, ...] = ()
        self.publishes_made = 0
        self.over: errors.ReplicasError | None = None
        self.assigned = 0
        self.publishing: set[int] = set()
        self.prepared: set[int] = set()
        self.metas: dict[int, Meta] = {}
        self.digests: dict[int, str] = {}
        self.slots_changed = threading.Condition()
        self.slots_generation = 0
        self._slots_event = asyncio.Event()
        self._session: Session | None = None
        self._parts: tuple[Part, ...] = ()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._hold_listeners: list[Callable[[], None]] = []
        self._commit_listeners: list[Callable[[], None]] = []
        self._settle_listeners: list[Callable[[int, bool], None]] = []
        self._step = self._step_sent = 0
        self._down_since = 0.0
        self._down_reason = ""
        self._down_timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._failures: list[Pending[Any]] = []

    # ------------------------------------------------------------ set-up

    def start(self, session: Session, parts: tuple[Part, ...]) -> None:
        self._session = session
        self._parts = parts
        self._handlers = {
            Ack: lambda message: None,
            View: self._view,
            Commit: self._commit,
            Discard: self._discard,
            Assigned: self._assigned,
        }
        for part in parts:
            self._handlers.update(part.handlers())

    @property
    def session(self) -> Session:
        if self._session is None:
            raise errors.InternalError("the channel has no session yet")
        return self._session

    @property
    def leader(self) -> bool:
        return self.member.rank == 0

    # ------------------------------------------------------------ for the parts

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` on the session thread, from any thread. If it raises, the channel ends: a bug."""
        self.loop.call(self._guarded, function, *args)

    def after(self, delay_s: float, function: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Session thread: call ``function(*args)`` later."""
        return self.loop.loop.call_later(max(0.0, delay_s), self._guarded, function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Session thread: run ``coroutine`` as a task. If it raises, the channel ends: a bug."""
        return self.loop.spawn(self._guarded_task(coroutine), f"{self.name}: {name}")

    def send(self, message: FromMember) -> None:
        if self.over is None:
            self.session.send(message)

    def error(self, kind: type[errors.ReplicasError], message: str, **fields: Any) -> errors.ReplicasError:
        return kind(message, channel=self.name, **fields)

    def no_answer(self, what: str, deadline_s: float) -> errors.ReplicasError:
        """Why ``what`` has not ended by its deadline."""
        if not self.session.connected:
            down_s = time.monotonic() - self._down_since
            return self.error(
                errors.Disconnected,
                f"{what}: no session with the coordinator at {self.session.endpoint} "
                f"for {down_s:.0f} s ({self._down_reason})",
            )
        return self.error(errors.DeadlineExceeded, f"{what} did not end within its {deadline_s:g} s")

    def note_failure(self, pending: Pending[Any]) -> None:
        """A publish or operation failed: if nobody waits for it, it surfaces later."""
        with self._lock:
            self._failures = [known for known in self._failures if known._unobserved_error() is not None]
            self._failures.append(pending)

    def take_failure(self) -> BaseException | None:
        """The oldest failure that nobody was told of; from any thread. The caller tells of it."""
        with self._lock:
            failures, self._failures = self._failures, []
        found = None
        for pending in failures:
            error = pending._unobserved_error()
            pending._observed = True
            if error is not None and found is not None:
                logger.warning("%s: an earlier failure that nobody waited for: %s", self.name, error)
            found = found or error
        return found

    # ------------------------------------------------------------ slots

    def on_hold(self, listener: Callable[[], None]) -> None:
        """Session thread: call ``listener`` whenever a received version became held."""
        self._hold_listeners.append(listener)

    def on_commit(self, listener: Callable[[], None]) -> None:
        """Session thread: call ``listener`` whenever ``latest`` has grown."""
        self._commit_listeners.append(listener)

    def on_settled(self, listener: Callable[[int, bool], None]) -> None:
        """Session thread: call ``listener(version, committed)`` at each commit and each discard."""
        self._settle_listeners.append(listener)

    def version_held(self, version: int, digest: str) -> None:
        self.digests[version] = digest
        if version > self.latest:
            self.prepared.add(version)
        self.protect()
        for listener in self._hold_listeners:
            listener()

    def protect(self) -> None:
        """Session thread: recompute what must not be evicted, and let those who wait for a slot look again."""
        self.arena.protected = {self.latest, self.assigned, *self.publishing, *self.prepared} - {0}
        self._wake_slot_waiters()

    def release(self, version: int) -> None:
        """Session thread: free the slot of ``version``, at once or when its last reader lets go."""
        self.prepared.discard(version)
        self.publishing.discard(version)
        slot = self.arena.find(version)
        if slot is not None and slot.pins == 0:
            self.arena.free(slot)
            self.metas.pop(version, None)
            self.digests.pop(version, None)
        self.protect()

    def slots_event(self) -> asyncio.Event:
        """Session thread: set at the next change of a slot. Take it before you try."""
        return self._slots_event

    def _wake_slot_waiters(self) -> None:
        with self.slots_changed:
            self.slots_generation += 1
            self.slots_changed.notify_all()
        self._slots_event.set()
        self._slots_event = asyncio.Event()

    def _make_arena(self) -> None:
        def on_change() -> None:
            self.call(self._wake_slot_waiters)

        def on_drop(version: int) -> None:
            self.call(self._dropped, version)

        self.arena = Arena(self.settings.slots, name=f"replicas-{self.name}", on_change=on_change, on_drop=on_drop)

    def _dropped(self, version: int) -> None:
        if self.arena.find(version) is None:
            self.metas.pop(version, None)
            self.digests.pop(version, None)
            self.send(Dropped(version))

    # ------------------------------------------------------------ the session's handler

    def held_versions(self) -> tuple[HeldVersion, ...]:
        if not hasattr(self, "arena"):
            return ()
        held = [slot.version for slot in self.arena.slots if slot.state == "held" and slot.image is not None]
        return tuple(HeldVersion(v, self.digests[v]) for v in sorted(held) if self.digests.get(v))

    def loaded_version(self) -> int:
        return self.loaded if hasattr(self, "settings") and self.settings.role in ("target", "both") else 0

    def before_heartbeat(self) -> None:
        if self._step != self._step_sent:
            self._step_sent = self._step
            self.send(Progress(self._step))

    def progress(self, step: int) -> None:
        """From any thread; sent with the next heartbeat."""
        self._step = step

    def welcomed(self, welcome: Welcome, resumed: bool) -> None:
        first = not hasattr(self, "settings")
        self.settings = welcome.settings
        self.epoch = max(self.epoch, welcome.epoch)
        self.latest = max(self.latest, welcome.latest)
        if self._down_timer is not None:
            self._down_timer.cancel()
            self._down_timer = None
        if first:
            self.publishes_made = welcome.publishes
            self._make_arena()
        elif not resumed:
            logger.warning("%s: there is a new coordinator; what was under way has ended", self.name)
            self._step_sent = 0
            for part in self._parts:
                part.new_term()
            self.protect()

    def handle(self, message: FromCoordinator) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._broken(errors.InternalError(f"unexpected message {type(message).__name__}", channel=self.name))
        elif self.over is None:
            self._guarded(handler, message)

    def disconnected(self, reason: str) -> None:
        self._down_since = time.monotonic()
        self._down_reason = reason
        if self.over is None:
            self._down_timer = self.after(DOWN_S, self._down_long)

    def session_over(self, error: errors.ReplicasError) -> None:
        if self.over is not None:
            return
        self.over = error
        if self._down_timer is not None:
            self._down_timer.cancel()
        for part in self._parts:
            part.fail_all(error)
        if hasattr(self, "arena"):
            self._wake_slot_waiters()

    def _down_long(self) -> None:
        for part in self._parts:
            down = getattr(part, "session_down", None)
            if down is not None:
                down(self.no_answer("the wait", DOWN_S))

    # ------------------------------------------------------------ messages about the whole channel

    def _view(self, message: View) -> None:
        self.members = message.members
        self.epoch = message.epoch

    def _commit(self, message: Commit) -> None:
        version, slot = message.version, self.arena.find(message.version)
        self.prepared.discard(version)
        if slot is not None and slot.image is not None:
            ours = self.digests.get(version)
            if ours and message.digest and ours != message.digest:
                logger.warning("%s: version %d here has another digest than the committed one", self.name, version)
                self.release(version)
                self.send(Dropped(version))
            elif message.digest:
                self.digests[version] = message.digest
        if version > self.latest:
            self.latest = version
            for listener in self._commit_listeners:
                listener()
        for settle in self._settle_listeners:
            settle(version, True)
        self.protect()

    def _discard(self, message: Discard) -> None:
        for settle in self._settle_listeners:
            settle(message.version, False)
        self.release(message.version)

    def _assigned(self, message: Assigned) -> None:
        self.assigned = message.version
        self.protect()

    # ------------------------------------------------------------ bugs

    def _guarded(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001  # a bug in a handler must end the waits on this channel, not hang them
            self._broken(error)

    async def _guarded_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:  # noqa: BLE001  # the same for tasks
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        logger.error("%s: the channel ends because of a bug", self.name, exc_info=error)
        self.session_over(
            error
            if isinstance(error, errors.InternalError)
            else errors.InternalError(f"{type(error).__name__}: {error}", channel=self.name)
        )


def as_wire_error(error: BaseException, *, channel: str, phase: str, version: int | None = None) -> WireError:
    """Any failure of ours as data; a kind that the tree of errors does not know is a bug."""
    if isinstance(error, errors.ReplicasError):
        return WireError.of(error)
    text = str(error) or type(error).__name__
    kind: type[errors.ReplicasError]
    if isinstance(error, (SidecarDied, SidecarFailed)):
        kind = errors.SyncError
    elif isinstance(error, TimeoutError):
        kind, text = errors.DeadlineExceeded, f"{phase} did not end in time"
    elif isinstance(error, OSError):
        kind = errors.WorldError
    elif isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        kind = errors.NoCapacity
    else:
        kind, text = errors.InternalError, f"{type(error).__name__}: {text}"
    return WireError.of(kind(text, channel=channel, phase=phase, version=version))

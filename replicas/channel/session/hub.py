"""Message routing and shared state of one channel, on the session thread.

A :class:`Hub` routes each message to the :class:`Part` that handles its type. The few
values that other threads read are replaced as a whole, so there are no locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, ParamSpec

import msgspec
import torch

from replicas import errors
from replicas import messages as wire
from replicas.carry.rank_side import PullFailed
from replicas.channel.session.held_versions import HeldVersions, Loans
from replicas.channel.session.loop import SessionLoop
from replicas.channel.session.pending import Failures, Promise
from replicas.channel.session.session import Session
from replicas.common.logs import Log
from replicas.linux.helper_process import HelperDied
from replicas.linux.scarce import lacks_threads, no_process
from replicas.memory.beacon import find
from replicas.messages.bounds import text_of
from replicas.messages.identity import Member
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed
from replicas.weights.memory.arena import Arena

_P = ParamSpec("_P")
logger = Log("replicas.channel")
_APART = (
    "receiving versions over the network, which is slower: this process cannot share memory with other members on "
    "this machine. Containers share memory if they have one network namespace or one pid namespace "
    "(docker: --network or --pid = host or container:NAME; Kubernetes: one Pod, or hostNetwork), and one user"
)

GRACE_S = 5.0
"""Seconds after its deadline for which an operation still waits for a verdict."""
BYE_TIMEOUT_S = 2.0
DOWN_S = 60.0
"""Seconds without a session after which receives and watches fail early."""


class Part:
    """A part of a channel, such as its publishes; by default, callbacks do nothing."""

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {}

    def new_term(self) -> None:
        """Handle a restarted coordinator: a part announces, or ends, its open work."""

    def fail_all(self, error: errors.ReplicasError) -> None:
        """End all work with ``error``, as the session ended; default: as new_term."""
        self.new_term()

    def session_down(self, error: errors.ReplicasError) -> None:
        """Fail waits with ``error``; called after each 60 s without a session."""

    def paused(self) -> None:
        """Drop what may be out of date, as this process was suspended for a while."""

    def versions_grown(self) -> None:
        """Handle that another version is complete here, or a newer one committed."""

    def settled(self, version: int, committed: bool) -> None:
        """Handle the verdict on ``version``: it was committed, or (False) discarded."""

    def filled_up_to(self, version: int, nbytes: int) -> None:
        """Handle growth of a slot being packed: its first ``nbytes`` are valid."""

    def slot_wanted(self) -> None:
        """Release optional slots: a publish or receive waits for a free slot."""


class Hub:
    """The shared state of one channel; routes messages and events to its parts.

    :ivar hello: the last Hello that was sent.
    :ivar gpu: UUID of the GPU current at join (each thread has its own); empty: none.
    :ivar device: UUID of the GPU that holds the slots (staging "device"), or empty.
    :ivar address: IP address of this member, as the coordinator sees it.
    :ivar down_since: time of the last loss of the session, or 0; the outage's id.
    """

    session: Session
    settings: wire.ChannelSettings

    def __init__(self, loop: SessionLoop, hello: wire.Hello, forkserver: str | None) -> None:
        """Make the state from ``hello``, with which this process joins. ``forkserver``
        is the socket of the node's forkserver; if None, this process starts its own."""
        self.loop = loop
        self.hello = hello
        self.name = name = hello.channel
        self.member = hello.member
        self.forkserver_name = forkserver
        self._told_apart = False
        self._locates = 0
        """Number of Locate messages so far; replies are not numbered."""
        self.held_versions = HeldVersions(name, self.call, lambda version: self.send(wire.Dropped(version)))
        self.loans = Loans(self.after)
        self.failures = Failures(name)
        self.loaded = 0
        self.epoch = 0
        self.members: tuple[Member, ...] = ()
        self.publishes_made = 0
        self.several_hosts = False
        self.device = ""
        self.address = ""
        self.over: errors.ReplicasError | None = None
        self.down_since = 0.0
        self._parts: tuple[Part, ...] = ()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._step = self._step_sent = 0
        self._down_reason = ""

    def start(self, session: Session, parts: tuple[Part, ...]) -> None:
        """Set session and parts, and register the parts' handlers; send nothing."""
        self.session = session
        self._parts = parts
        self.loop.call(self.loop.users.add, self._loop_broken)  # changed on the session thread only
        own = (wire.Ack, wire.Assigned, wire.Describe, wire.Discard, wire.Labels, wire.Locate, wire.Released)
        self._handlers = {**dict.fromkeys(own, self._handle), wire.View: self._view, wire.Commit: self._commit}
        for part in parts:
            self._handlers.update(part.handlers())

    @property
    def arena(self) -> Arena:
        """The slots (memory for versions) of this process. It raises AttributeError
        before the first Welcome (answer to Hello), which has their number."""
        return self.held_versions.arena

    @property
    def latest(self) -> int:
        """The newest committed version known here, or 0."""
        return self.held_versions.latest

    @property
    def leader(self) -> bool:
        """True if this is rank 0 of its replica."""
        return self.member.rank == 0

    @property
    def gpu(self) -> str:
        """UUID of the GPU that was current at the join, or ""."""
        return next(iter(self.hello.cuda_devices), "")

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Any thread: queue a call on the session thread; errors end the channel."""
        self.loop.call(self._guarded, function, *args)

    def after(self, delay_s: float, function: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Session thread: call a function after ``delay_s``; errors end the channel."""
        return self.loop.loop.call_later(max(0.0, delay_s), self._guarded, function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Session thread: run ``coroutine`` as a task; an error ends the channel."""
        return self.loop.spawn(self._guarded_task(coroutine), f"{self.name}: {name}")

    def send(self, message: wire.FromMember) -> None:
        """Session thread: queue a message; do nothing once the channel is over. Raise
        UsageError if it is too large."""
        if self.over is None:
            self.session.send(message)

    def error(self, kind: type[errors.ReplicasError], message: str, **fields: Any) -> errors.ReplicasError:
        """Return (do not raise) an error of type ``kind`` that names this channel."""
        return kind(message, channel=self.name, **fields)

    def overdue_error(self, what: str, deadline_s: float, wanted: float = 0) -> errors.ReplicasError:
        """Return (do not raise) DeadlineExceeded for the work ``what`` (a text), or
        Disconnected if there is no session. ``wanted``: of a wait for a version, the
        oldest that would end it, which the text names if it is not published; else
        0."""
        if not self.session.connected:
            for_s, where = time.monotonic() - self.down_since, f"{self.session.endpoint} for"
            text = f"{what} gave up: no session with the coordinator at {where} {for_s:.0f} s ({self._down_reason})"
            return self.error(errors.Disconnected, text)
        lack = f": version {wanted} or a newer one is not published yet (the newest is {self.latest})"
        text, hint = (lack, "see what the source of the channel does") if wanted > self.latest else ("", None)
        return self.error(errors.DeadlineExceeded, f"{what} did not end within its {deadline_s:g} s{text}", hint=hint)

    def pending(self, what: str) -> Promise[Any]:
        """Return a Promise of ``what`` (a text), failed if the session thread ends."""
        return Promise(f"{what} on {self.name}", self.loop.end)

    def tell(self, event: Callable[Concatenate[Any, _P], None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Session thread: call the method ``event`` of :class:`Part` on each part."""
        for part in self._parts:
            getattr(part, event.__name__)(*args, **kwargs)

    def update_hello(self, hello: wire.Hello) -> wire.Hello:
        """Return a copy of ``hello`` with this member's state now; store it as sent."""
        known = self.held_versions
        self.hello = msgspec.structs.replace(
            hello,
            replica=self.member.replica,
            any_replica=hello.any_replica and not known.opened,
            held=known.held(),
            lent=known.lent(),
            loaded=self._loaded_version(),
            epoch=self.epoch,
            **known.decisions(),
            publishes=self.publishes_made,
        )
        return self.hello

    def _loaded_version(self) -> int:
        """Return the version that this rank serves, 0 if it is not a target."""
        return self.loaded if self.held_versions.opened and self.settings.role in ("target", "both") else 0

    def before_heartbeat(self) -> None:
        """Send the user's step to the coordinator if it has changed."""
        if self._step != self._step_sent:
            self._step_sent = self._step
            self.send(wire.Progress(self._step))

    def progress(self, step: int) -> None:
        """Any thread: have the user's training step sent with the next heartbeat."""
        self._step = step

    def welcomed(self, welcome: wire.Welcome, resumed: bool) -> None:
        """Take over settings and versions from a Welcome (the answer to a Hello).

        The first one makes the slots. A later one ends the channel if its ``staging``
        differs. If it is not ``resumed``, it is a new coordinator's: announce all open
        work to it.
        """
        first = not self.held_versions.opened
        if not first and welcome.settings.staging != self.settings.staging:
            now = welcome.settings.staging
            text = f'the memory of this process does not fit staging = "{now}", which the coordinator now has'
            self._end(self.error(errors.Preflight, text, phase="join", hint="restart all replicas with the new config"))
            return
        self.settings = welcome.settings
        self.address = welcome.address
        self.epoch = max(self.epoch, welcome.epoch)
        if first:
            self.member = msgspec.structs.replace(self.member, replica=welcome.replica)
            self.publishes_made = welcome.publishes
            if welcome.settings.staging == "device":
                self.device = self.gpu
            self.held_versions.open(self.settings.slots, self.device)
        elif not resumed:
            self._guarded(self._new_coordinator)
        self._record_commit(welcome.latest, "")  # a Welcome names no digest

    def _new_coordinator(self) -> None:
        """Announce state and open work, of which a new coordinator knows nothing."""
        logger.warning("channel %s: continuing unfinished operations with a restarted coordinator", self.name)
        self._step_sent = 0  # so that the next heartbeat sends it again
        self._locates += 1  # the new coordinator must not get an answer to the old one's Locate
        self.held_versions.mark_doubtful()
        # changes since the Hello: messages since then were discarded
        held = {found.version for found in self.held_versions.held()}
        for told in self.hello.held:
            if told.version not in held:
                self.send(wire.Dropped(told.version))
        loaded = self._loaded_version()
        if loaded and loaded != self.hello.loaded:
            self.send(wire.Loaded(loaded, 0.0))
        self.tell(Part.new_term)
        self.held_versions.protect()
        self.send(wire.Resumed())  # last: it ends the announcement

    def handle(self, message: wire.FromCoordinator) -> None:
        """Call the handler of a message; a type without one ends the channel."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self._end_for_bug(errors.InternalError(f"unexpected message {type(message).__name__}", channel=self.name))
        elif self.over is None:
            self._guarded(handler, message)

    def paused(self) -> None:
        """Tell all parts that this process was suspended for a while."""
        if self.over is None:
            self._guarded(self.tell, Part.paused)

    def disconnected(self, reason: str) -> None:
        """Record when and why the connection was lost; fail waits if it lasts 60 s."""
        self.down_since = time.monotonic()
        self._down_reason = reason
        self.after(DOWN_S, self._report_long_outage, self.down_since)

    def session_over(self, error: errors.ReplicasError) -> None:
        """End all parts with ``error``, and release all versions; once only."""
        if self.over is not None:
            return
        self.over = error  # first: parts that end must send nothing more
        self.loop.users.discard(self._loop_broken)
        ends: list[Callable[[], None]] = [partial(part.fail_all, error) for part in self._parts]
        for end in (*ends, self.held_versions.close):
            try:
                end()
            except Exception:  # the other parts must still end
                logger.exception("channel %s: going on after a bug in its end; please report this", self.name)

    def _report_long_outage(self, outage: float) -> None:
        """Fail receives and watches, now and each 60 s, if offline since ``outage``."""
        if self.over is None and not self.session.connected and outage == self.down_since:
            self.after(DOWN_S, self._report_long_outage, outage)  # again: more waits may begin
            self.tell(Part.session_down, self.overdue_error("the wait", DOWN_S))

    def _view(self, message: wire.View) -> None:
        """Take over a new epoch; its View message lists all members, or the changes."""
        kept = set(self.members).difference(message.left) if message.since else ()
        self.members = tuple(sorted({*message.members, *kept}))
        self.epoch = message.epoch

    def _record_commit(self, version: int, digest: str, content: int = 0) -> None:
        """Record a commit; tell the parts if it is the newest. ``digest`` may be "".
        ``content``: the older version whose bytes it has; 0: it has its own."""
        if self.held_versions.committed(version, digest, content):
            self.tell(Part.versions_grown)

    def _commit(self, message: wire.Commit) -> None:
        """Record a commit; drop our copy of the version if its digest differs."""
        version, digest, content = message.version, message.digest, message.content or message.version
        if digest and content in self.arena.images():
            if not (ours := self.held_versions.digest(content)) and content in self.held_versions.doubtful:
                self.spawn(self._compare(content, digest), f"digest of version {content}")
            elif ours and ours != digest:
                self._release_wrong_digest(content)
            else:
                self.held_versions.record_facts(content, digest=digest)
        self._record_commit(version, digest, message.content)
        self.tell(Part.settled, version, True)

    async def _compare(self, version: int, digest: str) -> None:
        """Digest a version on another thread; release it if that is not ``digest``."""
        if not await self.held_versions.verify_doubtful(version, digest):
            self._release_wrong_digest(version)

    def _release_wrong_digest(self, version: int) -> None:
        """Free a version's slot, and tell the coordinator that it was dropped."""
        logger.warning("channel %s: dropping version %d: its digest is not that of the commit", self.name, version)
        self.held_versions.release(version)
        self.send(wire.Dropped(version))

    def _handle(self, message: wire.FromCoordinator) -> None:
        """Record what a message tells of versions here, or answer what it asks."""
        match message:
            case wire.Assigned():
                self.set_assigned(message.version)
            case wire.Describe():
                self.send(self.held_versions.describe(message.version))
            case wire.Discard():
                self.tell(Part.settled, message.version, False)
                self.held_versions.release(message.version)
            case wire.Locate():
                self._locates += 1
                self.spawn(self._locate(message.beacons, self._locates), "host")
            case wire.Labels():
                self.held_versions.set_labels(message.labels, message.kept)
            case wire.Released():
                self.arena.released(message.version)

    async def _locate(self, beacons: tuple[wire.Beacon, ...], number: int) -> None:
        """Send the index of the first of ``beacons`` (processes) on this host, or -1.

        :param number: of the question; nothing is sent if a newer one has come.
        """
        try:
            found = await asyncio.to_thread(find, beacons)  # may block on another process
        except RuntimeError:  # no thread can be started
            found = -1
        if number != self._locates:
            return
        self.send(wire.Located(found))
        if found < 0 and not self._told_apart:
            self._told_apart = True
            logger.warning("channel %s: %s", self.name, _APART)

    def set_assigned(self, version: int) -> None:
        """Session thread: do not evict ``version``, to be loaded next here; 0: none."""
        self.held_versions.assigned = version
        self.held_versions.protect()

    def _guarded(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)``; an exception is a bug, and ends the channel."""
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001  # any error must end the waits on this channel, not hang them
            self._end_for_bug(error)

    async def _guarded_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Await ``coroutine``; an exception is a bug, and ends the channel."""
        try:
            await coroutine
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001  # the same for tasks
            self._end_for_bug(error)

    def _loop_broken(self, error: errors.ReplicasError) -> None:
        """End the channel with ``error``, after the end of the session loop."""
        error.channel = self.name
        self._end(error)

    def _end_for_bug(self, error: BaseException) -> None:
        """Log ``error`` as a bug, and end the channel with InternalError."""
        logger.error("ending channel %s because of a bug; please report this", self.name, exc_info=error)
        if lacks_threads(error):
            error = self.error(errors.NoCapacity, no_process())
        elif not isinstance(error, errors.InternalError):
            error = errors.InternalError(f"{type(error).__name__}: {text_of(error)}", channel=self.name)
        self._end(error)

    def _end(self, error: errors.ReplicasError) -> None:
        """End all parts with ``error``; start a task that closes the session."""
        self.session_over(error)
        self.loop.spawn(self.session.close("failed", BYE_TIMEOUT_S), f"{self.name}: ends")


def as_wire_error(error: BaseException, *, channel: str, phase: str, version: int | None = None) -> wire.WireError:
    """Convert an exception for a message; an unknown type becomes an InternalError.

    :param phase: name of the work that failed, such as ``transfer``, for the error.
    """
    if isinstance(error, errors.ReplicasError):
        return wire.WireError.of(error)
    if isinstance(error, SidecarFailed):
        return wire.WireError.of(error.as_error(channel=channel, phase=phase, version=version))
    text = text_of(error) or type(error).__name__
    kind: type[errors.ReplicasError]
    if isinstance(error, PullFailed):
        kind, text = errors.SyncError, f"fetching the version from other hosts failed: {text}"
    elif isinstance(error, HelperDied):  # a sidecar, or a carrier
        kind = errors.SyncError
    elif isinstance(error, TimeoutError):
        kind, text = errors.DeadlineExceeded, f"{phase} did not end before its deadline"
    elif isinstance(error, OSError):
        kind = errors.WorldError
    elif "after shutdown" in text or "interpreter shutdown" in text:  # concurrent.futures has no type for it
        kind, text = errors.Gone, f"the process is ending; {phase} cannot continue"
    elif isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        kind = errors.NoCapacity
    elif lacks_threads(error):
        kind, text = errors.NoCapacity, no_process()
    elif isinstance(error, torch.AcceleratorError):
        kind, text = errors.WorldError, f"the GPU has failed, and this process can no longer use it: {text}"
    else:
        kind, text = errors.InternalError, f"{type(error).__name__}: {text}"
    return wire.WireError.of(kind(text, channel=channel, phase=phase, version=version))

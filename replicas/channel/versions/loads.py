"""Report what becomes of this rank's update: it can load it, has loaded it, or failed.

CanLoad -> :mod:`replicas.core.versions.lockstep` decides -> LoadDecided; then Loaded or
LoadFailed. There is at most one open update, so at most one wait for a decision. It has
no timer: the coordinator enforces the channel's deadline, and a new coordinator gets
CanLoad again. After a long time without a session the update is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.hub import Hub
from replicas.channel.session.pending import Promise
from replicas.channel.versions.owner import Base, Owner, Score, Tell
from replicas.messages import CanLoad, LoadDecided, Loaded, LoadFailed, WireError
from replicas.messages.bounds import text_of
from replicas.weights.memory.arena import Slot


class _Wait(NamedTuple):
    """``tell`` is a weak reference, so that a dropped update is noticed."""

    said: CanLoad
    pending: Promise[None]
    tell: weakref.WeakMethod[Tell]


class Loads(Owner):
    """Reports this rank's loads to the coordinator: can load, has loaded, or failed.

    There is at most one open update (version received), so at most one open report.

    :param on_touch: called when a caller begins to use an update: drop all references
        to it.
    :ivar refused: the version that was refused, if that was the last report; else 0.
    """

    def __init__(self, hub: Hub, score: Score, on_touch: Callable[[], None]) -> None:
        """Start without reports.

        :param score: reports scores of a version, by name; for :meth:`Update.report`.
        :param on_touch: called on the caller's thread when the caller begins to use an
            update: it must drop all references to the update.
        """
        super().__init__(lambda: hub.arena, score)
        self._hub, self._on_touch = hub, on_touch
        self.refused = self._in_hand = 0
        self._failure: LoadFailed | None = None
        self._wait: _Wait | None = None

    @property
    def together(self) -> bool:
        """True if all targets load a version, or none does (``adopt_together``)."""
        return self._hub.settings.adopt_together

    # ------------------------------------------------------------ caller's thread

    def await_decision(self, version: int, whole: bool, tell: Tell) -> Promise[None]:
        """Report that this rank can load; return the pending decision.

        It ends when all targets load the version now, and fails if none does. Without
        ``adopt_together`` it has ended already.

        :param whole: the rank has checked for all ranks of its replica.
        :param tell: a method, called on the session thread just before the Promise
            ends: with None, or with the error. Held weakly.
        """
        pending: Promise[None] = self._hub.pending(f"adoption of version {version}")
        if self.together:
            self._hub.call(self._send_can_load, _Wait(CanLoad(version, whole), pending, weakref.WeakMethod(tell)))
        else:
            pending.resolve(None)
        return pending

    def touched(self, version: int) -> None:
        """Caller's thread: drop our references to an update that a caller now uses.

        Only the caller then keeps the update, so that its loss is noticed.
        """
        self._in_hand = version
        self._on_touch()

    def loaded(self, version: int, load_s: float, base: Base | None) -> None:
        """Caller's thread: record that this rank serves ``version``; have Loaded sent.

        :param load_s: seconds of the load.
        :param base: the loaded version's memory, to find later changes; None: there is
            none.
        :raises replicas.errors.ReplicasError: the error that ended the channel; nothing
            was recorded.
        """
        if self._hub.over is not None:
            raise self._hub.over
        self._hub.loaded, self._base = version, base
        self._hub.call(self._report, Loaded(version, load_s))

    def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None:
        """Caller's thread: record that a load failed, and have LoadFailed sent.

        Unless ``kept``, this rank serves no whole version from then on.

        :param error: why; sent as text.
        :param kept: the rank loaded nothing, and still serves its last version.
        """
        if not kept:
            self._hub.loaded = 0
        self._hub.call(self._report, LoadFailed(version, self._as_wire(version, error), kept))

    def _as_wire(self, version: int, error: BaseException) -> WireError:
        """Convert the error of a load for a message.

        On the caller's thread, as the text of a foreign exception may run code.
        """
        if isinstance(error, errors.ReplicasError):
            return WireError.of(error)
        text = f"{self._hub.member} failed to load version {version}: {type(error).__name__}: {text_of(error)}"
        return WireError.of(self._hub.error(errors.SyncError, text, version=version, phase="load", hint=""))

    def let_go(self, holder: Holder, slot: Slot) -> None:
        """Queue a call on the session thread that unpins an update's slot, and return.

        :param holder: of the update, to which the slot is lent; if that loan has ended,
            nothing happens.
        """
        self._hub.call(self.unpin, holder, slot)

    @property
    def base(self) -> Base | None:
        """The version that this rank loaded last, and serves; None without one.

        Changes of the next version are computed against it.
        """
        return self._base if self._base is not None and self._base.version == self._hub.loaded else None

    # ------------------------------------------------------------ session thread

    def _send_can_load(self, wait: _Wait) -> None:
        """Send that this rank can load a version (CanLoad), and store ``wait``.

        :meth:`end` ends the wait. If the session is over, the wait fails immediately.
        """
        self._wait = wait
        self._hub.send(wait.said)
        if self._hub.over is not None:
            self.end(self._hub.over)

    def new_term(self) -> None:
        """Send the last failure and an open CanLoad again, to the new coordinator."""
        if self._failure is not None:
            self._hub.send(self._failure)
        if self._wait is not None:
            self._hub.send(self._wait.said)

    def decided(self, message: LoadDecided) -> None:
        """Handle the coordinator's decision on whether all targets load a version now.

        Record it, and end this rank's wait for it, if any.
        """
        error = None if message.error is None else message.error.exception()
        setattr(self._hub.held_versions, "adopted" if error is None else "unadopted", message.version)
        if self._wait is not None and self._wait.said.version == message.version:
            self.end(error)

    def end(self, error: errors.ReplicasError | None) -> None:
        """End the wait for the coordinator's decision, if any: fail it with ``error``.

        Resolve it if that is None. First call its ``tell``, with the same argument,
        unless its update is gone.
        """
        wait, self._wait = self._wait, None
        if wait is None:
            return
        if (tell := wait.tell()) is not None:
            tell(error)
        if error is None:
            wait.pending.resolve(None)
        else:
            wait.pending.fail(error)

    def report_dropped(self, slot: Slot, version: int) -> None:
        """Unpin the slot of an update that its user lost; report a failed load.

        Reports nothing if the user had not begun to use it, or the channel is over.
        """
        self._hub.arena.unpin(slot)
        if version == self._in_hand and self._hub.over is None:
            self._hub.loaded = 0
            error = errors.SyncError("the update was dropped without loaded()", version=version, phase="load", hint="")
            self._report(LoadFailed(version, self._as_wire(version, error)))

    def _report(self, message: Loaded | LoadFailed) -> None:
        """Send the outcome of a load; no longer protect the version from eviction.

        A failure, unless the rank kept its last version, is stored, to repeat it to a
        new coordinator.
        """
        is_kept = isinstance(message, LoadFailed) and message.kept
        self.refused = message.version if is_kept else 0
        known = self._hub.held_versions
        known.unadopted = max(known.unadopted, self.refused)
        self._failure = message if isinstance(message, LoadFailed) and not is_kept else None
        if self._in_hand == message.version:
            self._in_hand = 0
        self._hub.set_assigned(0 if known.assigned == message.version else known.assigned)
        self._hub.send(message)

    def unpin(self, holder: Holder, slot: Slot) -> None:
        """Session thread: unpin an update's slot, and end the loan to ``holder``.

        Do nothing if that loan has ended.
        """
        if self._hub.loans.keep(holder):
            self._hub.arena.unpin(slot)

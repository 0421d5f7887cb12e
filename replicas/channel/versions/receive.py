"""Receive: ask for a version, and hand it out as an `Update`; and watch for versions.

There is at most one ask. Its Pending stays the answer of :meth:`Receiver.receive` until
a caller has taken the update; an abandoned wait loses nothing. A grant may come before
the slot is complete here: the update is delivered, and pins its slot, when the slot is
held.

A delivered update that no caller has waited for is withdrawn as soon as a newer version
is committed and held here: the Pending becomes pending again, and gets the newest. The
rank asks the coordinator again, because another rank of the replica may have begun with
the old version: then all ranks load that one. So a receive ahead of time blocks no
publish, and gets the newest version. An update that was handed out but not touched does
not count as taken: an interrupt may have hit the caller between the two. The next
receive hands it out again, or asks for a newer one.

*Suspended process.* After a pause of this process, the versions of queued messages and
of an update not yet handed out may be out of date: another incarnation of the replica
may have overtaken them. So the rank drops those, and asks again.

*At least.* The coordinator decides which version satisfies all ranks of the replica
(:mod:`replicas.core.versions.load_rounds`). A version that was granted because another
rank has begun with it, but is below the bound here, is declined, and the rank asks for
a newer one. A receive with another bound replaces the one under way, unless its update
has been handed out. If the version served here satisfies the bound, and none is newer,
it is handed out again, to all ranks with that bound.

A new coordinator gets the open ask again, and repeats an undelivered grant. An open
update stays open, and is reported to the new coordinator, as is a failed load without a
later good one.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.hub import Hub, Part, logger
from replicas.channel.session.pending import Promise
from replicas.channel.versions.lockstep_wait import LockstepWait
from replicas.channel.versions.owner import Base
from replicas.channel.versions.update import Update
from replicas.common.waits import locked
from replicas.core.versions.load_rounds import is_enough
from replicas.messages import (
    LoadDecided,
    Loaded,
    LoadFailed,
    ReceiveAsk,
    ReceiveCancel,
    ReceiveGrant,
    WatchEnd,
    WatchLoaded,
    WireError,
)
from replicas.messages.bounds import text_of
from replicas.status import WAIT_S
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.buffers import Buffer


class Bound(NamedTuple):
    """Lower bound: a version number or, with ``key``, a number in its ``meta``."""

    least: int | float = 0
    key: str = ""

    def __str__(self) -> str:
        return f"at_least=({self.key!r}, {self.least})" if self.key else f"at_least={self.least}" if self.least else ""


@dataclass(eq=False, repr=False)
class _Wish:
    """The ask to the coordinator.

    :ivar pending: of the open ask; None if only the bound of the last ask is kept.
    :ivar granted: the version that comes next, or 0.
    :ivar declined: a granted version below the bound, or 0.
    """

    bound: Bound
    deadline_s: float | None = None
    pending: Promise[Update] | None = None
    granted: int = 0
    declined: int = 0
    timer: asyncio.TimerHandle | None = None


class Receiver(Part):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._lock = threading.Lock()
        self._pending: Promise[Update] | None = None
        self._update: weakref.ref[Update] | None = None
        self._in_hand = 0
        self._bound = Bound()
        self._asks, self._told = 0, False
        self._wish = _Wish(Bound())
        self._refused = 0
        self._failure: LoadFailed | None = None
        self._given_back = 0
        self._base: Base | None = None
        self.lockstep: LockstepWait = LockstepWait(hub)

    # ------------------------------------------------------------ caller's thread

    def receive(self, deadline_s: float | None, bound: Bound = Bound()) -> Promise[Update]:
        return locked(self._lock, self._receive, deadline_s, bound)

    def _receive(self, deadline_s: float | None, bound: Bound) -> Promise[Update]:
        pending, update, replaced = self._pending, self._delivered(), None
        if pending is not None and not (pending.done() and pending.observed):
            if bound == self._bound:
                return pending
            if pending.take_back() and update is not None:
                update.withdraw()
            replaced = pending
        elif pending is not None and update is not None and not update.touched:
            if self._hub.latest <= update.version and is_enough(*bound, update.version, update.meta):
                return pending
            update.withdraw()
        if replaced is None and update is not None and not update.ended:
            raise self._still_open(update)
        pending = self._hub.pending("receive")
        self._hub.call(self._ask, pending, deadline_s, bound, replaced)
        self._pending, self._bound = pending, bound  # after the ask, which ends it
        return pending

    def _delivered(self) -> Update | None:
        return self._update() if self._update is not None else None

    def touched(self, version: int) -> None:
        """Drop our reference to an update that the caller uses, to notice its loss."""
        self._in_hand = version
        self._pending = None

    def _still_open(self, update: Update) -> errors.ReplicasError:
        text = f"the update of version {update.version} is still open"
        hint = "leave its `with` block, or call its loaded() or failed(), before the next receive"
        return self._hub.error(errors.UsageError, text, version=update.version, hint=hint)

    def loaded(self, version: int, load_s: float, base: Base | None) -> None:
        if self._hub.over is not None:
            raise self._hub.over
        self._hub.loaded, self._base = version, base
        self._hub.call(self._report, Loaded(version, load_s))

    def look_at(self, base: Base) -> Buffer:
        return self._hub.arena.borrow(base.place, base.version, lock=False)

    def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None:
        if not kept:
            self._hub.loaded = 0
        self._hub.call(self._report, LoadFailed(version, self._as_wire(version, error), kept))

    def _as_wire(self, version: int, error: BaseException) -> WireError:
        """Caller's thread (the exception's text may run any code): convert an error."""
        if isinstance(error, errors.ReplicasError):
            return WireError.of(error)
        text = f"{self._hub.member} failed to load version {version}: {type(error).__name__}: {text_of(error)}"
        return WireError.of(self._hub.error(errors.SyncError, text, version=version, phase="load", hint=""))

    def let_go(self, holder: Holder, slot: Slot) -> None:
        self._hub.call(self._unpin, holder, slot)

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {ReceiveGrant: self._grant, LoadDecided: self.lockstep.decided}

    def new_term(self) -> None:
        self._wish.granted = 0
        if self._failure is not None:
            self._hub.send(self._failure)
        self.lockstep.new_term()
        if self._wish.pending is not None:
            self._send_ask()

    def fail_all(self, error: errors.ReplicasError) -> None:
        pending = self._wish.pending
        self._end_ask()
        self.lockstep.end(error)
        if pending is not None:
            pending.fail(error)

    def version_held(self) -> None:
        self._deliver()
        self.latest_grown()

    def _ask(
        self, pending: Promise[Update], deadline_s: float | None, bound: Bound, replaced: Promise[Update] | None
    ) -> None:
        if self._hub.over is not None:
            pending.fail(self._hub.over)
            return
        if replaced is not None:  # which may have got an update since
            update = self._delivered()
            if replaced.take_back() and update is not None:
                update.withdraw()
            if self._wish.pending is replaced:
                self._end_ask()
            text = f"a receive({bound}) replaced this one"
            replaced.fail(self._hub.error(errors.UsageError, text, hint="wait for one receive before the next"))
        update = self._delivered()
        if update is not None and not update.ended:
            pending.fail(self._still_open(update))  # another thread got it meanwhile
            return
        self._end_ask()  # of an earlier, interrupted call: its Pending is lost
        self._wish = _Wish(bound, deadline_s)
        self._ask_for(pending)

    def _ask_for(self, pending: Promise[Update]) -> None:
        wish = self._wish
        wish.pending = pending
        if wish.deadline_s is not None:
            wish.timer = self._hub.after(wish.deadline_s, self._overdue, wish.deadline_s)
        if not (self._hub.latest or self._told):
            self._hub.after(WAIT_S, self._tell_wait, pending)
        self._send_ask()

    def _tell_wait(self, pending: Promise[Update]) -> None:
        if self._wish.pending is pending and not (self._hub.latest or self._told):
            self._told, limit_s = True, self._wish.deadline_s
            end = "without a deadline" if limit_s is None else f"up to {limit_s:g} s"
            logger.warning("%s: waiting for the first version, %s", self._hub.name, end)

    def _send_ask(self) -> None:
        self._asks += 1
        after = max(self._hub.loaded - int(self._loaded_satisfies_bound()), self._wish.declined, self._refused)
        self._hub.send(ReceiveAsk(self._asks, after, *self._wish.bound))

    def _loaded_satisfies_bound(self) -> bool:
        """Return True if the version served here is held and satisfies the bound."""
        hub, bound = self._hub, self._wish.bound
        loaded, meta = hub.loaded, hub.held_versions.meta(hub.loaded)
        return bound != Bound() and loaded in hub.arena.images() and is_enough(*bound, loaded, meta)

    def _grant(self, message: ReceiveGrant) -> None:
        if message.ask != self._asks or self._wish.pending is None:
            return
        self._wish.granted = message.version
        self._hub.set_assigned(message.version)
        self._deliver()

    def _deliver(self) -> None:
        pending = self._wish.pending
        if pending is None or not self._wish.granted:
            return
        hub, version = self._hub, self._wish.granted
        slot = hub.arena.find_pinned(version)
        if slot is None:
            if max(hub.arena.images(), default=0) > version:  # a newer one came instead
                self._wish.granted = 0
                self._send_ask()
            return
        meta, bound = hub.held_versions.meta(version), self._wish.bound
        if not is_enough(*bound, version, meta):
            hub.arena.unpin(slot)
            self._wish.granted, self._wish.declined = 0, version
            self._send_ask()
            return
        try:
            base = self._base if self._base is not None and self._base.version == hub.loaded else None
            update = Update(self, slot, version, meta, hub.held_versions.digest(version), base)
        except BaseException:
            hub.arena.unpin(slot)
            raise
        self._end_ask()
        before, self._update = self._update, weakref.ref(update)
        hub.loans.lend(update.holder, partial(self._report_dropped_update, slot, version))
        if not pending.resolve(update):
            self._update = before
            self._unpin(update.holder, slot)

    def _report_dropped_update(self, slot: Slot, version: int) -> None:
        self._hub.arena.unpin(slot)
        if version == self._in_hand and self._hub.over is None:
            self._hub.loaded = 0
            error = errors.SyncError("the update was dropped without a report", version=version, phase="load", hint="")
            self._report(LoadFailed(version, self._as_wire(version, error)))

    def latest_grown(self) -> None:
        """Withdraw a delivered, unobserved update for a newer version; ask again."""
        pending, hub = self._pending, self._hub
        update = self._delivered()
        if pending is None or update is None or pending is self._wish.pending:
            return
        if hub.latest <= max(update.version, self._given_back) or hub.arena.find(hub.latest) is None:
            return
        if pending.take_back():
            self._given_back = hub.latest
            update.withdraw()
            self._ask_for(pending)

    def paused(self) -> None:
        pending, update = self._pending, self._delivered()
        if self._wish.pending is not None:
            self._wish.granted = 0
            self._send_ask()
        elif pending is not None and update is not None and pending.take_back():
            update.withdraw()
            self._ask_for(pending)

    def _end_ask(self) -> None:
        if self._wish.timer is not None:
            self._wish.timer.cancel()
        self._wish = _Wish(self._wish.bound, self._wish.deadline_s)

    def _overdue(self, deadline_s: float) -> None:
        hub, bound = self._hub, self._wish.bound
        what, found = "the receive", ""
        if bound != Bound():
            what, found = f"receive({bound})", f" (the newest version is {hub.latest})"
        if self._wish.declined:
            others = f"other ranks of {hub.member.replica_name}"
            found = f" ({others} have begun with version {self._wish.declined}, and not asked again)"
        self.session_down(hub.overdue_error(what + found, deadline_s))

    def session_down(self, error: errors.ReplicasError) -> None:
        if self._wish.pending is not None:
            self._hub.send(ReceiveCancel(self._asks))
        self.fail_all(error)

    def _report(self, message: Loaded | LoadFailed) -> None:
        is_kept = isinstance(message, LoadFailed) and message.kept
        self._refused = message.version if is_kept else 0
        self._hub.held_versions.unadopted = max(self._hub.held_versions.unadopted, self._refused)
        self._failure = message if isinstance(message, LoadFailed) and not is_kept else None
        if self._in_hand == message.version:
            self._in_hand = 0
        assigned = self._hub.held_versions.assigned
        self._hub.set_assigned(0 if assigned == message.version else assigned)
        self._hub.send(message)

    def _unpin(self, holder: Holder, slot: Slot) -> None:
        if self._hub.loans.keep(holder):
            self._hub.arena.unpin(slot)


@dataclass(eq=False, repr=False)
class _Watch:
    version: int
    what: str
    pending: Promise[int]
    timer: asyncio.TimerHandle | None = None


class Watches(Part):
    """Waits for a newer commit, or for a version to be loaded by all targets.

    A commit watch ends above its version, a load watch at it. For all callers together
    the coordinator has one watch of this member: that of the oldest version awaited.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._commits: set[_Watch] = set()
        self._loads: set[_Watch] = set()
        self._told: WatchLoaded | None = None
        self._numbered = 0

    def committed(self, after: int | None, deadline_s: float | None) -> Promise[int]:
        version = self._hub.latest if after is None else after
        return self._begun(self._commits, version, f"the wait for a version after {version}", deadline_s)

    def loaded(self, version: int, deadline_s: float | None) -> Promise[int]:
        return self._begun(self._loads, version, f"the wait until all have loaded version {version}", deadline_s)

    def _begun(self, watches: set[_Watch], version: int, what: str, deadline_s: float | None) -> Promise[int]:
        pending: Promise[int] = self._hub.pending(what)
        self._hub.call(self._add_watch, watches, _Watch(version, what, pending), deadline_s)
        return pending

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {WatchEnd: self._loaded}

    def new_term(self) -> None:
        self._told = None
        self._watch()
        self.latest_grown()

    def fail_all(self, error: errors.ReplicasError) -> None:
        for watches in (self._commits, self._loads):
            for watch in list(watches):
                self._end(watches, watch).fail(error)

    def session_down(self, error: errors.ReplicasError) -> None:
        self.fail_all(error)

    def _add_watch(self, watches: set[_Watch], watch: _Watch, deadline_s: float | None) -> None:
        if self._hub.over is not None:
            watch.pending.fail(self._hub.over)
            return
        watches.add(watch)
        if deadline_s is not None:
            watch.timer = self._hub.after(deadline_s, self._overdue, watches, watch, deadline_s)
        self._watch()
        self.latest_grown()

    def _watch(self) -> None:
        """Send a watch for the oldest awaited version, unless it is the current one."""
        oldest = min((watch.version for watch in self._loads), default=None)
        if oldest is None or (self._told is not None and self._told.version == oldest):
            return
        self._numbered += 1
        self._told = WatchLoaded(self._numbered, oldest)
        self._hub.send(self._told)

    def latest_grown(self) -> None:
        latest = self._hub.latest
        for watch in [watch for watch in self._commits if latest > watch.version]:
            self._end(self._commits, watch).resolve(latest)

    def _loaded(self, message: WatchEnd) -> None:
        if self._told is None or message.watch != self._told.watch:
            return  # the answer to an older watch; that to the newer one will come
        self._told = None
        for watch in [watch for watch in self._loads if watch.version <= message.version]:
            pending = self._end(self._loads, watch)
            if message.failed:
                pending.fail(self._not_loaded(message))
            else:
                pending.resolve(message.version)
        self._watch()

    def _not_loaded(self, message: WatchEnd) -> errors.ReplicasError:
        why = "; ".join(f"{name}: {reason}" for name, reason in message.failed.items())
        text = f"version {message.version} was refused by {why}"
        hint = "these keep the version that they have, and wait for the next one"
        return self._hub.error(errors.SyncError, text, version=message.version, phase="load", hint=hint)

    def _overdue(self, watches: set[_Watch], watch: _Watch, deadline_s: float) -> None:
        if watch in watches:
            self._end(watches, watch).fail(self._hub.overdue_error(watch.what, deadline_s))

    @staticmethod
    def _end(watches: set[_Watch], watch: _Watch) -> Promise[int]:
        watches.discard(watch)
        if watch.timer is not None:
            watch.timer.cancel()
        return watch.pending

"""Receive: ask for a version, and hand it out as an `Update`; and watch for versions.

There is at most one ask; :mod:`replicas.channel.versions` describes its life.
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
from replicas.channel.session.hub import Hub, Part, logger
from replicas.channel.session.pending import Promise
from replicas.channel.versions.loads import Loads
from replicas.channel.versions.owner import Score
from replicas.channel.versions.update import Update
from replicas.common.waits import locked
from replicas.core.versions.load_rounds import is_enough
from replicas.messages import LoadDecided, ReceiveAsk, ReceiveCancel, ReceiveGrant, WatchEnd, WatchLoaded
from replicas.status import WAIT_S


class Bound(NamedTuple):
    """Lower bound: a version number or, with ``key``, a number in its ``meta``."""

    least: int | float = 0
    key: str = ""

    def __str__(self) -> str:
        """Return ``at_least=...``, for messages; "" for the default bound."""
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
    """Gets committed versions for this rank, one :class:`Update` at a time. An *ask* is
    its request for the next one to the coordinator, a *grant* the answer."""

    def __init__(self, hub: Hub, score: Score) -> None:
        """Start without an ask.

        :param score: reports scores of a version, for :meth:`Update.report`.
        """
        self._hub = hub
        self._lock = threading.Lock()
        self._pending: Promise[Update] | None = None
        self._update: weakref.ref[Update] | None = None
        self._bound = Bound()
        self._asks, self._told = 0, False
        self._wish = _Wish(Bound())
        self._given_back = 0
        self.loads = Loads(hub, score, self._forget_pending)

    # ------------------------------------------------------------ caller's thread

    def receive(self, deadline_s: float | None, bound: Bound = Bound()) -> Promise[Update]:
        """Caller's thread: return the open Pending, or ask for a version; no wait.

        If the open Pending has another bound, it fails with UsageError. A new one, for
        which the coordinator is asked, is returned in its place.

        :param deadline_s: seconds for the outcome; None: no limit.
        :param bound: the oldest version that will do.
        :raises replicas.errors.UsageError: the last update is still open.
        """
        return locked(self._lock, self._receive, deadline_s, bound)

    def _receive(self, deadline_s: float | None, bound: Bound) -> Promise[Update]:
        """Do :meth:`receive`, under the lock; another bound replaces the open ask."""
        pending, update, replaced = self._pending, self._delivered(), None
        if pending is not None and not (pending.done() and pending.observed):
            if bound == self._bound:
                return pending
            self._take_back(pending)
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
        """Return the last update that was delivered, while it lives, or None."""
        return self._update() if self._update is not None else None

    def _take_back(self, pending: Promise[Update]) -> bool:
        """Take an update that no caller has seen out of ``pending``, and end the
        update.

        Return True if ``pending`` is open again; False, and do nothing, without such an
        update.
        """
        update = self._delivered()
        if update is None or not pending.take_back():
            return False
        update.withdraw()
        return True

    def _forget_pending(self) -> None:
        """Drop our reference to an update that the caller uses, to notice its loss."""
        self._pending = None

    def _still_open(self, update: Update) -> errors.ReplicasError:
        """Return (do not raise) the error for an update that is still open."""
        text = f"receive: the update of version {update.version} is still open"
        hint = "leave its `with` block, or call its loaded() or failed(), before the next receive"
        return self._hub.error(errors.UsageError, text, version=update.version, hint=hint)

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {ReceiveGrant: self._grant, LoadDecided: self.loads.decided}

    def new_term(self) -> None:
        """Repeat the open ask, and open reports of loads, to a new coordinator."""
        self._wish.granted = 0
        self.loads.new_term()
        if self._wish.pending is not None:
            self._send_ask()

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Forget the open ask; fail its Pending, and a wait to load, with ``error``."""
        pending = self._wish.pending
        self._end_ask()
        self.loads.end(error)
        if pending is not None:
            pending.fail(error)

    def _ask(
        self, pending: Promise[Update], deadline_s: float | None, bound: Bound, replaced: Promise[Update] | None
    ) -> None:
        """Session thread: ask the coordinator for a version for ``pending``.

        Start its timer.

        :param deadline_s: seconds; None: no limit. :param bound: the oldest version
            that will do.
        :param replaced: the Pending of an open ask, which fails with UsageError.
        """
        if self._hub.over is not None:
            pending.fail(self._hub.over)
            return
        if replaced is not None:
            self._take_back(replaced)  # which may have got an update since
            if self._wish.pending is replaced:
                self._end_ask()
            text = f"a later receive({bound}) has replaced this one"
            replaced.fail(self._hub.error(errors.UsageError, text, hint="wait for one receive before the next call"))
        update = self._delivered()
        if update is not None and not update.ended:
            pending.fail(self._still_open(update))  # another thread got it meanwhile
            return
        self._end_ask()  # of an earlier, interrupted call: its Pending is lost
        self._wish = _Wish(bound, deadline_s)
        self._ask_for(pending)

    def _ask_for(self, pending: Promise[Update]) -> None:
        """Ask the coordinator for a version for ``pending``; start its timer."""
        wish = self._wish
        wish.pending = pending
        if wish.deadline_s is not None:
            wish.timer = self._hub.after(wish.deadline_s, self._overdue, wish.deadline_s)
        if not (self._hub.latest or self._told):
            self._hub.after(WAIT_S, self._tell_wait, pending)
        self._send_ask()

    def _tell_wait(self, pending: Promise[Update]) -> None:
        """Log, once, that the rank waits for the first version, if ``pending`` does."""
        if self._wish.pending is pending and not (self._hub.latest or self._told):
            self._told, limit_s = True, self._wish.deadline_s
            end = "without a deadline" if limit_s is None else f"up to {limit_s:g} s"
            logger.warning("channel %s: waiting for the first version, %s", self._hub.name, end)

    def _send_ask(self) -> None:
        """Send ReceiveAsk with a new number; answers to earlier ones are ignored."""
        self._asks += 1
        after = max(self._hub.loaded - int(self._loaded_satisfies_bound()), self._wish.declined, self.loads.refused)
        self._hub.send(ReceiveAsk(self._asks, after, *self._wish.bound))

    def _loaded_satisfies_bound(self) -> bool:
        """Return True if the version served here is held and satisfies the bound.

        Then the coordinator may grant that version again.
        """
        hub, bound = self._hub, self._wish.bound
        loaded, meta = hub.loaded, hub.held_versions.meta(hub.loaded)
        held = hub.held_versions.content(loaded) in hub.arena.images()
        return bound != Bound() and held and is_enough(*bound, loaded, meta)

    def _grant(self, message: ReceiveGrant) -> None:
        """Handle the coordinator's choice of a version: keep it from eviction, and
        deliver it when its slot is complete. Ignore the answer to an older ask."""
        if message.ask != self._asks or self._wish.pending is None:
            return
        self._wish.granted = message.version
        self._hub.set_assigned(message.version)
        self._deliver()

    def _deliver(self) -> None:
        """Resolve the Pending with an Update once the granted slot is complete.

        Asks again instead if the granted version does not satisfy the bound, or a newer
        one is here.
        """
        pending = self._wish.pending
        if pending is None or not self._wish.granted:
            return
        hub, version = self._hub, self._wish.granted
        slot = hub.held_versions.find_pinned(version)
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
            update = Update(self.loads, slot, version, meta, hub.held_versions.digest(version))
        except BaseException:
            hub.arena.unpin(slot)
            raise
        self._end_ask()
        before, self._update = self._update, weakref.ref(update)
        hub.loans.lend(update.holder, partial(self.loads.report_dropped, slot, version))
        if not pending.resolve(update):
            self._update = before
            self.loads.unpin(update.holder, slot)

    def versions_grown(self) -> None:
        """Deliver a granted version that is complete now.

        Take back an update that no caller has seen, for a newer version.
        """
        self._deliver()
        pending, hub, update = self._pending, self._hub, self._delivered()
        if pending is None or update is None or pending is self._wish.pending:
            return
        newest = hub.held_versions.content(hub.latest)
        if hub.latest <= max(update.version, self._given_back) or hub.arena.find(newest) is None:
            return
        if self._take_back(pending):
            self._given_back = hub.latest
            self._ask_for(pending)

    def paused(self) -> None:
        """After a suspension drop a grant or an unseen update, and ask again."""
        pending = self._pending
        if self._wish.pending is not None:
            self._wish.granted = 0
            self._send_ask()
        elif pending is not None and self._take_back(pending):
            self._ask_for(pending)

    def _end_ask(self) -> None:
        """Forget the open ask and stop its timer; its Pending stays open."""
        if self._wish.timer is not None:
            self._wish.timer.cancel()
        self._wish = _Wish(self._wish.bound, self._wish.deadline_s)

    def _overdue(self, deadline_s: float) -> None:
        """Cancel the ask, and fail its Pending: ``deadline_s`` seconds have passed."""
        hub, bound = self._hub, self._wish.bound
        what, found, wanted = "the receive", "", 0 if bound.key else bound.least or hub.loaded + 1
        if bound != Bound():
            what, found = f"receive({bound})", f" (the newest version is {hub.latest})" if bound.key else ""
        if self._wish.declined:
            others = f"other ranks of {hub.member.replica_name}"
            found = f" ({others} load version {self._wish.declined}, and have not called receive again)"
        self.session_down(hub.overdue_error(what + found, deadline_s, wanted))

    def session_down(self, error: errors.ReplicasError) -> None:
        """Cancel the ask, if any, and fail its Pending with ``error``."""
        if self._wish.pending is not None:
            self._hub.send(ReceiveCancel(self._asks))
        self.fail_all(error)


@dataclass(eq=False, repr=False)
class _Watch:
    """A wait for a commit above ``version`` or, with ``loads``, for its loads."""

    version: int
    loads: bool
    what: str
    pending: Promise[int]
    timer: asyncio.TimerHandle | None = None


class Watches(Part):
    """Callers' waits for a newer commit, or for all targets to load a version.

    A commit watch ends above its version, a load watch at it. For all callers together
    the coordinator has one watch of this member: that of the oldest version awaited.
    """

    def __init__(self, hub: Hub) -> None:
        """Start without waits."""
        self._hub = hub
        self._watches: set[_Watch] = set()
        self._told: WatchLoaded | None = None
        self._numbered = 0

    def committed(self, after: int | None, deadline_s: float | None) -> Promise[int]:
        """Any thread: return a Promise of the newest version, once above ``after``.

        :param after: a version number; None: the newest known now.
        :param deadline_s: seconds; None: no limit.
        """
        version = self._hub.latest if after is None else after
        return self._begin_watch(version, f"the wait for a version after {version}", deadline_s, loads=False)

    def loaded(self, version: int, deadline_s: float | None) -> Promise[int]:
        """Any thread: return a Promise that ends when all targets serve ``version``.

        Its value is the oldest version they serve; it fails if a target refuses one.

        :param deadline_s: seconds; None: no limit.
        """
        return self._begin_watch(version, f"the wait until all have loaded version {version}", deadline_s, loads=True)

    def _begin_watch(self, version: int, what: str, deadline_s: float | None, *, loads: bool) -> Promise[int]:
        """Have the session thread add a watch; return the Promise of its end.

        :param what: the wait, for texts.
        :param deadline_s: seconds; None: no limit.
        :param loads: wait until all targets have loaded the version, instead of a
            commit.
        """
        pending: Promise[int] = self._hub.pending(what)
        self._hub.call(self._add_watch, _Watch(version, loads, what, pending), deadline_s)
        return pending

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {WatchEnd: self._loaded}

    def new_term(self) -> None:
        """Send the watch to the new coordinator; end those that are satisfied."""
        self._told = None
        self._watch()
        self.versions_grown()

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Fail all waits with ``error``."""
        for watch in list(self._watches):
            self._remove_watch(watch).fail(error)

    session_down = fail_all

    def _add_watch(self, watch: _Watch, deadline_s: float | None) -> None:
        """Add a wait, start its timer, and ask the coordinator if it is for loads.

        End it now if it is satisfied, or the session is over.

        :param deadline_s: seconds; None: no limit.
        """
        if self._hub.over is not None:
            watch.pending.fail(self._hub.over)
            return
        self._watches.add(watch)
        if deadline_s is not None:
            watch.timer = self._hub.after(deadline_s, self._overdue, watch, deadline_s)
        self._watch()
        self.versions_grown()

    def _watch(self) -> None:
        """Ask the coordinator for the loads of the oldest version that is awaited.

        That replaces the earlier question. Sends nothing if that is asked already.
        """
        oldest = min((watch.version for watch in self._watches if watch.loads), default=None)
        if oldest is None or (self._told is not None and self._told.version == oldest):
            return
        self._numbered += 1
        self._told = WatchLoaded(self._numbered, oldest)
        self._hub.send(self._told)

    def versions_grown(self) -> None:
        """Resolve the commit watches of versions older than the newest."""
        latest = self._hub.latest
        for watch in [watch for watch in self._watches if not watch.loads and latest > watch.version]:
            self._remove_watch(watch).resolve(latest)

    def _loaded(self, message: WatchEnd) -> None:
        """Handle the coordinator's answer: end the load watches that it covers, with
        the version, or with SyncError if a target refused it. Ask for the others."""
        if self._told is None or message.watch != self._told.watch:
            return  # the answer to an older watch; that to the newer one will come
        self._told = None
        for watch in [watch for watch in self._watches if watch.loads and watch.version <= message.version]:
            pending = self._remove_watch(watch)
            if message.failed:
                pending.fail(self._not_loaded(message))
            else:
                pending.resolve(message.version)
        self._watch()

    def _not_loaded(self, message: WatchEnd) -> errors.ReplicasError:
        """Return (do not raise) the error for targets that refused a version."""
        why = "; ".join(f"{name}: {reason}" for name, reason in message.failed.items())
        text = f"version {message.version} was refused by {why}"
        hint = "these replicas keep the version that they have, and wait for the next one"
        return self._hub.error(errors.SyncError, text, version=message.version, phase="load", hint=hint)

    def _overdue(self, watch: _Watch, deadline_s: float) -> None:
        """Fail a wait that has not ended within ``deadline_s`` seconds."""
        error = self._hub.overdue_error(watch.what, deadline_s, watch.version + (not watch.loads))
        self._remove_watch(watch).fail(error)

    def _remove_watch(self, watch: _Watch) -> Promise[int]:
        """Remove a watch and its timer; return its Promise, for the caller to end."""
        self._watches.discard(watch)
        if watch.timer is not None:
            watch.timer.cancel()
        return watch.pending

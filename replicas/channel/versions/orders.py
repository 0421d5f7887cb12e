"""Orders about versions from a rank: promote, roll back, keep, name and score them.

An order is one message (:class:`~replicas.messages.VersionAsk`) with one answer, which
comes when the decision is on disk. An order whose answer was lost with its coordinator
ends with :class:`~replicas.errors.OutcomeUnknown`: it may have been decided.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from replicas import errors
from replicas.channel.session.hub import Hub, Part
from replicas.channel.session.pending import Pending, Promise
from replicas.channel.versions.loads import Loads
from replicas.channel.versions.owner import Base
from replicas.channel.versions.update import Update
from replicas.messages import VersionAnswer, VersionAsk, arguments
from replicas.messages import version_orders as orders
from replicas.messages.bounds import shown
from replicas.messages.version_orders import Steered, VersionOrder


class VersionOrders(Part):
    """Sends this rank's orders, such as to promote a version; ends their Pendings."""

    def __init__(self, hub: Hub) -> None:
        """Start without orders."""
        self._hub = hub
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Promise[Steered], asyncio.TimerHandle]] = {}

    def ask(self, kind: type[VersionOrder], deadline: float | None, **fields: Any) -> Pending[Steered]:
        """Any thread: have an order sent to the coordinator.

        Return a Pending of its answer.

        :param kind: class of the order, such as ``orders.Promote``.
        :param deadline: seconds until the Pending fails as OutcomeUnknown; None: the
            channel's.
        :param fields: the fields of the order.
        :raises replicas.errors.UsageError: a field is wrong; nothing is sent.
        """
        what = kind.__name__.lower()
        texts = {name: arguments.text(f"{what}: {name}", one) for name, one in fields.items() if isinstance(one, str)}
        fields |= texts
        limit_s = (
            self._hub.settings.deadline_s if deadline is None else arguments.seconds(f"{what}: deadline", deadline)
        )
        try:
            order = msgspec.convert({"type": kind.__name__, **fields}, kind)
        except msgspec.ValidationError as error:
            given = ", ".join(f"{name}={shown(value)}" for name, value in fields.items())
            raise self._hub.error(errors.UsageError, f"{what}({given}): {error}", hint="") from error
        pending: Promise[Steered] = self._hub.pending(what)
        self._hub.call(self._send, order, pending, limit_s)
        return pending

    # ------------------------------------------------------------ session thread

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {VersionAnswer: self._answered}

    def new_term(self) -> None:
        """End all open orders as OutcomeUnknown: their answers are lost."""
        self.fail_all(self._unknown("the coordinator was restarted meanwhile"))

    def fail_all(self, error: errors.ReplicasError) -> None:
        """Fail all open orders with ``error``, and stop their timers."""
        for pending, timer in self._open.values():
            timer.cancel()
            pending.fail(error)
        self._open.clear()

    session_down = fail_all

    def _send(self, order: VersionOrder, pending: Promise[Steered], limit_s: float) -> None:
        """Session thread: number and send an order; start its timer.

        If the session is over, fail ``pending`` instead.

        :param limit_s: seconds until ``pending`` fails as OutcomeUnknown.
        """
        if self._hub.over is not None:
            pending.fail(self._hub.over)
            return
        number = next(self._numbers)
        self._open[number] = pending, self._hub.after(limit_s, self._overdue, number, limit_s)
        self._hub.send(VersionAsk(number, order))

    def _unknown(self, why: str) -> errors.ReplicasError:
        """Return (do not raise) the OutcomeUnknown of an order, for reason ``why``."""
        text = f"it is unknown whether the order was carried out: {why}"
        return self._hub.error(errors.OutcomeUnknown, text, hint="`replicas versions` or channel.versions shows it")

    def read(self, version: int, pending: Promise[Update]) -> None:
        """Session thread: resolve ``pending`` with an update of a version held here.

        It fails with Gone if the version is not, or with the error that ended the
        channel. The update keeps the version's slot in use, and reports no load.
        """
        hub, held = self._hub, self._hub.held_versions
        slot = None if hub.over is not None else held.find_pinned(version)
        if slot is None:
            text = f"{hub.member} does not have version {version} in memory"
            pending.fail(hub.over or hub.error(errors.Gone, text, version=version, hint="hold() keeps a version"))
            return
        reader = _Reader(hub, Versions(hub, self).score, lambda: None)
        update = Update(reader, slot, version, held.meta(version), held.digest(version))
        hub.loans.lend(update.holder, partial(hub.arena.unpin, slot))
        if not pending.resolve(update):
            reader.unpin(update.holder, slot)

    def _overdue(self, number: int, limit_s: float) -> None:
        """Fail an order as OutcomeUnknown: no answer came within ``limit_s``."""
        pending, _ = self._open.pop(number)
        pending.fail(self._unknown(f"the coordinator has not answered within {limit_s:g} s"))

    def _answered(self, message: VersionAnswer) -> None:
        """End the order that the message answers, with its decision or error.

        Ignore the answer to an order that has ended.
        """
        pending, timer = self._open.pop(message.ask, (None, None))
        if pending is None or timer is None:
            return
        timer.cancel()
        if message.decided is not None:
            pending.resolve(message.decided)
        elif message.error is not None:
            pending.fail(message.error.exception())


class _Reader(Loads):
    """The owner of updates that are read, and not served: they report no load."""

    @property
    def together(self) -> bool:
        """Return False: updates that are only read wait for no other target."""
        return False

    def touched(self, version: int) -> None:
        """Do nothing: no reference to the update is kept here."""

    def loaded(self, version: int, load_s: float, base: Base | None) -> None:
        """Report nothing: the version is only read, not served."""

    def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None:
        """Report nothing: the version is only read, not served."""


class Lease:
    """A version that is kept in memory: from the order on, until the block ends.

    ``with channel.versions.hold(7): ...``, or ``async with``; or call :meth:`wait`, and
    release it by name. The lease also ends when this process leaves the channel.
    """

    def __init__(self, order: Pending[Steered], release: Callable[[str], Pending[Steered]]) -> None:
        """Store the arguments; the order is on its way already.

        :param order: of the lease. :param release: ends the lease of a name.
        """
        self._order, self._release = order, release

    def wait(self, timeout: float | None = None) -> Steered:
        """Wait until the lease is recorded; return its name, version and end.

        :param timeout: seconds; None (the default): until the order's deadline.
        :raises TimeoutError: the timeout passed; the order continues.
        :raises replicas.errors.ReplicasError: the order was refused.
        """
        return self._order.wait(timeout)

    def __enter__(self) -> Steered:
        """Wait until the lease is recorded; return its name, version and end."""
        return self.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease, and wait for that; a timed one may be over already.

        An error of the release is raised only after a block without exception, and if
        the lease has no time limit.
        """
        try:
            self._release(self._order.wait().name).wait()
        except errors.ReplicasError:
            if error is None and self._order.wait().until is None:
                raise

    async def __aenter__(self) -> Steered:
        """Wait until the lease is recorded, without blocking the event loop."""
        return await self._order

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease, and await that; a timed one may be over already.

        An error of the release is raised only after a block without exception, and if
        the lease has no time limit.
        """
        decided = await self._order
        try:
            await self._release(decided.name)
        except errors.ReplicasError:
            if error is None and decided.until is None:
                raise


@arguments.refuse_unknown_keywords
class Versions:
    """Orders of this rank to serve, keep, name and score versions of one channel. Each
    returns a Pending that ends when the coordinator's decision is on disk.

    The Pending raises UsageError or Gone, which name what is there, or NoCapacity, or
    OutcomeUnknown after ``deadline`` seconds (default: the channel's). A version is a
    number or a label: ``current``, ``candidate``, ``previous``, or one of yours.
    """

    def __init__(self, hub: Hub, sent: VersionOrders) -> None:
        """Store the arguments; send nothing.

        :param hub: of the channel; has the labels.
        :param sent: sends the orders.
        """
        self._hub, self._sent = hub, sent

    def __repr__(self) -> str:
        return f"<Versions {self._hub.name} {self.labels}>"

    @property
    def labels(self) -> dict[str, int]:
        """The version of each label, as far as this process has been told.

        Empty while a channel serves each newest version and has no labels of yours.
        """
        return dict(self._hub.held_versions.labels)

    def promote(self, version: int | str = "candidate", *, deadline: float | None = None) -> Pending[Steered]:
        """Serve a committed version: all targets load it.

        A target never loads a lower number after a higher one. So if a newer version
        was served before, the content of this one is committed again, under a new
        number, and that is served.

        :param version: its number or label; default: the candidate.
        :param deadline: seconds; default: the channel's.
        """
        return self._sent.ask(orders.Promote, deadline, version=_text("promote", version))

    def reject(
        self, version: int | str = "candidate", *, why: str = "", deadline: float | None = None
    ) -> Pending[Steered]:
        """Never serve the candidate.

        If a canary (replicas that load it before the others) was told of it, the
        version that the others serve is committed again, under a new number, and all
        load that.

        :param version: its number or label; default: the candidate.
        :param why: the reason, which is recorded.
        :param deadline: seconds; default: the channel's.
        """
        return self._sent.ask(orders.Reject, deadline, version=_text("reject", version), why=why)

    def rollback(self, to: int | str = "previous", *, deadline: float | None = None) -> Pending[Steered]:
        """Serve the content of an older version again, as a new version.

        No bytes move to hosts that hold it. Publishes that have begun end first.

        :param to: number or label of the older version; default: the one served before.
        :param deadline: seconds; default: the channel's.
        """
        return self._sent.ask(orders.Rollback, deadline, to=_text("rollback", to))

    def hold(
        self, version: int | str, *, seconds: float | None = None, name: str = "", deadline: float | None = None
    ) -> Lease:
        """Keep a version's content: make a lease, which a ``with`` block releases.

        Does not wait: the block, or the lease's ``wait()``, waits until it is recorded.

        :param version: its number or label.
        :param seconds: end it after this time; None (the default): when it is released,
            or this process leaves the channel.
        :param name: of the lease; empty: the coordinator names it.
        :param deadline: seconds for the order; default: the channel's.
        """
        fields = {"version": _text("hold", version), "seconds": seconds, "name": name}
        return Lease(self._sent.ask(orders.Hold, deadline, **fields), self.release)

    def read(self, version: int | str) -> Pending[Update]:
        """Open a version that this process holds, to read it beside what it serves.

        Nothing is reported as loaded. The version stays in memory until the Update is
        closed (use it in a ``with`` block). Call :meth:`hold` before, or the version
        may be evicted before it is opened: then the Pending raises Gone.

        :param version: its number, or a label of :attr:`labels`.
        :raises UsageError: the label is not known.
        """
        number = self.labels.get(version) if isinstance(version, str) else arguments.integer("read: version", version)
        if number is None:
            raise errors.UsageError(f"read: no label {version!r} is known here", hint=f"the labels are {self.labels}")
        pending: Promise[Update] = self._hub.pending("read")
        self._hub.call(self._sent.read, number, pending)
        return pending

    def release(self, name: str, *, deadline: float | None = None) -> Pending[Steered]:
        """End a lease of :meth:`hold`: its version may be evicted again.

        :param name: of the lease, as in the answer to :meth:`hold`.
        :param deadline: seconds; default: the channel's.
        """
        return self._sent.ask(orders.Release, deadline, name=name)

    def label(
        self, label: str, version: int | str, *, move: bool = False, deadline: float | None = None
    ) -> Pending[Steered]:
        """Point a label of yours to a version, which is kept; "" removes the label.

        :param label: its name.
        :param version: number or another label of the version, or "".
        :param move: it may point to another version now; otherwise that is an error.
        :param deadline: seconds; default: the channel's.
        """
        text = _text("label", version) if version != "" else ""
        return self._sent.ask(orders.Label, deadline, label=label, version=text, move=move)

    def score(
        self, version: int | str, scores: Mapping[str, float], *, deadline: float | None = None
    ) -> Pending[Steered]:
        """Report scores of a version by name; the mean of all reports counts.

        :param version: its number or label.
        :param scores: finite numbers, such as ``{"reward": 0.82}``.
        :param deadline: seconds; default: the channel's.
        """
        if not isinstance(scores, Mapping):
            raise errors.UsageError(f"score: scores must be numbers by name, not {shown(scores)}")
        found = {arguments.text("score: a name", name): arguments.finite("score", one) for name, one in scores.items()}
        return self._sent.ask(orders.Score, deadline, version=_text("score", version), scores=found)


def _text(what: str, version: int | str) -> str:
    """Return a version's number (from 1) or label as text.

    :param what: name of the method, for the error.
    :raises replicas.errors.UsageError: it is neither.
    """
    if isinstance(version, str):
        return arguments.text(f"{what}: version", version)
    return str(arguments.integer(f"{what}: version", version, least=1))

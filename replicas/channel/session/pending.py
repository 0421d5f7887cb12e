"""The outcome of an operation that is still running, for threads, asyncio and trio.

Theory of operation
===================

A :class:`Pending` is the caller's view of an outcome, a :class:`Promise` this package's
view of the same object. A Promise is made on any thread and ended once, by the session
thread: the first call of ``resolve`` or ``fail`` wins and returns True. Threads,
asyncio tasks and trio tasks may wait for it at the same time. A waiter that times out
or is cancelled only removes its own wake-up: waiting never changes the operation, and
the value stays for the next waiter.

A Promise is one object, not two that refer to each other: a dropped update is noticed
at once only if nothing but the caller's reference keeps it.

**Settling.** An end with :class:`~replicas.errors.OutcomeUnknown` may be replaced once,
when the outcome becomes known: by a value or another error
(:meth:`Promise.replace_unknown`), or by work that makes the value
(:meth:`Promise.settle_by`). Such work writes into the caller's tensors, so it runs only
on the first thread that waits again.

**Every wait ends.** Only the session thread ends a Promise. If that thread ends for any
reason (:class:`SessionEnd`), all Promises fail with its error, also those that had not
reached the thread.

**Taking back.** A value that no waiter has looked at may be taken back for a newer one
(:meth:`Promise.take_back`). Looking and taking back hold one lock, so exactly one of
them comes first.

A Promise is *observed* when an outcome is about to be handed to a waiter, and *told*
when it was handed over. A failed publish or collective that was not told is raised at
the next publish or at close, so that fire-and-forget loses no failure.
"""

from __future__ import annotations

import asyncio
import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from replicas import errors
from replicas.common import own_loop
from replicas.common.logs import Log
from replicas.common.waits import Latch, locked
from replicas.messages import ReceiptData, arguments
from replicas.messages.identity import Member

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = Log("replicas.channel")


class SessionEnd(Latch):
    """Latch, set when a session thread has ended for good; ``error`` is the reason."""

    error: errors.ReplicasError = errors.InternalError("the session thread has ended")


class Receipt(ReceiptData, frozen=True, kw_only=True, eq=False):
    """The result of a successful publish or collective.

    :param version: number of the published version; 0 for a collective.
    :param epoch: the membership epoch at its end.
    :param members: the members that took part to the end.
    :param lost: names of the members that were lost on the way.
    :param reasons: why each of ``lost`` was lost, in one line, by name.
    :param not_loaded: why target replicas failed to load a version since the previous
        receipt, by name. (Loads follow the commit; for those of this version see
        :meth:`~replicas.Channel.loaded`.)
        Here and in ``reasons`` only the first 64 names have texts.
    :param nbytes: bytes of the weights, or of this member's own tensors.
    :param wire_nbytes: bytes of weights sent over the network for the version until its
        commit, without those mapped within a host. 0 for a collective.
    :param seconds: from the first member's call to the verdict.
    :param phases: seconds by phase. Of a publish: ``begin`` (until the last rank of the
        source has called it), ``wait`` for a free slot, ``pack`` (copying into it),
        ``queue`` behind the version before, ``form`` (a process group), ``map``
        (members of the host map the slot), ``transfer`` to other hosts, ``verify``
        (digests), ``acknowledge`` (until each target has answered or is left out),
        ``commit`` (the decision on disk), and with a GPU ``hold``, for which the
        copies occupied the caller's stream. Of a collective that was tried more than
        once also ``retry``.
    :param digest: XXH3 digest of the published image, the same on all holders
        (``update.digest``); empty for a collective, and until the digests of several
        ranks' parts are combined.
    :param staging: location of the channel's slots, ``"host"`` or ``"device"``; empty
        for a collective.
    :param outputs: ``gather`` and ``all_gather``: each participant's tensors (for
        ``gather`` on the root only).
    :param tensors: ``scatter``, ``reduce_scatter`` and ``recv``: the tensors received;
        the caller's own tensors where given.
    """

    outputs: dict[Member, tuple[torch.Tensor, ...]] = {}
    tensors: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, data: ReceiptData, **more: Any) -> Receipt:
        """Return a receipt with the fields of ``data``, and those given by ``more``."""
        return cls(**msgspec.structs.asdict(data), **more)

    def metrics(self, prefix: str = "replicas/") -> dict[str, float]:
        """Return numbers for an experiment logger, by name with ``prefix``.

        The names are version, epoch, members (count), lost (count), not_loaded (count),
        nbytes, wire_nbytes, seconds, and ``<phase>_seconds`` of each phase.
        """
        prefix = arguments.text("metrics: prefix", prefix)
        values = {name: getattr(self, name) for name in ("version", "epoch", "nbytes", "wire_nbytes", "seconds")}
        values |= {"members": len(self.members), "lost": len(self.lost), "not_loaded": len(self.not_loaded)}
        values |= {f"{phase}_seconds": seconds for phase, seconds in self.phases.items()}
        return {prefix + name: float(value) for name, value in values.items()}


@arguments.refuse_unknown_keywords
class Pending(Generic[T]):
    """The outcome of a channel operation, on any thread or under asyncio or trio.

    Call :meth:`wait`, or ``await`` it. Waiting never changes the operation: after a
    timed-out or cancelled wait the operation continues, and you can wait again.

    After :class:`~replicas.errors.OutcomeUnknown`, wait again to learn the outcome: it
    replaces the error as soon as it is known. If a collective turns out to have
    succeeded, this second wait writes its results into the caller's tensors, on the
    waiting thread.
    """

    def __init__(self, what: str, session_end: SessionEnd | None = None) -> None:
        """Start without an outcome. ``what``: name of the operation, for texts. When
        ``session_end`` is set (the session thread has ended), this fails with its
        error."""
        self._what = what
        self._session_end = session_end or SessionEnd()
        self._pid = os.getpid()
        self._ended = Latch()
        self._ending = threading.Lock()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._observed = False
        self._told = False
        self._work: Callable[[], T] | None = None
        self._working = threading.Lock()

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error is not None else "done"
        return f"<Pending {self._what}: {state}>"

    def done(self) -> bool:
        """Return True when there is an outcome: a wait would not block."""
        if self._session_end.is_set:
            # no other thread would end it, or wake waiters after an interrupt
            self._end(None, self._session_end.error)
        return self._ended.is_set

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the outcome; return the value or raise the error.

        :param timeout: seconds; 0 or less: do not block; None (the default): until the
            operation ends by its own deadline.
        :raises replicas.errors.UsageError: ``timeout`` is not a finite number up to
            1e9; or this is a forked child; or a coordinator runs on this thread's event
            loop, which would be blocked: ``await`` it instead.
        :raises TimeoutError: the timeout passed; the operation continues.
        :raises replicas.errors.OutcomeUnknown: it is not known yet; wait again later.
        :raises replicas.errors.ReplicasError: the operation failed.
        """
        timeout_s = arguments.patience("wait: timeout", timeout)
        self._check_process()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._observe_outcome():
            if timeout_s != 0:
                own_loop.must_not_block("wait()", awaitable=True)
            # it may have ended at the last moment
            if (
                not self._wait_ended(None if until is None else until - time.monotonic())
                and not self._observe_outcome()
            ):
                raise TimeoutError(f"{self._what} has not ended within {timeout} s; it continues")
        return self._outcome()

    def _wait_ended(self, timeout_s: float | None) -> bool:
        """Block up to ``timeout_s`` (None: no limit); return True if it has ended."""
        fail = partial(self.done)  # not the method: those of two waits are equal
        self._session_end.add(fail)
        try:
            return self._ended.wait(timeout_s)
        finally:
            self._session_end.remove(fail)

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> T:
        """Await the outcome, under asyncio or trio; return the value or raise."""
        self._check_process()
        while not self._observe_outcome():
            event, waker = _event_of_this_library()
            fail = partial(self.done)  # as in _wait_ended()
            self._ended.add(waker)
            self._session_end.add(fail)
            try:
                await event.wait()
            finally:
                self._session_end.remove(fail)
                self._ended.remove(waker)
        return self._outcome()

    def _check_process(self) -> None:
        """Raise UsageError in a forked child if there is no outcome yet."""
        if self._pid != os.getpid() and not self.done():
            raise errors.UsageError(
                f"{self._what}: this process was forked from the caller, and cannot receive the outcome",
                hint="wait in the process that called it, or join in this one",
            )

    def _observe_outcome(self) -> bool:
        """Return True, without blocking, if it has ended; then forbid take_back()."""
        return self.done() and locked(self._ending, self._observe)

    def _observe(self) -> bool:
        """Under the lock: forbid take_back() of an outcome; False if there is none."""
        self._observed = self._observed or self._ended.is_set  # the value may have been taken back since
        return self._ended.is_set

    def _end(self, value: T | None, error: BaseException | None) -> bool:
        """Set the outcome, wake the waiters; return False if one was set: it stays."""
        is_first = locked(self._ending, self._put, value, error)
        if not self._ended.is_set:
            return is_first  # the value was taken back already: the waiters keep waiting
        try:
            self._ended.wake()  # not set(): the value may be taken back at any moment
        except BaseException as failure:  # of a waiting event loop of the program; the other waiters are awake
            if not isinstance(failure, Exception) and threading.current_thread() is threading.main_thread():
                raise  # perhaps an interrupt, which comes on this thread only
            logger.exception("going on after a bug: cannot wake a waiter of %s; please report this", self._what)
        return is_first

    def _put(self, value: T | None, error: BaseException | None) -> bool:
        """Under the lock: set the outcome; return False if one was set, which stays."""
        if self._ended.is_set:
            return False
        self._value, self._error = value, error
        self._ended.is_set = True
        return True

    def _outcome(self) -> T:
        """Return the value, or raise the error, of an operation that has ended. First
        run work of :meth:`Promise.settle_by`, if any. An error counts as told then."""
        if self._work is not None:
            locked(self._working, self._do_work)
        error = self._error
        try:
            if error is not None:
                raise copy_error(error)
            return cast("T", self._value)
        finally:  # last: after an earlier interrupt the failure is raised again
            self._told = True

    def _do_work(self) -> None:
        """Under a lock: run :meth:`Promise.settle_by` work, once; keep its outcome."""
        work = self._work
        if work is None:
            return  # another thread has done it
        try:
            self._value, self._error = work(), None
        except Exception as error:  # noqa: BLE001  # any error is the outcome
            self._error = error
        self._work = None


class Promise(Pending[T]):
    """A :class:`Pending` as its maker sees it, with methods that set the outcome."""

    @property
    def observed(self) -> bool:
        """True once a waiter has found an outcome, which is never taken back then."""
        return self._observed

    def mark_reported(self) -> None:
        """Record that a failure is known: no later publish or close raises it."""
        self._told = True

    def resolve(self, value: T) -> bool:
        """End with ``value``; return False if there was an outcome already."""
        return self._end(value, None)

    def fail(self, error: BaseException) -> bool:
        """End with ``error``; return False if there was an outcome already."""
        return self._end(None, error)

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Wait for the outcome, but do not take it; return False after ``timeout_s``.

        With None the wait ends with the operation or the session thread.
        """
        return self._wait_ended(timeout_s)

    def wait_for_session(self, timeout_s: float | None = None) -> T:
        """Wait, return or raise as :meth:`wait`, also on a coordinator's event loop.

        :raises TimeoutError: ``timeout_s`` has passed.
        """
        if not self._wait_ended(timeout_s):
            raise TimeoutError(f"{self._what} has not ended within {timeout_s} s")
        return self._outcome()

    def take_back(self) -> bool:
        """Remove a value that no waiter has seen, so that this is pending again.

        Returns False, and changes nothing, without such a value.
        """
        with self._ending:
            if self._observed or not self._ended.is_set or self._error is not None:
                return False
            self._value, self._ended.is_set = None, False
            return True

    def replace_unknown(self, outcome: T | BaseException) -> bool:
        """Replace an OutcomeUnknown by ``outcome``; if there is none, return False."""
        with self._ending:
            if not self.unknown:
                return False
            if isinstance(outcome, BaseException):
                self._error = outcome
            else:
                self._value, self._error = outcome, None
        return True

    def settle_by(self, work: Callable[[], T]) -> bool:
        """Have the next waiter's thread call ``work``, whose result is the outcome.

        Return False, and never call it, if the outcome is not OutcomeUnknown.
        """
        with self._ending:
            if not self.unknown:
                return False
            self._work = work
        return True

    def abandon(self, error: BaseException) -> None:
        """Replace :meth:`settle_by` work not run yet, if any, by outcome ``error``."""
        with self._working:
            if self._work is not None:
                self._work, self._error = None, error

    @property
    def unknown(self) -> bool:
        """True if the outcome is OutcomeUnknown, and was not replaced yet."""
        return self._ended.is_set and self._work is None and isinstance(self._error, errors.OutcomeUnknown)

    @property
    def uncollected(self) -> bool:
        """True while :meth:`settle_by` work waits for a thread to run it."""
        return self._work is not None

    def untold_error(self) -> BaseException | None:
        """Return the error if no caller has received it, else None."""
        return None if self._told or not self.done() else self._error


class Failures:
    """Failed operations whose callers have not waited: raised at a later call."""

    def __init__(self, name: str) -> None:
        """Start without failures of the channel ``name``, which is for log lines."""
        self._name = name
        self._known: tuple[Promise[Any], ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, failed: Promise[Any]) -> None:
        """Session thread: remember a failure until a caller has received it."""
        known = (known for known in self._known if known.untold_error() is not None)
        self._known = (*known, failed)

    def take_unreported(self) -> BaseException | None:
        """Any thread: return the oldest error that no caller has received, or None.

        Logs the other ones; all count as reported then.
        """
        found = None
        for promise in self._known:
            error = promise.untold_error()
            promise.mark_reported()
            if error is not None and found is not None:
                logger.warning("channel %s: dropping an old failure that no caller waited for: %s", self._name, error)
            found = found or error
        return found


def copy_error(error: BaseException) -> BaseException:
    """Return a copy of a kept error, to raise it.

    A raised error refers to the frames that it passes. A kept one would keep all that
    these frames hold alive: tensors, or the loan of a publish.
    """
    try:
        made = copy.copy(error)
    except Exception:  # noqa: BLE001  # an error of the user's, which cannot be copied
        return error.with_traceback(None)
    made.__cause__, made.__suppress_context__ = error.__cause__, error.__suppress_context__
    return made


def _in_task_of(trio: Any) -> bool:
    """Return True if this code runs in a trio task; ``trio`` is the module."""
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def _event_of_this_library() -> tuple[Any, Callable[[], None]]:
    """Return (event of asyncio or trio, function that sets it from any thread)."""
    trio = sys.modules.get("trio")
    if trio is not None and _in_task_of(trio):
        token = trio.lowlevel.current_trio_token()
        trio_event = trio.Event()

        def wake_trio() -> None:
            """Any thread: set the event; do nothing if trio's run is over."""
            try:
                token.run_sync_soon(trio_event.set)
            except trio.RunFinishedError:
                return  # the run is over, and its waiter with it

        return trio_event, wake_trio
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        """Any thread: set the event; do nothing if its loop is closed."""
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            if not loop.is_closed():  # else the waiter went with its loop
                raise

    return event, wake

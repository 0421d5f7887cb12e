"""Covers: channel/session/pending.py."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from collections.abc import Callable

import pytest
import trio

from replicas import errors
from replicas.channel.session.pending import Promise, Receipt, SessionEnd
from replicas.messages import ReceiptData
from replicas.messages.identity import Member


def _waiters(pending: Promise[int]) -> int:
    return len(pending._ended._wakers)


def _resolve_when_waited(pending: Promise[int], end: Callable[[], object]) -> threading.Thread:
    """End ``pending`` on another thread, but only when somebody waits for it."""

    def run() -> None:
        while not _waiters(pending):
            threading.Event().wait(0.001)
        end()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_first_outcome_wins() -> None:
    pending: Promise[int] = Promise("test")
    assert pending.resolve(1)
    assert not pending.resolve(2)
    assert not pending.fail(ValueError())
    assert pending.wait() == 1
    assert pending.wait(0) == 1


def test_wait_times_out_and_changes_nothing() -> None:
    pending: Promise[int] = Promise("publish on policy")
    with pytest.raises(TimeoutError, match=r"publish on policy has not ended within 0.01 s"):
        pending.wait(0.01)
    assert not pending.done()
    assert pending.resolve(3)
    assert pending.wait(0) == 3


def test_wait_on_a_thread() -> None:
    pending: Promise[int] = Promise("test")
    thread = _resolve_when_waited(pending, lambda: pending.resolve(5))
    assert pending.wait(10) == 5
    thread.join()


def test_failure_is_raised_at_every_wait_and_is_observed() -> None:
    pending: Promise[int] = Promise("test")
    error = errors.Busy("no slot")
    assert pending.untold_error() is None
    pending.fail(error)
    assert pending.untold_error() is error
    for _ in range(2):
        with pytest.raises(errors.Busy):
            pending.wait()
    assert pending.untold_error() is None


def test_await_under_asyncio() -> None:
    async def main() -> None:
        pending: Promise[int] = Promise("test")
        thread = _resolve_when_waited(pending, lambda: pending.resolve(7))
        assert await pending == 7
        assert await pending == 7
        thread.join()

    asyncio.run(main())


def test_await_under_trio() -> None:
    async def main() -> None:
        pending: Promise[int] = Promise("test")
        thread = _resolve_when_waited(pending, lambda: pending.fail(errors.Gone("gone")))
        with pytest.raises(errors.Gone):
            await pending
        await trio.to_thread.run_sync(thread.join)

    trio.run(main)


def test_a_cancelled_await_takes_only_itself_back() -> None:
    async def in_asyncio(pending: Promise[int]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pending

    async def in_trio(pending: Promise[int]) -> None:
        with trio.move_on_after(0.01) as scope:
            await pending
        assert scope.cancelled_caught

    pending: Promise[int] = Promise("test")
    asyncio.run(in_asyncio(pending))
    trio.run(in_trio, pending)
    assert not _waiters(pending)
    assert pending.resolve(1)


def test_a_waiter_whose_loop_is_closed_does_no_harm() -> None:
    pending: Promise[int] = Promise("test")

    async def wait() -> None:
        await pending

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert pending.resolve(1)
    task.get_coro().close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop is gone on purpose


def test_many_waiters_of_all_kinds() -> None:
    pending: Promise[int] = Promise("test")
    got: list[int] = []

    async def one() -> None:
        got.append(await pending)

    async def in_asyncio() -> None:
        await asyncio.gather(one(), one(), one())

    async def in_trio() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)

    threads = [
        threading.Thread(target=lambda: got.append(pending.wait(10))),
        threading.Thread(target=lambda: asyncio.run(in_asyncio())),
        threading.Thread(target=lambda: trio.run(in_trio)),
    ]
    for thread in threads:
        thread.start()
    while _waiters(pending) < 7:
        threading.Event().wait(0.001)
    pending.resolve(9)
    for thread in threads:
        thread.join(10)
    assert got == [9] * 7


def test_an_unknown_outcome_is_settled_once() -> None:
    unknown, failure = errors.OutcomeUnknown("?"), errors.SyncError("which did not happen")
    for settled in (7, failure):
        pending: Promise[int] = Promise("test")
        assert not pending.replace_unknown(1), "it has no outcome yet"
        pending.fail(unknown)
        with pytest.raises(errors.OutcomeUnknown):
            pending.wait()
        assert pending.replace_unknown(settled)
        assert not pending.replace_unknown(9)
        assert not pending.settle_by(lambda: 9)
        if settled is failure:
            with pytest.raises(errors.SyncError, match="which did not happen"):
                pending.wait()
        else:
            assert pending.wait() == 7
    certain: Promise[int] = Promise("test")
    certain.fail(errors.Busy("no slot"))
    assert not certain.replace_unknown(1)
    assert not certain.settle_by(lambda: 1)


def test_late_work_is_done_once_by_a_thread_that_waits() -> None:
    pending: Promise[int] = Promise("test")
    pending.fail(errors.OutcomeUnknown("?"))
    threads: list[int] = []

    def work() -> int:
        threads.append(threading.get_ident())
        return len(threads)

    assert pending.settle_by(work)
    assert pending.uncollected
    assert isinstance(pending.untold_error(), errors.OutcomeUnknown), "nobody has waited: it surfaces at close"
    got: list[int] = []
    waiting = [threading.Thread(target=lambda: got.append(pending.wait(10))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert got == [1] * 4
    assert len(threads) == 1
    assert threads[0] in {thread.ident for thread in waiting}
    assert not pending.uncollected


def test_late_work_that_fails_or_is_interrupted_or_withdrawn() -> None:
    outcomes: list[BaseException] = [KeyboardInterrupt(), errors.NoCapacity("no memory")]

    def work() -> int:
        raise outcomes.pop(0)

    pending: Promise[int] = Promise("test")
    pending.fail(errors.OutcomeUnknown("?"))
    pending.settle_by(work)
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert pending.uncollected, "an interrupt ends the wait, not the results"
    for _ in range(2):
        with pytest.raises(errors.NoCapacity):
            pending.wait()
    withdrawn: Promise[int] = Promise("test")
    withdrawn.fail(errors.OutcomeUnknown("?"))
    withdrawn.settle_by(lambda: 1)
    withdrawn.abandon(errors.Gone("closed"))
    with pytest.raises(errors.Gone):
        withdrawn.wait()
    pending.abandon(errors.Gone("closed"))
    with pytest.raises(errors.NoCapacity):
        pending.wait()


def test_a_wait_that_is_interrupted_changes_nothing() -> None:
    pending: Promise[int] = Promise("test")

    def interrupt() -> None:
        while not _waiters(pending):
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pending.wait(30)
    thread.join()
    assert not pending.done()
    assert pending.resolve(4)
    assert pending.wait(0) == 4


def test_receipt_metrics_are_flat_numbers() -> None:
    data = ReceiptData(
        epoch=2, members=(Member("a", 0, 0),), lost=("a/1/0",), nbytes=10, seconds=0.5, phases={"pack": 0.1}, version=4
    )
    assert Receipt.of(data).metrics("sync/") == {
        "sync/version": 4.0,
        "sync/epoch": 2.0,
        "sync/members": 1.0,
        "sync/lost": 1.0,
        "sync/not_loaded": 0.0,
        "sync/nbytes": 10.0,
        "sync/wire_nbytes": 0.0,
        "sync/seconds": 0.5,
        "sync/pack_seconds": 0.1,
    }


class Lock:
    """A lock after whose first release something happens."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._lock, self._then = threading.Lock(), [then]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        while self._then:
            self._then.pop()()


def test_what_is_taken_back_as_soon_as_it_has_ended_is_pending() -> None:
    pending: Promise[int] = Promise("test")
    pending._ending = Lock(pending.take_back)  # type: ignore[assignment]  # a fake
    assert pending.resolve(1)
    assert not pending.done()
    thread = _resolve_when_waited(pending, lambda: pending.resolve(2))
    assert pending.wait(30) == 2
    thread.join()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_who_waits_wakes_when_another_thread_was_interrupted_as_it_ended_it() -> None:
    end = SessionEnd()
    pending: Promise[int] = Promise("test", end)
    got: list[errors.ReplicasError] = []

    def wait() -> None:
        try:
            pending.wait(60)
        except errors.ReplicasError as error:
            got.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    while not _waiters(pending) or not end._wakers:
        threading.Event().wait(0.001)
    end.is_set = True  # the first step of set(), on the session thread
    pending._ending = Lock(interrupt)  # type: ignore[assignment]  # a fake
    with pytest.raises(KeyboardInterrupt):
        pending.done()
    end.set()
    waiter.join(30)
    assert [type(error) for error in got] == [errors.InternalError]


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_while_others_are_woken_is_raised_on_the_main_thread_only(first: bool) -> None:
    def pending() -> tuple[Promise[int], list[int]]:
        made, woken = Promise[int]("test"), list[int]()
        wakers: list[Callable[[], object]] = [interrupt, lambda: woken.append(1)]
        for waker in wakers if first else reversed(wakers):
            made._ended.add(waker)
        return made, woken

    here, woken = pending()
    with pytest.raises(KeyboardInterrupt):
        here.resolve(1)
    assert woken == [1]
    assert here.wait(0) == 1
    there, woken = pending()
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(there.resolve(1)))
    thread.start()
    thread.join(30)
    assert ended == [True], "a wake-up of the program's does not end the session thread"
    assert woken == [1]


def test_a_failure_that_is_kept_keeps_nothing_of_its_callers() -> None:
    """Without a collection: what they held may be a loan, or gigabytes."""

    class Held: ...

    told: list[tuple[str, str]] = []

    def call() -> weakref.ref[Held]:
        held = Held()
        try:
            pending.wait(30)
        except errors.SyncError as error:
            told.append((str(error), error.hint))
        return weakref.ref(held)

    pending: Promise[int] = Promise("test")
    pending.fail(errors.SyncError("too late", hint="sooner"))
    gc.disable()
    try:
        assert call()() is None
        assert call()() is None
    finally:
        gc.enable()
    assert told == [("too late (sooner)", "sooner")] * 2

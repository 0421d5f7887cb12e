"""The session thread's loop: it serves as long as the process lives, and who waits for
it never waits in vain.

Covers: channel/session/hub.py, channel/session/loop.py, channel/session/outbox.py.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from replicas import errors
from replicas.carry import wire as carry_wire
from replicas.carry.rank_side import CarrierDied, PullFailed
from replicas.channel.session import loop as module
from replicas.channel.session.hub import as_wire_error
from replicas.channel.session.loop import SessionLoop, session_loop
from replicas.channel.session.pending import Promise
from tests.support.channel.scripted import ScriptedWorld


class User:
    """A channel with one who waits."""

    def __init__(self) -> None:
        self.waiting: Promise[int] = Promise("test")

    def loop_broken(self, error: errors.ReplicasError) -> None:
        self.waiting.fail(error)


@pytest.fixture
def loop() -> Iterator[SessionLoop]:
    loop = SessionLoop().start_thread()
    yield loop
    loop.close()


def leave() -> None:
    raise SystemExit("of a signal's handler")


async def leave_soon() -> None:
    await asyncio.sleep(0)
    leave()


@pytest.mark.parametrize("how", ["function", "task", "stop"])
def test_what_ends_the_loop_ends_those_who_wait_and_the_loop_goes_on(loop: SessionLoop, how: str) -> None:
    users = [User(), User()]
    for user in users:
        loop.call(loop.users.add, user.loop_broken)
    match how:
        case "function":
            loop.call(leave)
        case "task":
            loop.call(lambda: loop.spawn(leave_soon(), "ends"))
        case _:
            loop.call(loop.loop.stop)
    for user in users:
        with pytest.raises(errors.InternalError, match="the session thread's loop has ended"):
            user.waiting.wait(10)
    assert loop.run(lambda: asyncio.sleep(0, 5), 10) == 5
    assert loop.alive


def test_a_coroutine_that_is_left_by_an_exit_fails_for_who_waits_alone(loop: SessionLoop) -> None:
    with pytest.raises(errors.InternalError, match="SystemExit: of a signal's handler"):
        loop.run(leave_soon, 10)
    assert loop.run(lambda: asyncio.sleep(0, 6), 10) == 6


def test_a_loop_that_cannot_go_on_takes_no_calls(loop: SessionLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDS_MAX", 2)
    monkeypatch.setattr(module, "_current", loop)
    assert session_loop() is loop
    unheard_of: Promise[int] = Promise("test", loop.end)
    for _ in range(2):
        loop.call(leave)
    loop._thread.join(10)
    for late in (unheard_of, Promise("test", loop.end)):
        assert late.done()
        with pytest.raises(errors.InternalError, match="loop has ended: SystemExit"):
            late.wait(10)
    loop.call(leave)
    with pytest.raises(errors.InternalError, match="loop has ended: SystemExit"):
        loop.run(leave_soon, 10)
    another = session_loop()
    try:
        assert another is not loop
        assert another.run(lambda: asyncio.sleep(0, 7), 10) == 7
    finally:
        another.close()


def test_a_session_thread_that_cannot_be_started_is_a_lack_of_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "_current", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(errors.NoCapacity, match=r"no further process or thread: .*raise that limit"):
        session_loop()
    wire = as_wire_error(RuntimeError("can't start new thread"), channel="policy", phase="pack")
    assert wire.kind == "NoCapacity"
    assert "raise that limit" in wire.message


def test_a_failed_pull_is_no_bug() -> None:
    reply = carry_wire.PullFailed(1, {"trainer/0/0": "10.0.0.1:7100 cannot be reached"}, {})
    wire = as_wire_error(PullFailed(reply), channel="policy", phase="transfer")
    assert (wire.kind, wire.message) == (
        "SyncError",
        "fetching the version from other hosts failed: trainer/0/0: 10.0.0.1:7100 cannot be reached",
    )
    assert as_wire_error(CarrierDied("it died"), channel="policy", phase="transfer").kind == "SyncError"


def test_whoever_waits_when_the_thread_ends_is_woken(loop: SessionLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread and in an event loop; the session's own users need not know of it."""
    monkeypatch.setattr(module, "ENDS_MAX", 1)
    waiting: list[Promise[int]] = [Promise("test", loop.end), Promise("test", loop.end)]
    found: list[BaseException] = []

    async def wait() -> None:
        await waiting[1]

    def keep(call: Callable[[], object]) -> None:
        try:
            call()
        except errors.InternalError as error:
            found.append(error)

    calls = [waiting[0].wait, waiting[0].wait_for_session, lambda: asyncio.run(wait())]
    threads = [threading.Thread(target=keep, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while len(loop.end._wakers) < len(calls):
        assert time.monotonic() < until
        time.sleep(0.001)
    loop.call(leave)
    for thread in threads:
        thread.join(30)
    assert len(found) == len(calls)
    assert not loop.end._wakers


def test_closed_descriptors_end_the_thread_and_none_is_closed_twice(loop: SessionLoop) -> None:
    waiting: Promise[int] = Promise("test", loop.end)
    selector = loop.loop._selector  # type: ignore[attr-defined]  # asyncio's own
    os.close(selector.fileno())
    other = os.open(os.devnull, os.O_RDONLY)
    assert other == selector.fileno()
    loop.call(int)  # it looks at its descriptors
    with pytest.raises(errors.Disconnected, match="has closed file descriptors of this library"):
        waiting.wait(30)
    loop._thread.join(30)
    loop.close()
    os.fstat(other)  # it is still open
    os.close(other)


def test_a_waiter_that_cannot_be_woken_holds_up_no_other() -> None:
    pending, woken = Promise[int]("test"), threading.Event()

    def fail() -> None:
        raise SystemExit("of the program's event loop")

    for waker in (fail, woken.set):
        pending._ended.add(waker)
    session = threading.Thread(target=pending.resolve, args=(1,))
    session.start()
    session.join(30)
    assert woken.is_set()
    assert pending.wait(0) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SystemExit("bye"), KeyboardInterrupt(), RuntimeError("bug")])
async def test_whatever_a_handler_raises_ends_its_channel(target: ScriptedWorld, error: BaseException) -> None:
    def fail() -> None:
        raise error

    waiting = target.receiver.receive(None)
    await asyncio.sleep(0)
    target.hub.call(fail)
    with pytest.raises(errors.InternalError, match=type(error).__name__):
        await waiting


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SystemExit("bye"), RuntimeError("bug")])
async def test_whatever_a_task_raises_ends_its_channel(target: ScriptedWorld, error: BaseException) -> None:
    async def fail_soon() -> None:
        raise error

    waiting = target.receiver.receive(None)
    await asyncio.sleep(0)
    target.hub.spawn(fail_soon(), "fails")
    with pytest.raises(errors.InternalError, match=type(error).__name__):
        await waiting

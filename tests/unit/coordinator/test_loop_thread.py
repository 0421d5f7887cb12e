"""The thread of a coordinator's event loop, and interrupts while it is closed.

Covers: coordinator/threaded.py.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable

import pytest

from replicas.coordinator.threaded import LoopThread


class Thing:
    """Something that is held open, and takes a moment to close."""

    def __init__(self) -> None:
        self.closed = 0

    async def __aenter__(self) -> Thing:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0)
        self.closed += 1


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., object]]:
    """What would be called at the end of the process."""
    found: list[Callable[..., object]] = []
    monkeypatch.setattr(atexit, "register", found.append)
    monkeypatch.setattr(atexit, "unregister", found.remove)
    return found


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["before", "while"])
def test_what_an_interrupt_left_open_is_closed_by_the_next_call(
    where: str, registered: list[Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    thing = Thing()
    thread = LoopThread(thing)
    thread.start()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "before":
            patch.setattr(thread._loop, "call_soon_threadsafe", interrupt)
        else:
            patch.setattr(thread._over, "wait", interrupt)
        thread.close()
    assert registered == [thread.close]
    thread.close()
    assert thing.closed == 1
    assert not thread._thread.is_alive()
    assert not registered
    thread.close()
    assert thing.closed == 1


def test_a_loop_that_ends_just_now_is_no_error(
    registered: list[Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    thing = Thing()
    thread = LoopThread(thing)
    thread.start()
    loop = thread._loop
    assert loop is not None
    call = loop.call_soon_threadsafe

    def ended(stop: Callable[[], object]) -> None:
        call(stop)
        raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(loop, "call_soon_threadsafe", ended)
    thread.close()
    assert thing.closed == 1
    assert not registered

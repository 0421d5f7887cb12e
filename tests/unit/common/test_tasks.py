"""Waits for events that end, tasks that are kept and cancelled.

Covers: common/tasks.py.
"""

from __future__ import annotations

import asyncio

import pytest

from replicas.common.tasks import cancelled, is_set_within, keep_until_done, result_of, say_if_slow

pytestmark = pytest.mark.anyio


async def test_a_wait_ends_with_the_event_or_its_time() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await is_set_within(event, None)
    assert await is_set_within(event, 0.0), "it was set before"


async def test_cancelled_tasks_have_ended_and_say_how() -> None:
    async def fails() -> None:
        raise ValueError("of its own")

    done, failed = asyncio.create_task(asyncio.sleep(0, 7)), asyncio.create_task(fails())
    assert result_of(done) is result_of(None) is None
    await asyncio.wait((done, failed))
    assert (result_of(done), result_of(failed)) == (7, None)
    waits = asyncio.create_task(asyncio.sleep(3600))
    value, error, cut = await cancelled(done, failed, waits)
    assert (value, str(error)) == (7, "of its own")
    assert isinstance(cut, asyncio.CancelledError)
    assert waits.cancelled()


async def test_a_task_is_kept_until_it_ends() -> None:
    tasks: set[asyncio.Task[int]] = set()
    task = keep_until_done(asyncio.create_task(asyncio.sleep(0, 3)), tasks)
    assert tasks == {task}
    assert await task == 3
    await asyncio.sleep(0)
    assert tasks == set()


async def test_only_a_long_block_says_that_it_waits() -> None:
    said: list[str] = []
    with say_if_slow(said.append, "of a short one", after_s=0.05):
        pass
    with say_if_slow(said.append, "of a long one", after_s=0.0):
        await asyncio.sleep(0.1)
    assert said == ["of a long one"]

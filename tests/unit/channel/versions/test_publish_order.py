"""Publishes that are under way together are announced in their order, whichever digest
is there first.

Covers: channel/versions/filling.py, channel/versions/publish.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.versions.filling import PublishJob
from replicas.messages import Meta
from replicas.weights.feed import Feed
from replicas.weights.packing import Packing
from tests.support.channel.scripted import ScriptedWorld
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def source() -> AsyncIterator[ScriptedWorld]:
    world = ScriptedWorld("source", 3)
    yield world
    await world.end()


@pytest.fixture
def digests(source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Future[str]]]:
    """Of each publish; they come when the test says so."""
    made: list[Future[str]] = []
    filling = source.publisher._filling
    fill = filling.fill

    def late(*given: Any) -> Any:
        manifest, _ = fill(*given)
        made.append(Future())
        return manifest, Packing(made[-1])

    monkeypatch.setattr(filling, "fill", late)
    yield made
    for one in made:
        one.cancel()


async def publish(world: ScriptedWorld, version: int, meta: Callable[[], Meta] | None = None) -> PublishJob:
    """One that has been copied."""
    job = PublishJob(None, 30.0, meta or {}, False, "policy")
    task = asyncio.create_task(
        asyncio.to_thread(world.publisher.publish, Feed({"w": torch.ones(4)}, mode=world.publisher.mode), job)
    )
    world.tell(wire.PublishAdmitted((await world.session.next(wire.PublishBegin)).publish, version))
    await task
    await wait_until(lambda: job.filled, "it is copied")
    return job


def told(world: ScriptedWorld) -> list[int]:
    return [message.publish for message in world.session.sent if isinstance(message, wire.Packed | wire.PackFailed)]


async def test_the_later_one_waits_for_the_earlier_one(source: ScriptedWorld, digests: list[Future[str]]) -> None:
    for version in (5, 6, 7):
        last = await publish(source, version)
    digests[1].set_result("second")
    digests[2].set_result("third")
    await wait_until(lambda: last.state == "ready", "the last is ready")
    assert told(source) == []
    source.new_coordinator()
    assert told(source) == []
    digests[0].set_result("first")
    await wait_until(lambda: last.state == "told", "it is told")
    assert told(source) == [1, 2, 3]


@pytest.mark.parametrize("end", ["verdict", "digest"])
async def test_one_that_fails_holds_up_nobody(source: ScriptedWorld, digests: list[Future[str]], end: str) -> None:
    await publish(source, 5)
    second = await publish(source, 6)
    digests[1].set_result("second")
    await wait_until(lambda: second.state == "ready", "it is ready")
    assert told(source) == []
    error = errors.NoCapacity("no room")
    if end == "verdict":
        source.tell(wire.PublishEnd(1, error=wire.WireError.of(error)))
    else:
        digests[0].set_exception(error)
    await wait_until(lambda: second.state == "told", "it is told")
    assert told(source) == ([2] if end == "verdict" else [1, 2])


async def test_nothing_is_sent_ahead_of_an_earlier_one(source: ScriptedWorld, digests: list[Future[str]]) -> None:
    await publish(source, 5)
    source.hub.several_hosts = True
    second = await publish(source, 6)
    assert not second.streaming
    assert told(source) == []
    digests[0].set_result("first")
    digests[1].set_result("second")
    await wait_until(lambda: second.state == "told", "it is told")
    third = await publish(source, 7)
    assert third.streaming
    assert told(source) == [3]


async def test_what_is_not_described_yet_is_not_sent_ahead(source: ScriptedWorld, digests: list[Future[str]]) -> None:
    """Who receives it is told its meta first."""
    source.hub.several_hosts = True
    job = await publish(source, 5, lambda: {"norm": 2})
    assert not job.streaming
    digests[0].set_result("first")
    packed = await source.session.next(wire.Packed)
    assert (packed.streaming, packed.meta) == (False, {"norm": 2})
    assert source.hub.held_versions.meta(5) == {"norm": 2}
    source.new_coordinator()
    begun, packed = await source.session.next(wire.PublishBegin), await source.session.next(wire.Packed)
    assert (begun.meta, packed.meta) == ({"norm": 2}, {"norm": 2})

"""Rank and broadcast of a version: when the slot is ready, and what the rank says.

Covers: channel/versions/transfers.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from replicas import messages as wire
from replicas.channel.versions import transfers
from replicas.channel.versions.filling import PublishJob
from replicas.weights.feed import Feed
from tests.support.channel.scripted import DIGEST, MANIFEST, ScriptedWorld
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


class Publishing:
    """A publish of version 5 that is not copied before ``go_on``."""

    def __init__(self, source: ScriptedWorld) -> None:
        self.source = source
        self.go_on = threading.Event()
        packer = source.publisher._filling._packer
        self._pack, packer.pack = packer.pack, self._late  # type: ignore[method-assign]

    def _late(self, *given: Any, **more: Any) -> Any:
        assert self.go_on.wait(30)
        return self._pack(*given, **more)

    async def begin(self) -> asyncio.Task[Any]:
        source, feed = self.source, Feed({"w": torch.full((4,), 7.0)})
        source.hub.several_hosts = True
        job = PublishJob(None, 30.0, {}, False, "policy")
        task = asyncio.create_task(asyncio.to_thread(source.publisher.publish, feed, job))
        source.tell(wire.PublishAdmitted((await source.session.next(wire.PublishBegin)).publish, 5))
        assert (await source.session.next(wire.Packed)).streaming
        return task

    def offer(self, digest: str = "", deadline_s: float = 10.0) -> None:
        offer = wire.TransferOffer(1, 5, "send", "image", MANIFEST.hash, {}, deadline_s, digest=digest, streaming=True)
        self.source.tell(offer)


@pytest.fixture
async def publishing() -> AsyncIterator[Publishing]:
    source = ScriptedWorld("source", 2)
    made = Publishing(source)
    task = await made.begin()
    yield made
    made.go_on.set()
    await task
    await source.end()


@pytest.mark.parametrize("digest", ["", "as the publisher says"])
async def test_a_slot_that_is_being_filled_is_sent_when_it_is_full(
    publishing: Publishing, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publishing.source
    (await source.lane("x")).gate.set_result(None)
    publishing.offer(digest)
    await asyncio.sleep(0.05)
    assert not any(isinstance(sent, wire.TransferReady) for sent in source.session.sent)
    publishing.go_on.set()
    assert (await source.session.next(wire.TransferReady)).transfer == 1
    if digest:  # whoever knows it reads nothing
        monkeypatch.setattr(transfers, "digest_of", None)
    source.go(1, "x")
    await source.session.next(wire.OperationDone)
    assert (await source.session.next(wire.TransferDone)).image_digest == (digest or DIGEST)


async def test_a_slot_that_is_not_filled_in_time_fails_the_transfer(publishing: Publishing) -> None:
    publishing.offer(deadline_s=0.05)
    failed = await publishing.source.session.next(wire.TransferFailed)
    assert (failed.transfer, failed.error.kind) == (1, "Gone")
    assert "the publisher has not copied the version in time" in failed.error.message


async def test_who_receives_says_when_it_is_over_and_then_what_it_has(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    target.offer(1, 3)
    await target.session.next(wire.TransferReady)
    target.go(1, "x")
    sidecar.gate.set_result(None)
    await wait_until(lambda: len(target.session.sent) == 2, "it has said so")
    over, done = target.session.sent
    assert isinstance(over, wire.OperationDone)
    assert isinstance(done, wire.TransferDone)
    assert done.image_digest == DIGEST


async def test_a_broadcast_that_fails_ends_the_operation_and_the_transfer(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    target.offer(1, 3)
    await target.session.next(wire.TransferReady)
    target.go(1, "x")
    await asyncio.sleep(0)
    sidecar.kill()
    for kind in (wire.OperationFailed, wire.TransferFailed):
        assert "killed" in (await target.session.next(kind)).error.message
    assert target.slots() == {3: "filling"}, "its sidecar may still write to it"


@pytest.mark.parametrize("known", [False, True])
async def test_a_go_for_a_slot_that_is_not_ready_fails_the_operation(target: ScriptedWorld, known: bool) -> None:
    if known:
        await target.hold(1)
        await target.hold(2, commit=False)
        target.offer(9, 4)  # it waits for a slot
        target.offer(10, 5)
        await asyncio.sleep(0.01)
    target.go(10, "x")
    assert "is not ready" in (await target.session.next(wire.OperationFailed)).error.message

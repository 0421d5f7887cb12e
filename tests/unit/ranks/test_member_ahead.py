"""The member's side of free lanes: what runs ahead, what is told, and what becomes of a turn that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel import ahead
from replicas.channel.operation_job import Job
from replicas.channel.pending import Pending, Receipt
from replicas.channel.results import Operation
from replicas.core.identity import Member
from tests.support.scripted import ME, Sidecar, World

pytestmark = pytest.mark.anyio

OTHER = Member("rollout", 1, 0, "def")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World("peer", 1)
    yield world
    await world.end()
    world.operations.close()
    world.hub.holdings.close()


async def free_lane(world: World, name: str = "x", free: str = "x.1", step: int | None = None) -> Sidecar:
    sidecar = await world.lane(name)
    world.tell(wire.LaneFree(name, free, (ME, OTHER), step))
    return sidecar


async def call(world: World, kind: Any = "all_reduce", **more: Any) -> tuple[torch.Tensor, Pending[Receipt]]:
    tensor = torch.arange(4.0)
    pending = world.operations.start(Operation(kind, (tensor,), **more), 60.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tensor, pending


def told(world: World, kind: type[Any]) -> list[Any]:
    return [message for message in world.session.sent if isinstance(message, kind)]


async def test_a_call_that_runs_ahead_is_not_told(world: World) -> None:
    sidecar = await free_lane(world)
    for turn in (1, 2):
        tensor, pending = await call(world)
        spec, asked = sidecar.turns[-1]
        assert (asked.number, spec.kind, spec.lane_ranks, len(spec.segments)) == (turn, "all_reduce", (0, 1), 2)
        sidecar.answers.pop()(0.1)
        receipt = await pending
        assert receipt.members == (ME, OTHER)
        assert receipt.nbytes == 16
        assert tensor.tolist() == [0, 2, 4, 6]
    assert not told(world, wire.OperationPost)
    assert sidecar.turns[0][1].mark != sidecar.turns[1][1].mark


async def test_the_mark_stands_for_all_that_must_be_the_same() -> None:
    tensor, other = torch.arange(4.0), torch.arange(4)
    operations = [
        Operation("all_reduce", (tensor,)),
        Operation("all_reduce", (other,)),
        Operation("all_reduce", (tensor,), reduce_op="max"),
        Operation("all_reduce", (tensor,), step=3),
        Operation("reduce", (tensor,), root="rollout/1"),
        Operation("barrier"),
    ]
    marks = {ahead.Ahead._mark(Job(operation, 5.0, "outer"), turn) for operation in operations for turn in (1, 2)}
    assert len(marks) == 2 * len(operations)
    assert all(0 <= mark < 1 << 62 for mark in marks)
    same = Operation("all_reduce", (tensor + 1,))
    assert ahead.Ahead._mark(Job(same, 7.0, "outer"), 1) in marks


async def test_one_that_takes_long_is_posted_and_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "POST_AFTER_S", 0.01)
    sidecar = await free_lane(world)
    _, pending = await call(world)
    post = await world.session.next(wire.OperationPost)
    assert (post.free, post.turn) == ("x.1", 1)
    sidecar.answers.pop()(0.1)
    await pending
    assert await world.session.next(wire.OperationRan) == wire.OperationRan(post.post, "applied")


async def test_what_is_under_way_is_told_before_anything_else_and_what_asks_goes_before_what_does_not(
    world: World,
) -> None:
    sidecar = await free_lane(world)
    _, first = await call(world)
    await call(world, "send", root="rollout/1")
    await call(world)
    posts = told(world, wire.OperationPost)
    assert [(post.kind, post.turn) for post in posts] == [("all_reduce", 1), ("send", 0), ("all_reduce", 0)]
    assert len(sidecar.turns) == 1
    sidecar.answers.pop()(0.1)
    await first
    world.tell(*(wire.OperationEnd(post.post, None, wire.WireError("PeersLost", "gone")) for post in posts[1:]))
    _, last = await call(world)
    assert len(sidecar.turns) == 2
    sidecar.answers.pop()(0.1)
    await last


@pytest.mark.parametrize(
    ("kind", "more"),
    [("all_gather", {}), ("broadcast", {"root": "rollout/7"}), ("all_reduce", {"step": 4})],
)
async def test_what_has_to_ask(world: World, kind: str, more: dict[str, Any]) -> None:
    sidecar = await free_lane(world, step=4)
    await call(world, kind, **more)
    post = await world.session.next(wire.OperationPost)
    assert (post.kind, post.free) == (kind, "")
    assert not sidecar.turns


async def test_a_recall(world: World) -> None:
    sidecar = await free_lane(world)
    _, first = await call(world)
    sidecar.answers.pop()(0.1)
    await first
    _, second = await call(world)
    world.tell(wire.LaneRecall("x.1"))
    assert (await world.session.next(wire.OperationPost)).turn == 2
    assert await world.session.next(wire.LaneUsed) == wire.LaneUsed("x.1", 2, 1, None, True)
    await call(world)
    assert (await world.session.next(wire.OperationPost)).turn == 0
    sidecar.answers.pop()(0.1)
    await second
    assert (await world.session.next(wire.OperationRan)).outcome == "applied"
    world.tell(wire.LaneRecall("y.1"))
    assert await world.session.next(wire.LaneUsed) == wire.LaneUsed("y.1", 0, 0, None, True)


@pytest.mark.parametrize("ready", [True, False])
async def test_a_turn_that_fails_waits_for_the_verdict(world: World, ready: bool) -> None:
    sidecar = await free_lane(world)
    tensor, pending = await call(world)
    if ready:
        sidecar.note_ready()
    world.tell(wire.LaneDrop("x"))
    sidecar.dead.set()
    post = await world.session.next(wire.OperationPost)
    assert (post.free, post.turn) == ("x.1", 1)
    assert await world.session.next(wire.OperationRan) == wire.OperationRan(post.post, "ready" if ready else "failed")
    assert not pending.done()
    assert tensor.tolist() == [0, 1, 2, 3]
    if ready:
        world.tell(wire.OperationEnd(post.post, wire.ReceiptData(1, (ME, OTHER), (), 0, 0.1, {})))
        assert (await pending).members == (ME, OTHER)
        assert tensor.tolist() == [0, 2, 4, 6]
        return
    other = await world.lane("y")
    other.gate.set_result(None)
    segments = (post.segments,) * 2
    world.tell(wire.OperationGo(post.post, 9, "y", (ME, OTHER), (0, 1), segments, -1, 5.0, "1.9", 1))
    assert (await world.session.next(wire.OperationDone)).operation == 9
    world.tell(wire.OperationEnd(post.post, wire.ReceiptData(1, (ME, OTHER), (), 0, 0.1, {})))
    await pending
    assert tensor.tolist() == [0, 2, 4, 6]


async def test_calls_that_wait_for_their_turn_fail_with_it(world: World) -> None:
    sidecar = await free_lane(world)
    calls = [await call(world) for _ in range(3)]
    world.tell(wire.LaneDrop("x"))
    sidecar.dead.set()
    outcomes = [(await world.session.next(wire.OperationRan)) for _ in calls]
    assert {message.outcome for message in outcomes} == {"failed"}
    for message in outcomes:
        world.tell(wire.OperationEnd(message.post, None, wire.WireError("PeersLost", "it is gone")))
    for _, pending in calls:
        with pytest.raises(errors.PeersLost):
            await pending


@pytest.mark.parametrize("ready", [True, False])
async def test_a_new_coordinator(world: World, ready: bool) -> None:
    """It knows nothing of the turn; whether it can have happened is certain when the sidecar is dead."""
    sidecar = await free_lane(world)
    _, pending = await call(world)
    if ready:
        sidecar.note_ready()
    world.new_coordinator()
    await call(world)
    assert not told(world, wire.OperationPost), "what was before is not certain yet"
    sidecar.dead.set()
    with pytest.raises(errors.OutcomeUnknown if ready else errors.Disconnected):
        await pending
    post = await world.session.next(wire.OperationPost)
    assert post.unsettled == (("1.x.1.1",) if ready else ())
    assert not told(world, wire.OperationRan)


async def test_no_word_in_time_leaves_it_open(world: World) -> None:
    sidecar = await free_lane(world)
    tensor, pending = await call(world)
    (job,) = world.operations._jobs.values()
    world.operations._overdue(job)  # what its timer does
    with pytest.raises(errors.OutcomeUnknown):
        await pending
    sidecar.answers.pop()(0.1)
    await pending
    assert tensor.tolist() == [0, 2, 4, 6]


async def test_a_lane_that_is_gone_is_not_used(world: World) -> None:
    world.tell(wire.LaneFree("gone", "gone.1", (ME, OTHER)))
    await call(world)
    assert (await world.session.next(wire.OperationPost)).free == ""

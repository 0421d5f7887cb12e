"""The member's side of operations: attempts, unknown outcomes and how they are settled,
and what is kept for them.

Covers: channel/operations/operations.py, channel/session/sidecar_lanes.py.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.operations.results import KEPT_RESULTS, OperationCall
from replicas.channel.session.pending import Promise, Receipt
from replicas.messages.identity import Member
from replicas.sidecar.rank_side.sidecar_handle import SidecarFailed
from replicas.sidecar.wire import CollectiveSpec, Failed
from replicas.weights.memory.buffers import Buffer
from tests.support.channel.scripted import ME, ScriptedWorld, Sidecar
from tests.support.sidecars import mapped_by

pytestmark = pytest.mark.anyio

OTHER = Member("rollout", 1, 0, "def")


@pytest.fixture
async def world() -> AsyncIterator[ScriptedWorld]:
    world = ScriptedWorld("peer", 1)
    yield world
    await world.end()
    world.operations.close()
    world.hub.held_versions.close()


class Call:
    """An all_reduce of one tensor that has been posted."""

    def __init__(self, tensor: torch.Tensor, pending: Promise[Receipt], post: wire.OperationPost) -> None:
        self.tensor = tensor
        self.pending = pending
        self.post = post

    def go(self, number: int, lane: str = "x", *, attempt: int = 1, ref: str = "") -> wire.OperationGo:
        members = (ME, OTHER) if attempt == 1 else (ME,)
        ranks, segments = tuple(range(len(members))), (self.post.segments,) * len(members)
        return wire.OperationGo(
            self.post.post, number, lane, members, ranks, segments, -1, 5.0, ref or f"1.{number}", attempt
        )

    def success(self) -> wire.OperationEnd:
        return wire.OperationEnd(self.post.post, wire.ReceiptData(1, (ME, OTHER), (), 0, 0.1, {}))

    def failure(self) -> wire.OperationEnd:
        return wire.OperationEnd(self.post.post, None, wire.WireError("PeersLost", "it is gone"))


async def call(world: ScriptedWorld) -> Call:
    tensor = torch.arange(4.0)
    pending = world.operations.start(OperationCall("all_reduce", (tensor,)), 60.0)
    return Call(tensor, pending, await world.session.next(wire.OperationPost))


async def open_lane(world: ScriptedWorld, name: str = "x") -> Sidecar:
    sidecar = await world.lane(name)
    sidecar.gate.set_result(None)
    return sidecar


async def unknown(world: ScriptedWorld, number: int) -> Call:
    """One that said done and then had to end by itself."""
    made = await call(world)
    world.tell(made.go(number))
    await world.session.next(wire.OperationDone)
    world.operations._overdue(world.operations._jobs[made.post.post])  # what its timer does
    with pytest.raises(errors.OutcomeUnknown, match="the all_reduce did not end within its 60 s"):
        await made.pending
    assert made.tensor.tolist() == [0, 1, 2, 3]
    return made


@pytest.mark.parametrize("numel", [4, 1 << 19])
async def test_results_that_cannot_be_written_fail_that_call_alone(
    world: ScriptedWorld, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_lane(world)
    tensor = torch.ones(numel)
    pending = world.operations.start(OperationCall("all_reduce", (tensor,)), 60.0)
    made = Call(tensor, pending, await world.session.next(wire.OperationPost))
    world.tell(made.go(1))
    await world.session.next(wire.OperationDone)

    def refuse(*args: Any, **named: Any) -> None:
        raise AssertionError("not into this one")

    monkeypatch.setattr("replicas.channel.operations.scratch.copy_each", refuse)
    world.tell(made.success())
    with pytest.raises(errors.UsageError, match="AssertionError: not into this one"):
        await asyncio.wait_for(pending, 10)
    monkeypatch.undo()
    assert world.hub.over is None
    following = await call(world)
    world.tell(following.go(2))
    await world.session.next(wire.OperationDone)
    world.tell(following.success())
    await following.pending
    assert world.operations._scratches[""].take_idle(16) is not None, "the memory of the first was given back"


# ---------------------------------------------------------------- attempts


async def test_another_attempt_begins_from_the_inputs_as_they_were(world: ScriptedWorld) -> None:
    stuck = await world.lane("x")
    made = await call(world)
    world.tell(made.go(1))
    await asyncio.sleep(0)
    world.tell(wire.LaneDrop("x"))
    assert stuck.killed
    await open_lane(world, "y")
    world.tell(made.go(2, "y", attempt=2, ref="1.1"))
    assert (await world.session.next(wire.OperationDone)).operation == 2
    world.tell(made.success())
    await made.pending
    assert made.tensor.tolist() == [0, 2, 4, 6]
    stuck.dead.set()
    following = await call(world)
    assert following.post.applied == ("1.1",)
    assert not [m for m in world.session.sent if isinstance(m, wire.OperationFailed)], (
        "the first attempt is of no interest"
    )


async def test_a_go_for_what_has_ended_is_refused(world: ScriptedWorld) -> None:
    await open_lane(world)
    made = await call(world)
    world.tell(made.go(2, attempt=2), made.go(1, attempt=1))
    failed = await world.session.next(wire.OperationFailed)
    assert (failed.operation, failed.error.kind, failed.error.phase) == (1, "Gone", "go")
    world.tell(made.failure())
    world.tell(made.go(3, attempt=3))
    assert (await world.session.next(wire.OperationFailed)).operation == 3
    with pytest.raises(errors.PeersLost):
        await made.pending


async def test_a_refusal_of_the_sidecar_is_the_callers_fault(
    world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Sidecar, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        raise SidecarFailed(Failed(1, "gloo cannot reduce float8_e5m2 tensors", over=False))

    monkeypatch.setattr(Sidecar, "collective", refuse)
    await open_lane(world)
    made = await call(world)
    world.tell(made.go(1))
    failed = await world.session.next(wire.OperationFailed)
    assert (failed.error.kind, failed.error.phase) == ("UsageError", "transfer")


async def test_a_lane_gets_its_operations_in_the_order_of_their_go(
    world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    original = Sidecar.collective

    async def collective(self: Sidecar, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        asked.append(spec.operation)
        return await original(self, spec, inputs, outputs) if outputs is not None else 0.0

    monkeypatch.setattr(Sidecar, "collective", collective)
    await open_lane(world)
    slow = await call(world)  # it needs fresh memory, which takes a thread
    pending = world.operations.start(OperationCall("send", (torch.ones(1),), root="rollout/1"), 60.0)
    quick = Call(torch.ones(1), pending, await world.session.next(wire.OperationPost))
    world.tell(slow.go(1), quick.go(2))
    for number in (1, 2):
        assert (await world.session.next(wire.OperationDone)).operation == number
    assert asked == [1, 2]


# ---------------------------------------------------------------- unknown outcomes


async def test_an_unknown_outcome_that_was_a_success_is_collected_by_waiting_again(
    world: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_lane(world)
    made = await unknown(world, 7)
    doubtful = await call(world)
    assert doubtful.post.unsettled == ("1.7",)
    world.tell(wire.OperationSettled("1.7", True))
    assert made.tensor.tolist() == [0, 1, 2, 3], "nothing is written behind the caller's back"
    refused = wire.WireError("Gone", "an earlier operation did succeed")
    world.tell(wire.OperationEnd(doubtful.post.post, None, refused))
    with pytest.raises(errors.Gone):
        await doubtful.pending

    writers: list[int] = []
    finish = OperationCall.finish

    def watched(self: OperationCall, *args: Any) -> Receipt:
        writers.append(threading.get_ident())
        return finish(self, *args)

    def wait() -> tuple[Receipt, int]:
        return made.pending.wait(), threading.get_ident()

    monkeypatch.setattr(OperationCall, "finish", watched)
    receipt, waiter = await asyncio.to_thread(wait)
    assert writers == [waiter]
    assert receipt.members == (ME, OTHER)
    assert receipt.nbytes == 16
    assert made.tensor.tolist() == [0, 2, 4, 6]
    assert await made.pending is receipt
    following = await call(world)
    assert (following.post.applied, following.post.unsettled) == (("1.7",), ())


async def test_the_next_call_tells_once_of_results_that_nobody_has_collected(world: ScriptedWorld) -> None:
    await open_lane(world)
    made = await unknown(world, 7)
    world.tell(made.success())
    with pytest.raises(errors.Gone, match=r"operation 1\.7"):
        await call(world)
    following = await call(world)  # a decision of the caller's
    world.tell(following.go(8))
    await world.session.next(wire.OperationDone)
    world.tell(following.success())
    await following.pending
    await made.pending
    assert made.tensor.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("late", [True, False])
async def test_an_unknown_outcome_that_was_a_failure(world: ScriptedWorld, late: bool) -> None:
    await open_lane(world)
    made = await unknown(world, 7)
    world.tell(made.failure() if late else wire.OperationSettled("1.7", False))
    with pytest.raises(errors.SyncError) as caught:
        await made.pending
    assert not isinstance(caught.value, errors.OutcomeUnknown)
    world.tell(wire.OperationSettled("1.7", True))
    with pytest.raises(errors.SyncError):
        made.pending.wait()
    assert (await call(world)).post.unsettled == ()
    assert made.tensor.tolist() == [0, 1, 2, 3]


async def test_a_new_coordinator_leaves_only_what_said_done_unknown(world: ScriptedWorld) -> None:
    await open_lane(world)
    done, waiting = await call(world), await call(world)
    world.tell(done.go(3))
    await world.session.next(wire.OperationDone)
    world.new_coordinator()
    with pytest.raises(errors.OutcomeUnknown, match="all_reduce"):
        await done.pending
    with pytest.raises(errors.Disconnected, match="did not happen on this peer"):
        await waiting.pending
    following = await call(world)
    assert following.post.unsettled == ("1.3",)
    assert following.post.post == 3, "numbers of posts are never used twice"
    world.tell(wire.OperationSettled("1.3", True))
    await done.pending
    assert done.tensor.tolist() == [0, 2, 4, 6]


async def test_what_was_posted_to_nobody_is_posted_to_the_new_coordinator(world: ScriptedWorld) -> None:
    await open_lane(world)
    earlier = await call(world)
    world.session.connected = False
    world.hub.disconnected("the test said so")
    made = await call(world)
    world.session.connected = True
    world.new_coordinator()
    assert (await world.session.next(wire.OperationPost)).post == made.post.post
    with pytest.raises(errors.Disconnected):
        await earlier.pending
    world.session.connected = False
    world.hub.disconnected("another time")
    world.session.connected = True
    world.new_coordinator()
    with pytest.raises(errors.Disconnected, match="did not happen on this peer"):
        await made.pending


async def test_only_the_last_few_results_are_kept(world: ScriptedWorld) -> None:
    await open_lane(world)
    calls = [await unknown(world, number) for number in range(1, KEPT_RESULTS + 3)]
    assert len(world.operations._unknown._kept) == KEPT_RESULTS
    for made in calls:
        world.tell(wire.OperationSettled(f"1.{made.post.post}", True))
    with pytest.raises(errors.OutcomeUnknown):
        await calls[0].pending
    for made in calls[2:]:
        await made.pending
        assert made.tensor.tolist() == [0, 2, 4, 6]
    await asyncio.sleep(0)
    assert world.operations._unknown._kept == ()


async def test_results_that_are_pushed_out_or_closed_are_gone(world: ScriptedWorld) -> None:
    await open_lane(world)
    first = await unknown(world, 1)
    world.tell(first.success())
    for number in range(2, KEPT_RESULTS + 2):
        tensor = torch.arange(4.0)
        world.operations._unknown._kept[0].told = True
        made = await unknown(world, number)
    with pytest.raises(errors.Gone, match="were dropped"):
        await first.pending
    world.tell(made.success())
    world.operations.close()
    with pytest.raises(errors.Gone, match="the channel was closed before"):
        await made.pending
    assert made.tensor.tolist() == tensor.tolist()
    assert world.operations._unknown._kept == (), "the memory of their outputs is free"


async def test_nothing_piles_up(world: ScriptedWorld) -> None:
    for number in range(1, 31):
        lane = f"lane {number}"
        sidecar = await open_lane(world, lane)
        made = await call(world)
        world.tell(made.go(number, lane))
        await world.session.next(wire.OperationDone)
        world.tell(made.success() if number % 2 else made.failure(), wire.LaneDrop(lane))
        sidecar.dead.set()
        if number % 2:
            await made.pending
        else:
            with pytest.raises(errors.PeersLost):
                await made.pending
    assert (world.operations._jobs, world.operations._unknown._kept) == ({}, ())
    assert mapped_by(os.getpid(), "replicas-policy-scratch") <= 4
    assert not world.hub.failures.take_unreported()

"""The session thread's side of a channel against a scripted coordinator: messages in,
messages out, slots between.

Covers: channel/session/held_versions.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.operations.results import OperationCall
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.pending import Promise, Receipt
from replicas.channel.versions.filling import PublishJob
from replicas.channel.versions.loads import Loads
from replicas.channel.versions.orders import VersionOrders, Versions
from replicas.channel.versions.owner import Base
from replicas.channel.versions.update import Update
from replicas.core.base.manifest import PartManifest
from replicas.messages import Segment
from replicas.messages.identity import Member
from replicas.weights.feed import Feed
from replicas.weights.memory.arena import Slot
from tests.support.channel.scripted import DIGEST, MANIFEST, ME, ScriptedWorld

pytestmark = pytest.mark.anyio


async def test_a_grant_before_the_slot_is_delivered_when_it_is_held(target: ScriptedWorld) -> None:
    pending = target.receiver.receive(None)
    ask = await target.session.next(wire.ReceiveAsk)
    target.tell(wire.Commit(3, DIGEST), wire.ReceiveGrant(ask.ask, 3))
    assert not pending.done()
    await target.hold(3, commit=False)
    update = await pending
    assert (update.version, update.meta) == (3, {"n": 3})
    assert dict(update)["w"].tolist() == [7.0] * 4
    assert [slot.pins for slot in target.hub.arena.slots if slot.version == 3] == [1]
    update.loaded()
    loaded = await target.session.next(wire.Loaded)
    assert loaded.version == target.hub.loaded == 3
    await asyncio.sleep(0)
    assert not any(slot.pins for slot in target.hub.arena.slots)


async def test_an_open_update_keeps_its_slot_and_the_latest_is_not_evicted(target: ScriptedWorld) -> None:
    await target.hold(1)
    pending = target.receiver.receive(None)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, 1))
    update = await pending
    await target.hold(2)
    target.offer(3, 3, deadline_s=0.6)
    failed = await target.session.next(wire.TransferFailed)
    assert failed.error.kind == "Busy"
    assert "the 2 slots have version 1 (open), version 2 (kept)" in failed.error.message
    target.offer(4, 3)
    await asyncio.sleep(0)
    update.loaded()
    assert (await target.session.next(wire.TransferReady)).transfer == 4
    assert target.slots() == {3: "filling", 2: "held"}
    target.tell(wire.TransferCancel(4))
    assert target.slots() == {2: "held"}


async def test_a_prepared_version_waits_for_its_verdict(target: ScriptedWorld) -> None:
    await target.hold(1)
    await target.hold(2, commit=False)
    assert target.hub.arena.protected == {1, 2}
    target.tell(wire.Discard(2))
    assert target.slots() == {1: "held"}
    await target.hold(3, commit=False)
    target.tell(wire.Commit(3, "another digest"))
    assert target.slots() == {1: "held"}
    assert (await target.session.next(wire.Dropped)).version == 3


async def test_a_slot_is_free_only_when_its_sidecar_is_dead(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    target.offer(1, 1)
    await target.session.next(wire.TransferReady)
    target.go(1, "x")
    await asyncio.sleep(0)
    target.tell(wire.TransferCancel(1), wire.LaneDrop("x"))
    assert sidecar.killed
    for _ in range(5):
        await asyncio.sleep(0)
    assert target.slots() == {1: "filling"}
    sidecar.dead.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert target.slots() == {}
    assert not [m for m in target.session.sent if isinstance(m, wire.TransferFailed | wire.LaneFailed)]


async def test_a_transfer_cancelled_while_it_waits_for_a_slot(target: ScriptedWorld) -> None:
    await target.hold(1)
    await target.hold(2, commit=False)
    target.offer(9, 2)  # offered again: what is here may be another version with that number
    assert (await target.session.next(wire.TransferReady)).transfer == 9
    target.offer(10, 5)
    await asyncio.sleep(0.01)
    target.tell(wire.TransferCancel(10))
    target.tell(wire.TransferCancel(9))
    await asyncio.sleep(0.01)
    assert target.slots() == {1: "held"}


async def test_a_sidecar_that_dies_by_itself_is_reported_once(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    assert sidecar.on_exit is not None
    sidecar.on_exit("killed by signal 9")
    failed = await target.session.next(wire.LaneFailed)
    assert (failed.lane, failed.error.kind) == ("x", "SyncError")
    assert "killed by signal 9" in failed.error.message
    target.tell(wire.LaneDrop("x"))
    assert not [m for m in target.session.sent if isinstance(m, wire.LaneFailed)]


async def test_spare_sidecars_are_asked_for_by_one_task_at_a_time(target: ScriptedWorld) -> None:
    """After a pause of the process many lanes ask at once."""
    for _ in range(2):
        before = len(target.loop.tasks)
        for _ in range(5):
            target.lanes.prepare()
        assert len(target.loop.tasks) == before + 1
        await asyncio.gather(*target.loop.tasks)


@pytest.mark.parametrize("pulls", [True, False])
async def test_a_rank_that_sees_a_gpu_asks_for_no_sidecar_where_versions_are_pulled(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, *, pulls: bool
) -> None:
    target.hub.hello = msgspec.structs.replace(target.hello, cuda_devices=("GPU-3",))
    target.hub.settings = msgspec.structs.replace(target.hub.settings, pulls=pulls)
    monkeypatch.setattr(target.carriers, "get", lambda: asyncio.sleep(0))
    target.tell(wire.LaneAhead())
    assert [task.get_name() for task in target.loop.tasks] == [f"policy: {'carrier' if pulls else 'forkserver'}"]


async def test_however_many_wait_for_loads_the_coordinator_is_asked_once(target: ScriptedWorld) -> None:
    """Also by those whose deadline has passed: a router that polls."""
    polls = [target.watches.loaded(5, 0.01) for _ in range(1000)]
    for poll in polls:
        with pytest.raises(errors.DeadlineExceeded):
            await poll
    five, seven = target.watches.loaded(5, None), target.watches.loaded(7, None)
    await asyncio.sleep(0)
    [asked] = [sent for sent in target.session.sent if isinstance(sent, wire.WatchLoaded)]
    assert asked.version == 5
    target.session.sent.clear()
    three = target.watches.loaded(3, None)
    older = await target.session.next(wire.WatchLoaded)
    assert older.version == 3
    target.tell(wire.WatchEnd(asked.watch, 5))  # it crossed with the newer one
    assert not five.done()
    target.tell(wire.WatchEnd(older.watch, 5))
    assert (await three, await five) == (5, 5)
    assert not seven.done()
    last = await target.session.next(wire.WatchLoaded)
    target.tell(wire.WatchEnd(last.watch, 9))
    assert await seven == 9


async def test_a_wait_for_a_version_that_is_not_published_says_so(target: ScriptedWorld) -> None:
    await target.hold(3)
    absent = r"version 999 or a newer one is not published yet \(the newest is 3\) \(see what the source of"
    for pending in (target.watches.loaded(999, 0.01), target.watches.committed(998, 0.01)):
        with pytest.raises(errors.DeadlineExceeded, match=absent):
            await pending
    with pytest.raises(errors.DeadlineExceeded, match=r"version 3 did not end within its 0\.01 s \(give"):
        await target.watches.loaded(3, 0.01)


async def test_a_new_term_asks_again_and_drops_what_was_under_way(target: ScriptedWorld) -> None:
    pending = target.receiver.receive(None)
    watching = target.watches.loaded(9, None)
    first = await target.session.next(wire.WatchLoaded)
    sidecar = await target.lane("x")
    target.offer(1, 1)
    await target.session.next(wire.TransferReady)
    target.hub.welcomed(target.welcome, False)
    assert (await target.session.next(wire.ReceiveAsk)).after == 0
    assert (await target.session.next(wire.WatchLoaded)).version == first.version
    assert sidecar.killed
    assert target.slots() == {}
    assert not pending.done()
    assert not watching.done()


async def test_slots_do_not_change_their_kind(target: ScriptedWorld) -> None:
    """A coordinator that is started again with another config."""
    pending = target.receiver.receive(None)
    changed = msgspec.structs.replace(target.welcome.settings, staging="device")
    target.hub.welcomed(msgspec.structs.replace(target.welcome, settings=changed), False)
    with pytest.raises(errors.Preflight, match="restart all replicas"):
        await pending


async def test_a_lane_of_nccl_is_on_the_gpu_that_the_rank_has_joined_with(target: ScriptedWorld) -> None:
    target.hub.hello = msgspec.structs.replace(target.hello, cuda_devices=("GPU-3",))
    for backend, device in (("gloo", ""), ("nccl", "GPU-3")):
        group = wire.GroupSpec("prefix", "host", 1, 0, 1, backend, "127.0.0.1", 5.0)  # type: ignore[arg-type]  # valid ones
        target.tell(wire.LaneForm(backend, group))
        await target.session.next(wire.LaneFormed)
        spec = target.loop.sidecars[-1].spec
        assert spec is not None
        assert spec.device == device


async def test_the_end_of_the_session_ends_every_wait(target: ScriptedWorld) -> None:
    pendings: list[Promise[Any]] = [
        target.receiver.receive(None),
        target.watches.loaded(9, None),
        target.watches.committed(None, None),
    ]
    await asyncio.sleep(0)
    target.hub.session_over(errors.Fenced("another one"))
    for pending in pendings:
        with pytest.raises(errors.Fenced):
            await pending
    with pytest.raises(errors.Fenced):
        await target.receiver.receive(None)


async def test_a_bug_in_a_handler_ends_the_waits(target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = target.receiver.receive(None)
    await target.session.next(wire.ReceiveAsk)
    monkeypatch.setitem(target.hub._handlers, wire.View, lambda message: 1 / 0)
    target.tell(wire.View(1, ()))
    with pytest.raises(errors.InternalError, match="ZeroDivisionError"):
        await pending


# ---------------------------------------------------------------- operations


async def posted(
    world: ScriptedWorld, tensor: torch.Tensor, deadline_s: float = 5.0
) -> tuple[Promise[Receipt], wire.OperationGo]:
    pending = world.operations.start(OperationCall("all_reduce", (tensor,)), deadline_s)
    post = await world.session.next(wire.OperationPost)
    return pending, wire.OperationGo(post.post, 1, "x", (ME,), (0,), (post.segments,), -1, 5.0)


async def test_results_are_written_only_after_the_verdict(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    sidecar.gate.set_result(None)
    tensor = torch.arange(4.0)
    pending, go = await posted(target, tensor)
    target.tell(go)
    await target.session.next(wire.OperationDone)
    assert tensor.tolist() == [0, 1, 2, 3]
    target.tell(wire.OperationEnd(go.post, wire.ReceiptData(1, (ME,), (), 0, 0.1, {})))
    await pending
    assert tensor.tolist() == [0, 2, 4, 6]
    target.tell(wire.OperationEnd(go.post, None, wire.WireError("SyncError", "late")))
    assert pending.done()


async def test_an_operation_that_hears_nothing_ends_by_itself(
    target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.channel.operations.operations.GRACE_S", 0.05)
    sidecar = await target.lane("x")
    tensor = torch.arange(4.0)
    pending, go = await posted(target, tensor, 0.05)
    with pytest.raises(errors.DeadlineExceeded):
        await pending
    target.tell(go)
    assert (
        "the call number 1 of rollout/0/0 has ended" in (await target.session.next(wire.OperationFailed)).error.message
    )
    sidecar.gate.set_result(None)
    pending, go = await posted(target, tensor, 60.0)
    target.tell(go)
    await target.session.next(wire.OperationDone)
    target.operations._overdue(target.operations._jobs[go.post])  # what its timer does
    with pytest.raises(errors.OutcomeUnknown):
        await pending
    target.tell(wire.OperationEnd(go.post, wire.ReceiptData(1, (ME,), (), 0, 0.1, {})))
    assert tensor.tolist() == [0, 1, 2, 3]
    assert (await pending).members == (ME,)
    assert tensor.tolist() == [0, 2, 4, 6]
    target.session.connected = False
    pending, _ = await posted(target, tensor, 0.05)
    with pytest.raises(errors.Disconnected):
        await pending


def test_where_results_lie() -> None:
    members = tuple(Member("p", index, 0) for index in range(2))
    one, two = Segment("float32", (2,)), Segment("int64", (3,))

    def go(*segments: tuple[Segment, ...], root: int = -1) -> wire.OperationGo:
        return wire.OperationGo(1, 1, "x", members, (0, 1), segments, root, 1.0)

    assert OperationCall("all_gather").output_segments(go((one,), (two, one)), 0) == (one, two, one)
    assert OperationCall("gather").output_segments(go((one,), (two,), root=1), 0) == ()
    assert OperationCall("gather").output_segments(go((one,), (two,), root=1), 1) == (one, two)
    assert OperationCall("scatter").output_segments(go((), (one, two), root=1), 0) == (one,)
    assert OperationCall("reduce_scatter").output_segments(go((one, one), (one, one)), 1) == (one, one)
    assert OperationCall("broadcast").output_segments(go((one,), (one,), root=1), 1) == ()
    assert OperationCall("broadcast").output_segments(go((one,), (one,), root=1), 0) == (one,)
    assert OperationCall("recv").output_segments(go((two,), (two,), root=0), 1) == (two,)
    assert OperationCall("barrier").output_segments(go((), ()), 0) == ()
    with pytest.raises(errors.RanksDisagree, match=r"float32\[1\], the others send int64"):
        OperationCall("recv", targets=(torch.ones(1),)).output_segments(go((two,), (two,), root=0), 1)


# ---------------------------------------------------------------- publishing


async def test_publish_packs_pins_and_lets_go() -> None:
    world = ScriptedWorld("source", 2)
    job = PublishJob(None, 5.0, {"a": 1}, False, "policy")
    feed = Feed({"w": torch.ones(4)}, mode=world.publisher.mode)
    publishing = asyncio.create_task(asyncio.to_thread(world.publisher.publish, feed, job))
    begin = await world.session.next(wire.PublishBegin)
    assert (begin.publish, begin.meta) == (1, {"a": 1})
    world.tell(wire.PublishAdmitted(1, 5))
    packed = await world.session.next(wire.Packed)
    world.tell(wire.ManifestAsk(packed.manifest_hash, 0, 1000))
    piece = await world.session.next(wire.ManifestPiece)
    assert (piece.manifest_hash, piece.total_nbytes) == (packed.manifest_hash, len(piece.data))
    assert PartManifest.decode(piece.data).tensors == MANIFEST.tensors
    pending = await publishing
    assert [(slot.version, slot.pins) for slot in world.hub.arena.slots if slot.state == "held"] == [(5, 1)]
    world.tell(wire.Commit(5, packed.digest), wire.PublishEnd(1, wire.ReceiptData(1, (), (), 16, 0.1, {}, version=5)))
    assert (await pending).version == 5
    assert [(slot.version, slot.pins) for slot in world.hub.arena.slots if slot.state == "held"] == [(5, 0)]
    assert world.hub.held_versions.held() == (wire.HeldVersion(5, packed.digest, packed.place),)
    world.hub.arena.close()


async def test_update_reports_what_its_block_did() -> None:
    class Owner(Loads):
        def __init__(self) -> None:
            super().__init__(world.hub, Versions(world.hub, VersionOrders(world.hub)).score, lambda: None)
            self.log: list[tuple[str, object]] = []

        def loaded(self, version: int, load_s: float, base: Base | None) -> None:
            self.log.append(("loaded", version))

        def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None:
            self.log.append(("failed", type(error)))

        def let_go(self, holder: Holder, slot: Slot) -> None:
            self.log.append(("let go", slot.version))

    world = ScriptedWorld("target", 1)
    slot = world.hub.arena.acquire(3, MANIFEST)
    assert slot is not None

    def run(*, by_hand: bool, error: Exception | None) -> list[tuple[str, object]]:
        owner = Owner()
        try:
            with Update(owner, slot, 3, {}) as update:
                if by_hand:
                    update.loaded()
                    assert dict(update)  # still readable in the block
                if error is not None:
                    raise error
        except ValueError:
            pass
        return owner.log

    assert run(by_hand=False, error=None) == [("loaded", 3), ("let go", 3)]
    assert run(by_hand=True, error=None) == [("loaded", 3), ("let go", 3)]
    assert run(by_hand=False, error=ValueError()) == [("failed", ValueError), ("let go", 3)]
    assert run(by_hand=True, error=ValueError()) == [("loaded", 3), ("let go", 3)]
    world.hub.arena.free(slot)
    world.hub.arena.close()


async def test_no_encrypted_version_passes_a_process_group(target: ScriptedWorld) -> None:
    """Whatever a coordinator offers."""
    target.hub.settings = msgspec.structs.replace(target.hub.settings, encrypt=True, pulls=True)
    await target.lane("a")
    target.offer(1, 1)
    failed = await target.session.next(wire.TransferFailed)
    assert "cannot use a process group: the channel is encrypted" in failed.error.message
    assert not target.hub.arena.find_pinned(1)

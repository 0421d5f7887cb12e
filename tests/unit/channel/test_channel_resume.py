"""A member and a new coordinator: what it announces again, what it keeps, what it no
longer believes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas import messages as wire
from replicas.channel.session.pending import Promise, Receipt
from replicas.channel.versions.filling import PublishJob
from replicas.channel.versions.update import Update
from replicas.core.base.manifest import Manifest
from replicas.weights.copies.digest import digest_of
from replicas.weights.feed import Feed
from replicas.weights.memory.arena import Arena, Slot
from tests.support.channel.scripted import DIGEST, MANIFEST, ScriptedWorld
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


def begin(world: ScriptedWorld, given: object = None, deadline_s: float = 30.0) -> tuple[PublishJob, asyncio.Task[Any]]:
    """A publish on a thread of its own, which has begun when it sends PublishBegin."""
    job = PublishJob(None, deadline_s, {"a": 1}, False, "policy")
    weights = {"w": torch.ones(4)} if given is None else given
    return job, asyncio.create_task(asyncio.to_thread(world.publisher.publish, Feed(weights), job))


async def packed(world: ScriptedWorld, version: int, deadline_s: float = 30.0) -> PublishJob:
    """A publish that has been packed as ``version``, and has no verdict."""
    job, task = begin(world, deadline_s=deadline_s)
    number = (await world.session.next(wire.PublishBegin)).publish
    world.tell(wire.PublishAdmitted(number, version))
    await world.session.next(wire.Packed)
    await task
    return job


def receipt(version: int) -> wire.ReceiptData:
    return wire.ReceiptData(1, (), (), 16, 0.1, {}, version=version)


def pins(world: ScriptedWorld) -> dict[int, int]:
    return {slot.version: slot.pins for slot in world.hub.arena.slots if slot.state == "held"}


async def granted(world: ScriptedWorld, version: int) -> Update:
    pending = world.receiver.receive(None)
    world.tell(wire.ReceiveGrant((await world.session.next(wire.ReceiveAsk)).ask, version))
    return await pending


async def outcome(pending: Promise[Receipt]) -> Receipt | BaseException:
    try:
        return await pending
    except errors.ReplicasError as error:
        return error


# ---------------------------------------------------------------- publishes


async def test_a_packed_publish_is_announced_again_and_gets_its_receipt(source: ScriptedWorld) -> None:
    job = await packed(source, 5)
    hello = source.new_coordinator()
    begun, full, resumed = source.session.sent
    assert isinstance(full, wire.Packed)
    assert (hello.publishes, hello.held) == (1, (wire.HeldVersion(5, full.digest, full.place),))
    assert isinstance(begun, wire.PublishBegin)
    assert (begun.publish, begun.version, begun.resumed, begun.meta) == (1, 5, True, {"a": 1})
    assert 20 < begun.deadline_s < 30
    source.tell(wire.ManifestAsk(full.manifest_hash, 0, 1000))
    assert (await source.session.next(wire.ManifestPiece)).manifest_hash == full.manifest_hash
    assert resumed == wire.Resumed()
    assert pins(source) == {5: 1}
    source.tell(wire.PublishAdmitted(1, 5), wire.PublishEnd(1, receipt(5)))
    assert (await job.pending).version == 5
    assert pins(source) == {5: 0}


async def test_one_without_a_number_begins_again(source: ScriptedWorld) -> None:
    job, task = begin(source)
    first = await source.session.next(wire.PublishBegin)
    source.new_coordinator()
    again = await source.session.next(wire.PublishBegin)
    assert (again.publish, again.version, again.resumed) == (first.publish, None, False)
    source.tell(wire.PublishAdmitted(1, 9))
    await source.session.next(wire.Packed)
    await task
    assert job.version == 9


async def test_one_that_is_being_packed_goes_on(source: ScriptedWorld) -> None:
    copied, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def walk() -> Iterator[tuple[str, torch.Tensor]]:
        loop.call_soon_threadsafe(copied.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)
        yield "w", torch.ones(4)

    job, task = begin(source, walk())
    await source.session.next(wire.PublishBegin)
    source.tell(wire.PublishAdmitted(1, 5))
    await copied.wait()
    source.new_coordinator()
    assert [type(message) for message in source.session.sent] == [wire.PublishBegin, wire.Resumed]
    source.tell(wire.PublishAdmitted(1, 5))
    go_on.set()
    await source.session.next(wire.Packed)
    await task
    assert job.filled


async def test_another_number_for_a_publish_that_had_one_is_a_bug(source: ScriptedWorld) -> None:
    job = await packed(source, 5)
    source.new_coordinator()
    source.tell(wire.PublishAdmitted(1, 6))
    with pytest.raises(errors.InternalError, match="publish number 1 was version 5, and is now version 6"):
        await job.pending


async def test_a_publish_that_failed_here_says_so_again(source: ScriptedWorld) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(4)
        raise KeyError("mine")

    _, task = begin(source, broken())
    await source.session.next(wire.PublishBegin)
    source.tell(wire.PublishAdmitted(1, 5))
    failed = await source.session.next(wire.PackFailed)
    with pytest.raises(KeyError):
        await task
    source.new_coordinator()
    assert [type(message) for message in source.session.sent] == [wire.PublishBegin, wire.PackFailed, wire.Resumed]
    assert source.session.sent[1] == failed


async def test_an_overdue_publish_tells_those_who_may_still_wait_for_it(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.channel.versions.publish.GRACE_S", 0.05)
    source.session.connected = False
    _, task = begin(source, deadline_s=0.05)
    failed = await source.session.next(wire.PackFailed)
    assert (failed.publish, failed.error.kind) == (1, "Disconnected")
    with pytest.raises(errors.Disconnected):
        await task


async def unknown(world: ScriptedWorld, version: int, monkeypatch: pytest.MonkeyPatch) -> Promise[Receipt]:
    """A publish that ended with its outcome unknown."""
    monkeypatch.setattr("replicas.channel.versions.publish.GRACE_S", 0.05)
    job = await packed(world, version)
    assert job.timer is not None
    job.timer.cancel()
    world.publisher._overdue(job)  # its time is over
    assert isinstance(await outcome(job.pending), errors.OutcomeUnknown)
    assert pins(world)[version] == 1
    assert version in world.hub.arena.protected
    return job.pending


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_late_verdict_settles_what_was_unknown(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    pending = await unknown(source, 5, monkeypatch)
    if renewed:
        source.new_coordinator()
        begun = await source.session.next(wire.PublishBegin)
        assert (begun.publish, begun.version, begun.resumed) == (1, 5, True)
        assert isinstance(source.session.sent[0], wire.Packed)
    source.tell(wire.Commit(5, source.hub.held_versions.digest(5)), wire.PublishEnd(1, receipt(5)))
    assert (await pending).nbytes == 16
    assert (source.hub.loaded, pins(source)) == (5, {5: 0})
    assert source.hub.failures.take_unreported() is None


async def test_a_late_error_settles_what_was_unknown(source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = await unknown(source, 5, monkeypatch)
    error = wire.WireError.of(errors.PeersLost("all of them", version=5))
    source.tell(wire.Discard(5), wire.PublishEnd(1, None, error))
    with pytest.raises(errors.PeersLost):
        await pending
    assert pins(source) == {}


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_or_discard_settles_it_when_no_verdict_comes(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    pending = await unknown(source, 5, monkeypatch)
    source.tell(wire.Commit(5, source.hub.held_versions.digest(5)) if committed else wire.Discard(5))
    assert isinstance(await outcome(pending), errors.OutcomeUnknown)
    await wait_until(lambda: not pending.unknown, "it is settled")
    found = await outcome(pending)
    if committed:
        assert isinstance(found, Receipt)
        assert (found.version, found.nbytes) == (5, MANIFEST.image_nbytes)
    else:
        assert isinstance(found, errors.SyncError)
        assert "version 5 was not committed, and never will be" in str(found)
    assert pins(source) == ({5: 0} if committed else {})


async def test_a_newer_commit_frees_the_slot_of_an_unknown_one(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = await unknown(source, 5, monkeypatch)
    source.tell(wire.Commit(6, "d"))
    assert pins(source) == {}
    assert isinstance(await outcome(pending), errors.OutcomeUnknown)
    source.tell(wire.PublishEnd(1, receipt(5)))
    assert (await pending).version == 5


async def test_an_interrupt_in_the_middle_of_a_publish_loses_no_slot(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **more: Any) -> Any:
        assert list(source.slots().values()) == ["filling"]
        raise KeyboardInterrupt

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            source.publisher.publish(Feed({"w": torch.ones(4)}), PublishJob(None, 5.0, {}, False, "policy"))

    monkeypatch.setattr(source.publisher._filling._packer, "pack", interrupted)
    running = asyncio.create_task(asyncio.to_thread(run))
    await source.session.next(wire.PublishBegin)
    source.tell(wire.PublishAdmitted(1, 5))
    failed = await source.session.next(wire.PackFailed)
    await running
    assert "raised KeyboardInterrupt" in failed.error.message
    assert source.slots() == {}
    monkeypatch.undo()
    source.tell(wire.PublishEnd(1, None, failed.error))
    job, task = begin(source)
    source.tell(wire.PublishAdmitted((await source.session.next(wire.PublishBegin)).publish, 6))
    await source.session.next(wire.Packed)
    await task
    source.tell(wire.PublishEnd(2, receipt(6)))
    assert (await job.pending).version == 6


async def test_no_slot_is_found_for_a_publish_that_was_interrupted(
    source: ScriptedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while the caller waits for its slot, and a slot is free
    before all of it is heard of."""
    filling, call, looked = source.publisher._filling, source.hub.call, threading.Event()
    find = filling._find_slot

    async def finds(*args: Any) -> Any:
        try:
            return await find(*args)
        finally:
            looked.set()

    def late(function: Callable[..., object], *args: Any) -> None:
        if function == source.hub.loans.give_back:
            assert looked.wait(30)
        call(function, *args)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            source.publisher.publish(Feed({"w": torch.ones(4)}), PublishJob(None, 5.0, {}, False, "policy"))

    monkeypatch.setattr(filling, "_find_slot", finds)
    monkeypatch.setattr(source.hub, "call", late)
    monkeypatch.setattr(Promise, "wait_for_session", interrupted)
    running = asyncio.create_task(asyncio.to_thread(run))
    await source.session.next(wire.PublishBegin)
    failed = await source.session.next(wire.PackFailed)
    source.tell(wire.PublishAdmitted(1, 5))
    await running
    source.tell(wire.PublishEnd(1, None, failed.error))
    await wait_until(lambda: not source.hub.loans, "it is over")
    assert source.slots() == {}


# ---------------------------------------------------------------- what is held


async def test_hello_says_what_is_known(target: ScriptedWorld) -> None:
    await target.hold(3)
    target.tell(wire.View(7, ()))
    update = await granted(target, 3)
    await target.hold(4, commit=False)
    hello = target.new_coordinator()
    assert [(known.version, known.digest) for known in hello.held] == [(3, DIGEST), (4, DIGEST)]
    assert all(known.place is not None for known in hello.held)
    assert (hello.epoch, hello.latest, hello.latest_digest, hello.assigned, hello.loaded) == (7, 3, DIGEST, 3, 0)
    assert target.session.sent == [wire.Resumed()]
    assert target.hub.arena.protected == {3, 4}
    update.loaded()
    assert (await target.session.next(wire.Loaded)).version == 3
    target.tell(wire.Commit(4, DIGEST))
    assert target.hub.latest == 4
    assert target.new_coordinator().assigned == 0


async def test_what_changed_between_hello_and_welcome_is_told(target: ScriptedWorld) -> None:
    await target.hold(3)
    update = await granted(target, 3)

    def change() -> None:
        update.loaded()
        target.hub.held_versions.release(3)  # as soon as its update is closed

    target.new_coordinator(meanwhile=change)
    assert target.session.sent == [wire.Dropped(3), wire.Loaded(3, 0.0), wire.Resumed()]
    await wait_until(lambda: not target.slots(), "its slot is free")
    await target.hold(4)
    target.new_coordinator(meanwhile=lambda: target.hub.held_versions.release(4))
    assert target.session.sent == [wire.Dropped(4), wire.Resumed()]


async def test_a_failed_load_is_told_to_the_new_coordinator_until_it_is_made_good(target: ScriptedWorld) -> None:
    await target.hold(3)
    (await granted(target, 3)).failed("no room")
    failed = await target.session.next(wire.LoadFailed)
    target.new_coordinator()
    assert target.session.sent == [failed, wire.Resumed()]
    (await granted(target, 3)).loaded()
    await target.session.next(wire.Loaded)
    target.new_coordinator()
    assert target.session.sent == [wire.Resumed()]


async def test_describe(target: ScriptedWorld) -> None:
    await target.hold(3)
    target.tell(wire.Describe(3), wire.Describe(8))
    known, unknown = [await target.session.next(wire.Described) for _ in range(2)]
    assert (known.version, known.digest, known.meta, known.device) == (3, DIGEST, {"n": 3}, "cpu")
    assert known.manifest_hash == MANIFEST.hash
    assert (unknown.version, unknown.manifest_hash) == (8, "")
    target.tell(wire.ManifestAsk(MANIFEST.hash, 0, 1000), wire.ManifestAsk("unknown", 0, 1000))
    known, unknown = [await target.session.next(wire.ManifestPiece) for _ in range(2)]
    assert Manifest.decode(known.data) == MANIFEST
    assert (unknown.total_nbytes, unknown.data) == (0, b"")


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_newer_version_in_the_welcome_counts_as_a_commit(target: ScriptedWorld, resumed: bool) -> None:
    await target.hold(3)
    await target.hold(4, commit=False)
    pending = target.watches.committed(3, None)
    await asyncio.sleep(0)
    if resumed:
        target.hub.welcomed(wire.Welcome(1, target.welcome.settings, 0, 1, "127.0.0.1", 0, latest=4), True)
    else:
        target.new_coordinator(latest=4)
    assert await pending == target.hub.latest == 4
    assert target.hub.update_hello(target.hello).latest_digest == ""
    target.tell(wire.Commit(4, DIGEST))
    assert target.hub.update_hello(target.hello).latest_digest == DIGEST
    assert target.hub.arena.protected == {4}


@pytest.mark.parametrize("same", [True, False])
async def test_a_slot_without_a_digest_is_compared_with_the_new_coordinators_version(
    source: ScriptedWorld, same: bool
) -> None:
    job = await packed(source, 5)
    slot = source.hub.arena.find(5)
    assert slot is not None
    right = digest_of(slot.data)
    source.new_coordinator()
    source.session.sent.clear()
    source.tell(wire.Commit(5, right if same else "another"))
    if same:
        await wait_until(lambda: source.hub.held_versions.digest(5), "the digest is known")
    else:
        assert (await source.session.next(wire.Dropped)).version == 5
        assert source.hub.update_hello(source.hello).held == ()  # it goes with its last pin
    source.tell(wire.PublishEnd(1, receipt(5)))
    await job.pending
    await asyncio.sleep(0)
    assert source.slots() == ({5: "held"} if same else {})


async def test_an_old_transfer_does_not_end_a_new_one_of_the_same_number(target: ScriptedWorld) -> None:
    sidecar = await target.lane("x")
    target.offer(1, 1)
    await target.session.next(wire.TransferReady)
    target.go(1, "x")
    await asyncio.sleep(0)
    target.new_coordinator()
    target.offer(1, 2)
    assert (await target.session.next(wire.TransferReady)).transfer == 1
    sidecar.dead.set()  # now the first one ends, too
    await asyncio.sleep(0.01)
    assert target.slots() == {2: "filling"}
    assert not [message for message in target.session.sent if isinstance(message, wire.TransferFailed)]
    second = await target.lane("y")
    second.gate.set_result(None)
    target.go(1, "y")
    await target.session.next(wire.TransferDone)


async def test_a_discarded_version_goes_with_its_last_reader(target: ScriptedWorld) -> None:
    await target.hold(3)
    await target.hold(4, commit=False)
    slot = target.hub.arena.find_pinned(4)
    assert slot is not None
    target.tell(wire.Discard(4))
    assert target.slots() == {3: "held", 4: "leaving"}
    assert [held.version for held in target.hub.held_versions.held()] == [3]
    target.hub.arena.unpin(slot)
    await asyncio.sleep(0)
    assert target.slots() == {3: "held"}


async def test_a_grant_that_was_overtaken_is_asked_for_again(target: ScriptedWorld) -> None:
    pending = target.receiver.receive(None)
    ask = await target.session.next(wire.ReceiveAsk)
    target.tell(wire.ReceiveGrant(ask.ask, 3))
    await target.hold(4)
    target.tell(wire.ReceiveGrant(ask.ask, 4))  # of the first ask: it was sent before the second was heard
    assert not pending.done()
    target.tell(wire.ReceiveGrant(ask.ask + 1, 4))
    assert (await pending).version == 4


async def test_the_end_of_the_session_frees_everything_but_an_open_update(target: ScriptedWorld) -> None:
    await target.hold(3)
    await target.hold(4)
    update = await granted(target, 4)
    sidecar = target.loop.sidecars[-1]
    target.hub.session_over(errors.Fenced("declared lost"))
    assert target.slots() == {4: "held"}
    assert sidecar.killed
    assert dict(update)["w"].tolist() == [7.0] * 4
    with pytest.raises(errors.Fenced):
        update.loaded()
    await asyncio.sleep(0)
    assert target.slots() == {}


async def test_a_bug_leaves_the_channel(target: ScriptedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits in vain for a member that no longer handles anything."""
    monkeypatch.setitem(target.hub._handlers, wire.View, lambda message: 1 / 0)
    target.tell(wire.View(1, ()))
    assert isinstance(target.hub.over, errors.InternalError)
    await asyncio.gather(*target.loop.tasks)
    assert not target.session.connected


# ---------------------------------------------------------------- for a long time


async def test_nothing_piles_up_over_many_versions_and_coordinators(target: ScriptedWorld) -> None:
    known = target.hub.held_versions
    for version in range(1, 200):
        await target.hold(version)
        (await granted(target, version)).loaded()
        await target.session.next(wire.Loaded)
        if version % 10 == 0:
            target.new_coordinator(latest=version)
        await asyncio.sleep(0)  # tasks that wait for nothing end
        target.loop.tasks = {task for task in target.loop.tasks if not task.done()}
        assert len(target.loop.tasks) < 5
        target.tell(wire.LaneDrop(f"lane {version}"))
        target.loop.sidecars.pop().dead.set()
        assert len(known._facts) <= 2
        assert not known.prepared
        assert not known.doubtful
        assert not target.transfers._transfers


@pytest.mark.slow
@pytest.mark.parametrize("leader", [True, False])
async def test_nothing_piles_up_over_many_publishes(leader: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScriptedWorld("source", 2)
    monkeypatch.setattr(type(world.hub), "leader", leader)
    for number in range(1, 200):
        job, task = begin(world)
        await world.session.next(wire.PublishBegin)
        world.tell(wire.PublishAdmitted(number, number))
        await world.session.next(wire.Packed)
        await task
        if number % 3:
            world.tell(
                wire.Commit(number, world.hub.held_versions.digest(number)), wire.PublishEnd(number, receipt(number))
            )
            await job.pending
        else:
            world.tell(wire.Discard(number), wire.PublishEnd(number, None, wire.WireError("SyncError", "no")))
            await outcome(job.pending)
        known = world.hub.held_versions
        assert len(known._facts) <= 2
        assert not known.publishing
        assert not world.publisher._jobs
    await world.end()


async def test_a_target_that_is_caught_up_while_versions_go_on_ends_with_the_newest(target: ScriptedWorld) -> None:
    """Two slots: one for the catch-up, one for what is published meanwhile, until the
    catch-up is overtaken."""
    slow = await target.lane("catch-up")
    target.offer(100, 5)
    await target.session.next(wire.TransferReady)
    target.go(100, "catch-up", 60.0)
    await target.hold(6)
    assert target.slots() == {5: "filling", 6: "held"}
    target.offer(101, 7)
    target.tell(wire.TransferCancel(100), wire.LaneDrop("catch-up"))
    slow.dead.set()
    assert (await target.session.next(wire.TransferReady)).transfer == 101
    target.tell(wire.TransferCancel(101))
    for version in range(7, 12):
        await target.hold(version)
    assert target.slots() == {10: "held", 11: "held"}
    assert (await granted(target, 11)).version == 11


async def test_a_catch_up_that_ends_late_is_the_first_to_make_room(target: ScriptedWorld) -> None:
    slow = await target.lane("catch-up")
    target.offer(100, 5)
    await target.session.next(wire.TransferReady)
    target.go(100, "catch-up", 60.0)
    await target.hold(6)
    slow.gate.set_result(None)
    await target.session.next(wire.TransferDone)
    assert target.slots() == {5: "held", 6: "held"}
    await target.hold(7)
    assert target.slots() == {6: "held", 7: "held"}


def test_closing_an_arena_leaves_what_is_read_until_it_is_let_go() -> None:
    arena = Arena(1, name="test")
    slot: Slot | None = arena.acquire(1, MANIFEST)
    assert slot is not None
    arena.hold(slot, "")
    arena.pin(slot)
    arena.close()
    assert arena.find(1) is slot
    assert slot.data.shape
    arena.unpin(slot)
    assert arena.find(1) is None
    with pytest.raises(ValueError, match="has no buffer"):
        _ = slot.buffer

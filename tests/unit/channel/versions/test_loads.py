"""A rank of a channel with ``adopt_together``: it says that it can load a version, and
loads it when all can; or goes on with its own.

Covers: channel/versions/loads.py.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import torch

import replicas
from replicas import errors
from replicas import messages as wire
from replicas.channel import Update
from replicas.testing import FakeRun
from tests.support.channel.scripted import ScriptedWorld

pytestmark = pytest.mark.anyio
REFUSED = wire.WireError("NotAdopted", "no target loads version 3: rollout/1 does not load it: other shapes")


@pytest.fixture
async def target() -> AsyncIterator[ScriptedWorld]:
    world = ScriptedWorld("target", 2)
    settings = msgspec.structs.replace(world.welcome.settings, adopt_together=True)
    world.welcome = msgspec.structs.replace(world.welcome, settings=settings)
    world.hub.welcomed(world.welcome, True)
    yield world
    await world.end()


async def granted(target: ScriptedWorld, version: int = 3) -> Update:
    await target.hold(version)
    pending = target.receiver.receive(None)
    target.tell(wire.ReceiveGrant((await target.session.next(wire.ReceiveAsk)).ask, version))
    return await pending


def load(update: Update, model: dict[str, torch.Tensor]) -> None:
    with update:
        update.load_into(model)


async def test_a_block_waits_until_all_can_load_it(target: ScriptedWorld) -> None:
    update, model = await granted(target), {"w": torch.zeros(4)}
    block = asyncio.create_task(asyncio.to_thread(load, update, model))
    assert await target.session.next(wire.CanLoad) == wire.CanLoad(3)
    assert not block.done()
    assert model["w"].tolist() == [0.0] * 4
    target.tell(wire.LoadDecided(3))
    await block
    assert model["w"].tolist() == [7.0] * 4
    assert (await target.session.next(wire.Loaded)).version == 3
    assert target.hub.update_hello(target.hello).adopted == 3


async def test_what_none_loads_is_refused_here_too_and_the_next_is_received(target: ScriptedWorld) -> None:
    update, model = await granted(target), {"w": torch.zeros(4)}
    block = asyncio.create_task(asyncio.to_thread(load, update, model))
    await target.session.next(wire.CanLoad)
    target.tell(wire.LoadDecided(3, REFUSED))
    with pytest.raises(errors.NotAdopted, match="rollout/1 does not load it: other shapes") as caught:
        await block
    assert "receive the next one" in errors.NotAdopted("x").hint
    del caught
    assert model["w"].tolist() == [0.0] * 4
    failed = await target.session.next(wire.LoadFailed)
    assert (failed.version, failed.kept) == (3, True)
    assert target.hub.update_hello(target.hello).unadopted == 3
    target.receiver.receive(None)
    assert (await target.session.next(wire.ReceiveAsk)).after == 3


async def test_a_check_reads_before_and_refuses(target: ScriptedWorld) -> None:
    update = await granted(target)
    with update.unadopted():
        assert list(dict(update)) == ["w"]
        update.refuse("it has other shapes")
    assert not any(isinstance(sent, wire.CanLoad) for sent in target.session.sent)
    assert (await target.session.next(wire.LoadFailed)).kept
    assert target.hub.update_hello(target.hello).unadopted == 3


async def test_a_check_in_the_block_comes_before_the_load(target: ScriptedWorld) -> None:
    update = await granted(target)
    with update.unadopted():
        pending = update.adopt(whole=True)
        assert update.adopt() is pending
        assert await target.session.next(wire.CanLoad) == wire.CanLoad(3, whole=True)
        target.tell(wire.LoadDecided(3))
        await pending
    assert (await target.session.next(wire.Loaded)).version == 3


@pytest.mark.parametrize("in_block", [False, True])
async def test_a_load_that_did_not_wait_is_a_failed_load(target: ScriptedWorld, in_block: bool) -> None:
    update = await granted(target)
    with pytest.raises(errors.UsageError, match=r"wait for update\.adopt\(\) before the load"):
        if in_block:
            with update.unadopted():
                dict(update)
        else:
            dict(update)
            update.loaded()
    failed = await target.session.next(wire.LoadFailed)
    assert not failed.kept


async def test_a_new_coordinator_is_told_again(target: ScriptedWorld) -> None:
    update = await granted(target)
    pending = update.adopt()
    await target.session.next(wire.CanLoad)
    hello = target.new_coordinator(latest=3)
    assert hello.adopted == 0
    assert await target.session.next(wire.CanLoad) == wire.CanLoad(3)
    target.tell(wire.LoadDecided(2), wire.LoadDecided(3))
    await pending


@pytest.mark.parametrize("over", [False, True])
async def test_without_a_coordinator_for_long_the_wait_ends(target: ScriptedWorld, over: bool) -> None:
    update = await granted(target)
    pending = update.adopt()
    await target.session.next(wire.CanLoad)
    if over:
        target.hub.session_over(errors.Fenced("another process joined"))
    else:
        target.receiver.session_down(errors.Disconnected("no session"))
    with pytest.raises(errors.Fenced if over else errors.Disconnected):
        await pending
    assert update.ended


async def test_an_update_that_is_dropped_while_it_waits_is_missed(target: ScriptedWorld) -> None:
    update = await granted(target)
    update.adopt()
    await target.session.next(wire.CanLoad)
    del update
    gc.collect()
    target.hub.loans.sweep()
    assert not (await target.session.next(wire.LoadFailed)).kept
    target.tell(wire.LoadDecided(3, REFUSED))


async def test_one_that_was_reported_failed_meanwhile_stays_so(target: ScriptedWorld) -> None:
    update = await granted(target)
    pending = update.adopt()
    await target.session.next(wire.CanLoad)
    update.failed("it is broken")
    target.tell(wire.LoadDecided(3, REFUSED))
    with pytest.raises(errors.NotAdopted):
        await pending
    assert not (await target.session.next(wire.LoadFailed)).kept
    assert not any(isinstance(sent, wire.LoadFailed) for sent in target.session.sent)


# ---------------------------------------------------------------- a whole run


@pytest.fixture
def run() -> Iterator[FakeRun]:
    policy = {"sources": ["trainer"], "targets": ["rollout"], "adopt_together": True, "deadline": "20s"}
    with FakeRun({"policy": policy}) as found:
        yield found


def publish(trainer: replicas.Channel, value: float) -> None:
    trainer.publish({"weight": torch.full((3,), value)}).wait(30)


@pytest.mark.slow
def test_one_refuses_a_version_and_all_go_on_with_the_next(run: FakeRun) -> None:
    trainer, picky = run.join("trainer"), run.join("rollout", 2)
    others = [run.target("rollout", index) for index in range(2)]
    publish(trainer, 1.0)
    with picky.receive().wait(30) as update:
        assert update.version == 1
    trainer.loaded(1, deadline=20).wait(30)
    publish(trainer, 2.0)
    update = picky.receive().wait(30)
    assert dict(update)["weight"].tolist() == [2.0] * 3
    update.refuse("twos are not taken")
    with pytest.raises(errors.SyncError, match=r"refused by rollout/2: .*twos are not taken"):
        trainer.loaded(2, deadline=20).wait(30)
    assert [one.versions for one in others] == [[1], [1]]
    publish(trainer, 3.0)
    with picky.receive().wait(30) as update:
        assert update.version == 3
    trainer.loaded(3, deadline=20).wait(30)
    assert [one.versions for one in others] == [[1, 3], [1, 3]]
    assert [one.weights["weight"].tolist() for one in others] == [[3.0] * 3] * 2


@pytest.mark.slow
def test_one_is_killed_and_the_coordinator_is_replaced_while_others_wait(run: FakeRun) -> None:
    trainer, slow = run.join("trainer"), run.join("rollout", 2)
    others = [run.target("rollout", index) for index in range(2)]
    publish(trainer, 1.0)
    update = slow.receive().wait(30)
    run.restart_coordinator()
    assert [one.versions for one in others] == [[], []]
    with update:
        pass
    trainer.loaded(1, deadline=20).wait(30)
    publish(trainer, 2.0)
    assert [one.versions for one in others] == [[1], [1]]
    run.kill(slow)
    trainer.loaded(2, deadline=20).wait(30)
    late = run.target("rollout", 2)
    publish(trainer, 3.0)
    trainer.loaded(3, deadline=20).wait(30)
    assert [one.versions for one in others] == [[1, 2, 3]] * 2
    assert late.versions in ([2, 3], [3])


def test_without_the_policy_nobody_waits() -> None:
    with FakeRun() as run:
        trainer, rollout, _ = run.join("trainer"), run.join("rollout"), run.join("rollout", 1)
        publish(trainer, 1.0)
        update = rollout.receive().wait(30)
        update.adopt().wait(0)
        with update.unadopted():
            assert update.version == 1
        assert rollout.version == 1

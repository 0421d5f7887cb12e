"""The coordinator is killed (-9) in the middle of a decision about what is served, and
another one goes on: with the same labels and leases, and no target goes back. And a
holder of a lease is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from replicas import errors
from replicas.channel import Channel
from replicas.control.client import Client
from replicas.messages.version_orders import Hold
from tests.integration.coordinator.test_coordinator_restart import load, publish, world_of
from tests.support.programs import group
from tests.support.runs import running
from tests.support.waits import eventually, wait_until

pytestmark = pytest.mark.anyio

PROMOTED: dict[str, Any] = {"follow": "promoted", "slots": 4}
Order = Callable[[Channel], Awaitable[object]]
PROMOTE: Order = lambda channel: channel.versions.promote("candidate")  # noqa: E731
ROLLBACK: Order = lambda channel: channel.versions.rollback("previous")  # noqa: E731
REJECT: Order = lambda channel: channel.versions.reject(why="worse")  # noqa: E731
HOLD: Order = lambda channel: _held(channel)  # noqa: E731


async def _held(channel: Channel) -> object:
    return await channel.versions.hold(1, seconds=600, name="evaluation")._order


async def outcome(order: Awaitable[object]) -> str:
    """Its name: an order whose answer died with its coordinator has none."""
    try:
        await order
    except errors.ReplicasError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("moment", ["decided", "telling"])
@pytest.mark.parametrize(("order", "value"), [(PROMOTE, 3.0), (ROLLBACK, 1.0)], ids=["promote", "rollback"])
async def test_a_coordinator_killed_in_the_middle_of_a_decision(
    order: Order, value: float, moment: str, tmp_path: Path
) -> None:
    async with world_of(tmp_path, PROMOTED, trainer=1, rollout=2) as world:
        trainer, *targets = [await world.join("trainer"), await world.join("rollout"), await world.join("rollout", 1)]
        for number in (1.0, 2.0):
            await publish(trainer, number)
            await trainer.versions.promote()
            assert [await load(target) for target in targets] == [(number, number)] * 2
        await publish(trainer, 3.0)
        await world.coordinator.arm(moment)
        told = asyncio.ensure_future(outcome(order(trainer)))
        await world.restarted()
        assert await told in ("OutcomeUnknown", "done")
        late = await world.join("rollout", 2)
        found = [await load(target) for target in (*targets, late)]
        assert {loaded for _, loaded in found} == {value}, "the decision is on disk, and binds all"
        assert len({version for version, _ in found}) == 1
        await wait_until(lambda: trainer.versions.labels.get("current") == found[0][0], "the label that it moved")
        await publish(trainer, 4.0)
        await trainer.versions.promote()
        assert {(await load(target))[1] for target in (*targets, late)} == {4.0}


async def test_a_coordinator_killed_while_it_rejects(tmp_path: Path) -> None:
    async with world_of(tmp_path, PROMOTED, trainer=1, rollout=2) as world:
        trainer, target = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1.0)
        await trainer.versions.promote()
        assert await load(target) == (1, 1.0)
        await publish(trainer, 2.0)
        await world.coordinator.arm("decided")
        told = asyncio.ensure_future(outcome(REJECT(trainer)))
        await world.restarted()
        assert await told in ("OutcomeUnknown", "done")
        assert await load(await world.join("rollout", 1)) == (1, 1.0)
        await wait_until(lambda: trainer.versions.labels == {"current": 1}, "no candidate")
        with pytest.raises(errors.UsageError, match="no label 'candidate'"):
            await trainer.versions.promote()
        await publish(trainer, 3.0)
        await trainer.versions.promote()
        assert await load(target) == (3, 3.0), "it never loaded what was rejected"


async def test_a_lease_outlives_the_coordinator(tmp_path: Path) -> None:
    async with world_of(tmp_path, {"slots": 4}, trainer=1, rollout=1) as world:
        trainer, target = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1.0)
        await load(target)
        await world.coordinator.arm("decided")
        told = asyncio.ensure_future(outcome(HOLD(trainer)))
        await world.restarted()
        assert await told in ("OutcomeUnknown", "done")
        for number in (2.0, 3.0, 4.0, 5.0):
            await publish(trainer, number)
            await load(target)
        with await target.versions.read(1) as update:
            assert {value for _, tensor in update for value in tensor.tolist()} == {1.0}
        await trainer.versions.release("evaluation")


TRAINER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    channel.publish({"w": torch.zeros(8)}).wait(60)
    time.sleep(600)
"""
EVALUATOR = """
import time, replicas
with replicas.join("policy") as channel:
    with channel.receive().wait() as update:
        update.tensors()
    with channel.versions.hold(update.version, name="evaluation", seconds=600):
        time.sleep(600)
"""
GROUPS = (
    group("trainer", TRAINER)
    + group("evaluator", EVALUATOR, 'min_ready = 0\nrestart = { policy = "never" }')
    + '[channels.policy]\nsources = ["trainer"]\ntargets = ["evaluator"]\nslots = 4\n'
)


def test_a_lease_ends_with_its_holder(tmp_path: Path) -> None:
    """That of a person has none, and lasts."""
    with running(tmp_path, GROUPS) as run:

        def leases() -> set[str]:
            return {lease.name for channel in run.status().channels for one in channel.versions for lease in one.leases}

        eventually(lambda: leases() == {"evaluation"}, "its lease", timeout_s=60)
        token = (run.state_dir / "operator-token").read_text().strip()
        Client(run.endpoint(), token=token).order(Hold(channel="policy", version="1", seconds=600.0, name="mine"))
        assert leases() == {"evaluation", "mine"}
        os.kill(run.find("evaluation"), signal.SIGKILL)
        eventually(lambda: leases() == {"mine"}, "the end of the lease of a dead holder", timeout_s=20)
        run.end()

"""The coordinator is killed (-9) in the middle of a decision about what is served, and
another one goes on: with the same labels and leases, and no target goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from replicas import errors
from replicas.channel import Channel
from tests.integration.coordinator.test_coordinator_restart import load, publish, world_of
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

PROMOTED: dict[str, Any] = {"follow": "promoted", "slots": 4}
Order = Callable[[Channel], Awaitable[object]]
PROMOTE: Order = lambda channel: channel.versions.promote("candidate")  # noqa: E731
ROLLBACK: Order = lambda channel: channel.versions.rollback("previous")  # noqa: E731
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

"""A host is cut off in the middle of a decision about what is served: the others go on,
and it serves what was decided once its link works again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicas.coordinator import GroupShape
from tests.support.channel.host_ranks import HostRank, HostWorld, host_world
from tests.support.machine.networks import Machine, why_no_hosts
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio
PROMOTED = {"follow": "promoted", "slots": 4}


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


@contextmanager
def cut_off(world: HostWorld, host: Machine) -> Iterator[None]:
    """Nothing that the host sends reaches the coordinator."""
    coordinator = Machine(0, world.coordinator.endpoint.rpartition(":")[0])
    host.cut_off(coordinator)
    try:
        yield
    finally:
        host.join_again(coordinator)


async def promoted(trainer: HostRank, targets: list[HostRank], seed: int) -> int:
    """A version that is published and promoted, and that all of them have loaded."""
    version = (await trainer.ask("publish", seed=seed))["version"]
    await trainer.ask("steer", order="promote", version="candidate")
    for one in targets:
        assert await one.ask("receive") == {"version": version, "seed": seed}
    return int(version)


@pytest.mark.parametrize("restart", [False, True], ids=["", "and another coordinator"])
@pytest.mark.parametrize(("order", "version", "seed"), [("promote", "candidate", 30), ("rollback", "previous", 10)])
async def test_a_host_that_is_cut_off_serves_what_was_decided_meanwhile(
    order: str, version: str, seed: int, restart: bool, tmp_path: Path
) -> None:
    async with host_world(2, PROMOTED, state_dir=tmp_path, rollout=GroupShape(2)) as world:
        trainer, (near, far) = await world.trainer_and_rollouts(0, 1)
        await promoted(trainer, [near, far], 10)
        before = await promoted(trainer, [near, far], 20)
        await trainer.ask("publish", seed=30)
        with cut_off(world, world.hosts[1]):
            await trainer.ask("steer", order=order, version=version)
            served = await near.ask("receive")
            assert served["seed"] == seed
            if restart:
                await world.restart()
                await world.live(2)
        assert await far.ask("receive") == served
        assert served["version"] > before
        await wait_until(lambda: len(world.coordinator.channel_statuses()[0].members) == 3, "all members")
        await promoted(trainer, [near, far], 40)

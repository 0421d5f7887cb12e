"""Memory that the members of one host map: it outlives its source, is left to who still
reads it, and does not pile up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from replicas.coordinator import GroupShape
from tests.support.channel.coordinator_process import CoordinatorProcess
from tests.support.channel.mapping_world import MappingWorld, looked_at, owned, world_of
from tests.support.channels import POLICY, freeze
from tests.support.machine.memfds import mapped_anywhere, memories, ownerless
from tests.support.processes import children
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SHORT_LEASE = GroupShape(3, heartbeat_timeout_s=6.0)
SLACK_NBYTES = 6 * 2**20
"""By how much the memory of a process may differ: what malloc and Python keep for
later."""


async def test_tensors_that_are_kept_too_long_are_left_alone() -> None:
    """They are not valid by the contract any more, but nobody waits for them, and
    nothing is written under them."""
    async with world_of(rollout=1) as world:
        trainer, reader = await world.trainer_and_rollouts(1)
        await trainer.ask("publish", value=1)
        await reader.ask("receive")
        await reader.ask("loaded", forget=False)
        for value in range(2, 8):
            assert (await trainer.ask("publish", value=value))["lost"] == []
        assert await reader.ask("values") == [1.0]
        assert (await trainer.ask("arena"))["retired"] == 1
        await reader.ask("forget")
        await trainer.ask("publish_many", first=8, count=3)
        assert (await trainer.ask("arena"))["retired"] == 0


async def test_a_version_outlives_its_source_and_all_its_readers_but_not_the_coordinator() -> None:
    async with world_of(rollout=2) as world:
        trainer, first = await asyncio.gather(world.join("trainer"), world.join("rollout"))
        await trainer.ask("publish", value=1)
        assert (await first.ask("receive"))["values"] == [1.0]
        memory = owned(trainer).keys()
        (shared,) = looked_at(first)
        await trainer.kill()
        world.ranks.remove(trainer)

        late = await world.join("rollout", 1)
        assert await late.ask("receive") == {"version": 1, "values": [1.0]}
        assert looked_at(late) == {shared}, "there is no other copy"
        world.assert_no_group()
        await first.kill()
        assert await late.ask("again") == [1.0]
        third = await world.join("rollout", 0)
        assert await third.ask("load_until", version=1) == [1]

        await third.kill()
        await late.close()
        assert mapped_anywhere([shared]) == {os.getpid(): {shared}}, "the coordinator keeps it"
        assert mapped_anywhere(memory - {shared}) == {}
        fourth = await world.join("rollout", 0)
        assert await fourth.ask("load_until", version=1) == [1]
        await fourth.close()
    assert mapped_anywhere(memory) == {}


async def test_a_version_that_nobody_has_seen_outlives_its_source() -> None:
    async with world_of(rollout=2) as world:
        trainer = await world.join("trainer")
        await trainer.ask("publish", value=1)
        await trainer.ask("publish", value=2)
        memory = owned(trainer).keys()
        await trainer.kill()
        world.ranks.remove(trainer)
        targets = await asyncio.gather(*(world.join("rollout", index) for index in range(2)))
        for target in targets:
            assert await target.ask("receive") == {"version": 2, "values": [2.0]}
            assert await target.ask("scribble", value=-1.0) == [-1.0]
            assert await target.ask("again") == [2.0]
            await target.ask("loaded")
        again = await world.join("trainer")
        assert (await again.ask("publish", value=3))["version"] == 3
        for target in targets:
            assert await target.ask("load_until", version=3) == [3]
        await wait_until(lambda: mapped_anywhere(memory) == {}, "nobody has the dead source's memory")
        world.assert_no_group()


async def test_a_version_in_parts_outlives_its_sources() -> None:
    config = {"sources": [{"group": "trainer", "ranks": "all"}]}
    async with world_of(config, trainer=GroupShape(1, 2), rollout=2) as world:
        trainers = await asyncio.gather(*(world.join("trainer", 0, rank, 2) for rank in range(2)))
        for trainer in trainers:
            trainer.tell("publish", value=4)
        assert [(await trainer.answer())["version"] for trainer in trainers] == [1, 1]
        for trainer in trainers:
            await trainer.kill()
            world.ranks.remove(trainer)
        targets = await asyncio.gather(*(world.join("rollout", index) for index in range(2)))
        for target in targets:
            assert (await target.ask("receive"))["values"] == [4.0, 4.5]
        world.assert_no_group()


async def test_the_next_source_takes_over_and_the_memory_of_the_dead_one_goes() -> None:
    async with world_of(rollout=2) as world:
        trainer, *targets = await world.trainer_and_rollouts()
        await trainer.ask("publish", value=1)
        for target in targets:
            await target.ask("load_until", version=1)
        memory = owned(trainer).keys()
        await trainer.kill()
        world.ranks.remove(trainer)
        again = await world.join("trainer")
        assert (await again.ask("publish", value=2))["version"] == 2
        for target in targets:
            await target.ask("load_until", version=2)
        await wait_until(lambda: mapped_anywhere(memory) == {}, "nobody has the dead source's memory")
        assert ownerless(rank.pid for rank in world.ranks) == {}


async def test_a_frozen_reader_is_left_its_memory_and_holds_up_nobody() -> None:
    async with world_of({"deadline": "20s"}, rollout=SHORT_LEASE) as world:
        trainer, other, frozen = await world.trainer_and_rollouts()
        await trainer.ask("publish", value=1)
        await other.ask("load_until", version=1)
        assert await frozen.ask("receive") == {"version": 1, "values": [1.0]}
        await freeze(frozen.process)
        try:
            assert (await trainer.ask("publish", value=2))["lost"] == ["rollout/1/0"]
            for value in range(3, 7):
                assert "version" in await trainer.ask("publish", value=value)
                await other.ask("load_until", version=value)
            assert (await trainer.ask("arena"))["retired"] == 1
            await world.lost("rollout/1/0")
            again = await world.join("rollout", 1)
            assert await again.ask("load_until", version=6) == [6]
            await trainer.ask("publish", value=7)
        finally:
            frozen.signal(signal.SIGCONT)
        assert await frozen.ask("values") == [1.0]
        assert (await frozen.ask("loaded", forget=False))["error"] == "Fenced"
        await trainer.ask("publish_many", first=8, count=4)
        assert await frozen.ask("values") == [1.0]
        await frozen.ask("forget")
        await trainer.ask("publish_many", first=12, count=3)
        assert (await trainer.ask("arena"))["retired"] == 0
        assert memories(frozen.pid) == {}
        assert await again.ask("load_until", version=14) == [14]
        world.assert_no_group()


@pytest.mark.parametrize(
    ("log", "moments"),
    [(True, [("packed", 1), ("mapping", 2)]), (False, [("mapping", 1), ("first done", 2), ("decided", 1)])],
)
async def test_a_coordinator_that_starts_again(log: bool, moments: list[tuple[str, int]], tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(POLICY, {"trainer": 1, "rollout": 1}, tmp_path if log else None)
    await coordinator.start()
    world = MappingWorld(coordinator.endpoint, coordinator.token)
    try:
        trainer, *targets = await world.trainer_and_rollouts()
        version = 0
        for moment, times in moments:
            version += 1
            await trainer.ask("publish", value=version)
            assert (await targets[0].ask("receive"))["values"] == [float(version)]
            await targets[1].ask("load_until", version=version)
            await coordinator.arm(moment, times)
            version += 1
            trainer.tell("publish", value=version)
            await coordinator.died()
            await coordinator.start()
            published = await trainer.answer()
            assert (published["version"], published["lost"]) == (version, []), moment
            assert await targets[0].ask("again") == [version - 1.0], "it was open all the time"
            await targets[0].ask("loaded")
            for target in targets:
                assert await target.ask("load_until", version=version) == [version]
        late = await world.join("rollout", 2)
        assert (await late.ask("receive"))["values"] == [float(version)]
        assert [children(rank.pid) for rank in world.ranks] == [[]] * 4
    finally:
        await asyncio.gather(*(rank.clean_up() for rank in world.ranks))
        await coordinator.clean_up()


async def test_a_source_in_parts() -> None:
    config = {"sources": [{"group": "trainer", "ranks": "all"}]}
    async with world_of(config, trainer=GroupShape(1, 2), rollout=2) as world:
        joining = [world.join("trainer", 0, rank, 2) for rank in range(2)]
        *trainers, first, second = await asyncio.gather(*joining, *(world.join("rollout", index) for index in range(2)))
        for value in (1, 2, 3):
            for trainer in trainers:
                trainer.tell("publish", value=value)
            assert [(await trainer.answer())["lost"] for trainer in trainers] == [[], []]
            for target in (first, second):
                assert (await target.ask("receive"))["values"] == [value, value + 0.5]
                await target.ask("loaded")
        world.assert_no_group()
        assert sorted(bool(owned(target)) for target in (first, second)) == [False, True], (
            "one puts it together for both"
        )


async def test_nothing_piles_up() -> None:
    async with world_of(rollout=2) as world:
        ranks = trainer, *targets = await world.trainer_and_rollouts()

        async def go_on(first: int, count: int) -> list[dict[str, int]]:
            """What each process has after these publishes."""
            last = first + count - 1
            trainer.tell("publish_many", first=first, count=count)
            for target in targets:
                target.tell("load_until", version=last)
            answers = [await rank.answer() for rank in ranks]
            assert answers[0] == last
            return [await rank.ask("usage") for rank in ranks]

        before = await go_on(1, 40)
        after = await go_on(41, 300)
        for then, now in zip(before, after, strict=True):
            assert now["fds"] <= then["fds"] + 2, (then, now)
            assert now["maps"] <= then["maps"] + 2, (then, now)
            assert now["threads"] <= then["threads"] + 2, (then, now)
            assert now["memory"] <= then["memory"] + SLACK_NBYTES, (then, now)
        assert (await trainer.ask("arena"))["retired"] == 0
        assert ownerless(rank.pid for rank in ranks) == {}
        world.assert_no_group()

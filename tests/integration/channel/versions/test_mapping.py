"""Members of one host map each other's memory. All ranks are processes of their own."""

from __future__ import annotations

import pytest

from tests.support.channel.mapping_world import looked_at, owned, world_of
from tests.support.machine.memfds import memories

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_targets_map_the_memory_of_the_source() -> None:
    async with world_of(rollout=3) as world:
        trainer, *targets = await world.trainer_and_rollouts()
        published = await trainer.ask("publish", value=5)
        assert (published["version"], published["lost"]) == (1, [])
        assert "map" in published["phases"]
        for target in targets:
            assert await target.ask("receive") == {"version": 1, "values": [5.0]}
        world.assert_no_group()

        mine = owned(trainer)
        (shared,) = {inode for target in targets for inode in looked_at(target)}
        assert shared in mine
        for target in targets:
            assert not owned(target), "a reader needs no memory of its own"
            assert not memories(target.pid)[shared].owned
            assert (await target.ask("arena"))["nbytes"] == 0

        assert await targets[0].ask("scribble", value=-1.0) == [-1.0]
        assert await targets[0].ask("again") == [5.0], "the memory itself is as it was"
        assert await targets[1].ask("values") == [5.0]
        late = await world.join("rollout", 2)
        assert await late.ask("receive") == {"version": 1, "values": [5.0]}
        assert looked_at(late) == {shared}

        for target in (*targets, late):
            await target.ask("loaded")
        assert (await trainer.ask("publish", value=6))["lost"] == []
        assert [await target.ask("load_into") for target in (*targets, late)] == [[6.0]] * 3
        world.assert_no_group()


async def test_an_open_update_stays_as_it_is_and_the_trainer_waits_for_it() -> None:
    async with world_of(rollout=2) as world:
        trainer, reader, other = await world.trainer_and_rollouts()
        await trainer.ask("publish", value=1)
        assert await reader.ask("receive") == {"version": 1, "values": [1.0]}
        await other.ask("load_until", version=1)
        assert (await trainer.ask("publish", value=2))["lost"] == []
        await other.ask("load_until", version=2)

        trainer.tell("publish", value=3)
        await world.packing(3)
        assert await trainer.still_at_it(), "both slots are used: version 1 is read, and 2 is the newest"
        assert await reader.ask("again") == [1.0]
        assert await reader.ask("loaded") == 1
        assert (await trainer.answer())["version"] == 3
        assert await other.ask("load_until", version=3) == [3]

        assert await reader.ask("receive") == {"version": 3, "values": [3.0]}
        assert (await trainer.ask("publish", value=4))["version"] == 4
        refused = await trainer.ask("publish", value=5, deadline=2.0)
        assert refused["error"] == "Busy"
        assert f"version 3 (read by process {reader.pid})" in refused["text"]
        assert await reader.ask("values") == await reader.ask("again") == [3.0]
        await reader.ask("loaded")
        assert (await trainer.ask("publish", value=6))["version"] == 6
        world.assert_no_group()


async def test_a_reader_that_is_killed_lets_go() -> None:
    async with world_of(rollout=2) as world:
        trainer, reader, other = await world.trainer_and_rollouts()
        await trainer.ask("publish", value=1)
        assert (await reader.ask("receive"))["values"] == [1.0]
        await other.ask("load_until", version=1)
        await trainer.ask("publish", value=2)
        trainer.tell("publish", value=3)
        await world.packing(3)
        assert await trainer.still_at_it()
        await reader.kill()
        assert (await trainer.answer())["version"] == 3
        assert await other.ask("load_until", version=3) == [3]
        await trainer.ask("publish", value=4)  # its session may have ended before the kernel let go of the memory
        assert (await trainer.ask("arena"))["retired"] == 0

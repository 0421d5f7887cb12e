"""Histories of requests that cross each other, or meet a fault, in virtual time.

Covers: supervisor/fleet/handle.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from replicas.config.structs import HealthConfig
from replicas.errors import UsageError
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.run_state import Cause
from replicas.supervisor.wire.orders import PartSpec
from tests.support.fleets import DONE, Life, Yard, fleet, group_of
from tests.support.virtual import history

RELOAD = Cause("reload", "its config has changed")


# ---------------------------------------------------------------- drains


@history
async def test_a_shim_that_freezes_while_its_replica_drains_is_killed() -> None:
    group = group_of("a", drain_timeout_s=5.0, stop_timeout_s=2.0)
    async with fleet(group, on_channel={"a"}, lives={"a": [Life(stop_s=10_000.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/0"] = "busy"
        yard.shims["a/0"][0].stop = lambda timeout_s, *, stacks=False: None  # type: ignore[method-assign]  # it is frozen
        began = yard.now
        await made.drain()
        assert yard.now - began < 5.0 + 2.0 + 9.0


@history
async def test_the_run_can_be_drained_while_removed_groups_are_on_their_way() -> None:
    groups = (group_of("a"), group_of("b", depends_on=["a"], stop_timeout_s=60.0), group_of("c"))
    async with fleet(*groups, lives={"b": [Life(stop_s=30.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        removing = [asyncio.create_task(made.scale(made.groups[name], 0, reason="reloaded")) for name in ("a", "b")]
        await asyncio.sleep(3)
        assert sorted(made.groups) == ["b", "c"]
        began = yard.now
        await made.drain(hurry=True)
        assert yard.now - began < 1.0
        await asyncio.gather(*removing)


@history
async def test_a_mate_that_fails_does_not_undo_a_drain() -> None:
    group = group_of("a", replicas=2, drain_timeout_s=30.0, restart={"strategy": "group"})
    lives = {"a/0": [Life(ends_s=5.0, code=1), Life()]}
    async with fleet(group, lives=lives, on_channel={"a"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/1"] = "busy"
        await made.drain("a/1")
        assert made.groups["a"].replicas[1].halted
        await made.until(lambda: len(yard.shims["a/0"]) == 2)
        assert len(yard.shims["a/1"]) == 1


@history
async def test_a_drain_that_somebody_calls_off_is_over() -> None:
    async with fleet(group_of("a"), on_channel={"a"}) as (made, yard):
        await made.wait_ready(made.groups.values())
        yard.syncs["a/0"] = "busy"
        draining = asyncio.create_task(made.drain("a/0"))
        await asyncio.sleep(1)
        restarting = asyncio.create_task(made.restart("a/0"))
        await asyncio.gather(draining, restarting)
        assert not made.groups["a"].replicas[0].unwanted


@history
async def test_a_replica_that_is_done_stays_so_when_its_group_is_drained() -> None:
    groups = (group_of("a", replicas=2), group_of("b", depends_on=["a:finished"]))
    async with fleet(*groups, lives={"a/0": [DONE], "a/1": [Life(), DONE]}) as (made, yard):
        await asyncio.sleep(5)
        await made.drain("a")
        assert made.groups["a"].states == {0: "finished", 1: "drained"}
        await made.restart("a/1")
        await made.until(lambda: yard.states()["b/0"] == "ready")


# ---------------------------------------------------------------- restarts


@history
async def test_a_roll_leaves_those_alone_that_are_drained_meanwhile() -> None:
    async with fleet(group_of("a", replicas=4)) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.drain("a/3")
        rolling = asyncio.create_task(made.roll(made.groups["a"], made.targets("a"), RELOAD))
        await made.until(lambda: len(yard.shims["a/0"]) == 2)
        await asyncio.gather(made.drain("a/0"), made.drain("a/2"))
        await rolling
        assert {name: len(shims) for name, shims in yard.shims.items()} == {"a/0": 2, "a/1": 2, "a/2": 1, "a/3": 2}
        assert yard.states() == {"a/0": "drained", "a/1": "ready", "a/2": "drained", "a/3": "ready"}


@history
async def test_a_group_without_replicas_is_not_restarted() -> None:
    async with fleet(group_of("a")) as (made, _):
        await made.scale(made.groups["a"], 0)
        with pytest.raises(UsageError, match="group a has no replicas"):
            await made.restart("a")


@history
async def test_a_restart_is_over_when_the_replica_is_drained_meanwhile() -> None:
    async with fleet(group_of("a"), lives={"a": [Life(stop_s=5.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        restarting = asyncio.create_task(made.restart("a/0"))
        await asyncio.sleep(1)
        await made.drain("a/0")
        await restarting
        assert yard.states() == {"a/0": "drained"}


@history
async def test_a_group_that_is_restarted_by_hand_has_no_incident_any_more() -> None:
    rules = {"strategy": "group", "initial_delay_s": 3.0, "max_restarts": 5}
    lives = {"a/0": [Life(ends_s=1.0, code=1), Life(ends_s=4.0, code=1), Life()]}
    async with fleet(group_of("a", replicas=2, restart=rules), lives=lives) as (made, yard):
        await made.until(lambda: set(yard.states().values()) == {"backoff"})
        began = yard.now
        await made.restart("a")
        assert yard.now - began < 1.0
        await made.until(lambda: len(yard.shims["a/0"]) == 3)
        assert made.groups["a"].rules.remaining(asyncio.get_running_loop().time()) == 3


@history
async def test_one_whose_start_fails_takes_its_group_with_it() -> None:
    group = group_of("a", replicas=2, restart={"strategy": "group"})
    async with fleet(group, lives={"a/0": [Life(ends_s=2.0, code=1), Life()]}) as (_, yard):

        def start(spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
            if (spec.replica, spec.generation) == (1, 2):
                raise BlockingIOError("no process is left")
            return yard.start(spec, changed)

        yard.context.start_shim = start
        await asyncio.sleep(10)
        assert set(yard.states().values()) == {"ready"}
        assert abs(yard.moves("a/0")[-2][0] - yard.moves("a/1")[-2][0]) < 0.3, "they come back together"


@history
async def test_to_wait_for_ones_turn_is_no_part_of_a_start() -> None:
    group = group_of("a", replicas=5, health=HealthConfig(start_timeout_s=4.0))
    async with fleet(group, lives={"a": [Life(start_s=3.0)]}) as (made, yard):
        yard.context.turns = asyncio.Semaphore(1)
        await made.wait_ready(made.groups.values())
        assert made.groups["a"].restarts_by_reason() == {}
        assert yard.now > 10.0


# ------------------------------------------------------------- sizes, and what is saved


@history
async def test_a_scale_that_nobody_waits_for_goes_on() -> None:
    async with fleet(group_of("a", replicas=2), lives={"a": [Life(stop_s=5.0)]}) as (made, yard):
        await made.wait_ready(made.groups.values())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.scale(made.groups["a"], 1), 1)
        await asyncio.sleep(10)
        assert yard.states() == {"a/0": "ready"}
        await made.scale(made.groups["a"], 2)
        await made.wait_ready(made.groups.values())
        assert len(yard.shims["a/1"]) == 2


@history
async def test_a_group_that_is_scaled_to_none_is_not_finished() -> None:
    groups = (group_of("a", replicas=2), group_of("b", depends_on=["a:finished"]))
    async with fleet(*groups, stop_when=("a",)) as (made, yard):
        await made.scale(made.groups["a"], 0)
        await asyncio.sleep(5)
        assert (made.over.is_set(), yard.states()) == (False, {"b/0": "pending"})


@history
async def test_a_group_that_is_scaled_to_none_keeps_no_run_going() -> None:
    async with fleet(group_of("a"), group_of("b"), lives={"b": [DONE]}) as (made, _):
        await made.scale(made.groups["a"], 0)
        await made.over.wait()
        assert made.exit_code == 0


def saved_of(yard: Yard) -> dict[str, Any]:
    yard.save()
    return dict(yard.saved)


@history
async def test_a_kill_in_the_roll_of_a_reload_does_not_lose_the_new_size() -> None:
    new = group_of("a", replicas=4)
    async with fleet(group_of("a", replicas=2)) as (made, yard):
        made.groups["a"].use(new)
        saved = saved_of(yard)
    async with fleet(new, saved=saved) as (made, yard):
        assert made.groups["a"].size == 4
        await made.scale(made.groups["a"], 3)
        saved = saved_of(yard)
    async with fleet(new, saved=saved) as (made, _):
        assert made.groups["a"].size == 3


@history
async def test_what_was_stopped_by_hand_rests_under_the_next_supervisor_too() -> None:
    group = group_of("a", replicas=2)
    async with fleet(group) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.drain("a/1")
        saved = saved_of(yard)
    async with fleet(group, saved=saved) as (made, yard):
        await made.until(lambda: yard.states() == {"a/0": "ready", "a/1": "drained"})
        assert yard.shims["a/1"] == []
        await made.restart("a/1")
        await made.wait_ready(made.groups.values())


@history
async def test_a_group_that_comes_back_goes_on_with_its_generations() -> None:
    group, other = group_of("a"), group_of("b")
    async with fleet(group, other) as (made, yard):
        await made.wait_ready(made.groups.values())
        await made.scale(made.groups["a"], 0, reason="reloaded")
        made.adopt(group)
        assert made.groups["a"].replicas[0].life.generation == 1
        await made.wait_ready(made.groups.values())
        await made.scale(made.groups["a"], 0, reason="reloaded")
        saved = saved_of(yard)
    async with fleet(other, saved=saved) as (made, yard):
        saved = saved_of(yard)
        made.adopt(group)
        await made.wait_ready(made.groups.values())
        assert made.groups["a"].replicas[0].life.generation == 3
    assert saved["a"].replicas[0].generation == 2

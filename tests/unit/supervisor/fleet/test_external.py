"""Histories of replicas that others start, in virtual time: what the fleet makes of
members that come and go.

Covers: supervisor/fleet/external.py.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from replicas import errors
from replicas.config.structs import GroupConfig
from replicas.coordinator import Readiness
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.state.run_state import SavedGroup, SavedReplica
from replicas.telemetry.events import Scaled
from tests.support.fleets import DONE, Yard, fleet, group_of
from tests.support.virtual import virtually


def others_start(name: str, **changes: Any) -> GroupConfig:
    return group_of(name, launcher="external", **changes)


external_fleet = functools.partial(fleet, on_channel={"a", "b"})


def events(yard: Yard) -> list[str]:
    return [str(one.event) for _, one in yard.events if isinstance(one, Transition)]


def test_a_replica_is_ready_while_its_program_is_there_and_waits_for_the_next() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a", replicas=2)) as (made, yard):
            await asyncio.sleep(1)
            group = made.groups["a"]
            assert yard.states() == {"a/0": "pending", "a/1": "pending"}
            waits = group.status(yard.now).replicas[0].reason
            assert waits == "waits for a program, which you start, to join"
            yard.views["a/1"] = Readiness(False, "no version of policy loaded yet (newest: 1)", heartbeat_age_s=0.1)
            yard.joins("a/1", "x")
            await asyncio.sleep(1)
            assert yard.states()["a/1"] == "starting"
            assert "no version of policy" in group.status(yard.now).replicas[1].reason
            del yard.views["a/1"]
            await asyncio.sleep(1)
            assert yard.states()["a/1"] == "ready"
            made.replica("a", 1).member_lost(0, "lease")  # type: ignore[union-attr]  # it is there
            yard.joins("a/1")
            await asyncio.sleep(1)
            one = group.status(yard.now).replicas[1]
            assert (one.state, one.last_exit) == ("pending", "rank 0: no heartbeat came within heartbeat_timeout")
            assert yard.forgotten == ["a/1"], "who left in order is expected again"
            yard.joins("a/1", "y")
            await asyncio.sleep(1)
            one = group.status(yard.now).replicas[1]
            assert (one.state, one.generation, one.restarts, one.pid) == ("ready", 2, 0, None)
            assert events(yard) == ["start", "ready", "left", "start", "ready"]
            recovered = [step.recovery_s for _, step in yard.events if isinstance(step, Transition)]
            assert recovered[-1] == pytest.approx(1.0, abs=0.5)
            assert not any(yard.shims.values()), "nothing was started"

    virtually(story())


def test_a_program_that_others_start_is_silent_while_nothing_is_heard_of_it() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a")) as (made, yard):
            yard.views["a/0"] = Readiness(True, heartbeat_age_s=0.1)
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            yard.views["a/0"] = Readiness(True, heartbeat_age_s=4.0, silent=(0,))
            await asyncio.sleep(1)
            one = made.groups["a"].status(yard.now).replicas[0]
            assert (one.state, one.reason) == ("silent", "no heartbeat from rank 0 (limit: 30 s)")
            yard.views["a/0"] = Readiness(True, heartbeat_age_s=0.1)
            await asyncio.sleep(1)
            assert events(yard) == ["start", "ready", "silent", "ready"]

    virtually(story())


def test_a_replica_that_falls_behind_is_not_ready_until_it_has_caught_up() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a")) as (made, yard):
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready"}
            yard.views["a/0"] = Readiness(False, "no version of policy loaded yet (newest: 3)", heartbeat_age_s=0.1)
            await asyncio.sleep(1)
            (one,) = made.groups["a"].status(yard.now).replicas
            assert (one.state, one.reason) == ("starting", "no version of policy loaded yet (newest: 3)")
            assert not made.groups["a"].good
            del yard.views["a/0"]
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready"}
            assert events(yard) == ["start", "ready", "unready", "ready"]

    virtually(story())


def test_a_program_in_the_place_of_another_is_a_new_life_and_a_new_rank_is_none() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a", nproc_per_node=2)) as (_, yard):
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            yard.joins("a/0", "x", "y")
            await asyncio.sleep(1)
            yard.joins("a/0", "y", "z")  # its first rank, again
            await asyncio.sleep(1)
            assert events(yard) == ["start", "ready"]
            yard.joins("a/0", "v", "w")
            await asyncio.sleep(1)
            assert events(yard) == ["start", "ready", "left", "start", "ready"]

    virtually(story())


def test_others_than_expected_are_shown_while_they_are_there_and_scaling_is_a_hint() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a")) as (made, yard):
            yard.joins("a/0", "x")
            yard.joins("a/4", "y")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready", "a/4": "ready"}
            await made.scale(made.groups["a"], 2)
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready", "a/1": "pending", "a/4": "ready"}
            assert (made.groups["a"].status(0.0).size, yard.shapes["a"].replicas) == (2, 2)
            assert [one for _, one in yard.events if isinstance(one, Scaled)] == [Scaled(group="a", before=1, after=2)]
            await made.scale(made.groups["a"], 0)
            yard.joins("a/4")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready"}, "it goes on as long as others let it"
            assert not yard.draining
            yard.joins("a/4", "z")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready", "a/4": "ready"}
            assert made.groups["a"].replicas[4].life.generation == 2

    virtually(story())


def test_a_drain_ends_its_part_in_syncs_until_its_next_program_joins() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a", drain_timeout_s=20.0)) as (made, yard):
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            yard.syncs["a/0"] = "it loads version 3 of policy"
            drain = asyncio.create_task(made.drain("a/0"))
            await asyncio.sleep(5)
            assert (yard.states(), yard.draining) == ({"a/0": "draining"}, ["a/0"])
            assert "loads version 3" in made.groups["a"].status(0.0).replicas[0].reason
            yard.syncs.clear()
            await asyncio.wait_for(drain, 1)
            await asyncio.sleep(60)
            assert yard.states() == {"a/0": "drained"}, "its program is not ours to end"
            assert yard.forgotten == []
            yard.joins("a/0", "y")
            await asyncio.sleep(1)
            assert (yard.states(), yard.forgotten) == ({"a/0": "ready"}, ["a/0"])
            yard.syncs["a/0"] = "it loads version 4 of policy"
            await made.drain("a/0", hurry=True)
            assert yard.states() == {"a/0": "drained"}
            yard.joins("a/0")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "pending"}

    virtually(story())


def test_a_drained_replica_stays_so_when_the_coordinator_starts_again() -> None:
    async def story() -> None:
        saved = {"a": SavedGroup(size=1, configured=1, replicas={0: SavedReplica(generation=3, halted=True)})}
        async with external_fleet(others_start("a"), saved=saved) as (made, yard):
            yard.recovering = True
            await asyncio.sleep(1)
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            yard.recovering = False
            await asyncio.sleep(10)
            assert (yard.states(), yard.draining[:1]) == ({"a/0": "drained"}, ["a/0"])
            yard.joins("a/0", "y")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready"}
            assert made.groups["a"].replicas[0].life.generation == 4

    virtually(story())


@pytest.mark.slow
def test_a_run_waits_for_the_groups_that_it_starts_and_without_any_goes_on() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a"), group_of("b"), lives={"b": [DONE]}) as (made, yard):
            yard.joins("a/0", "x")
            yard.syncs["a/0"] = "it loads version 3 of policy"
            await asyncio.wait_for(made.over.wait(), 10)
            assert (made.exit_code, yard.states()) == (0, {"a/0": "ready", "b/0": "finished"})
            drain = asyncio.create_task(made.drain())
            await asyncio.sleep(2)
            assert not drain.done()
            yard.syncs.clear()
            await asyncio.wait_for(drain, 1)
            assert yard.states() == {"a/0": "drained", "b/0": "finished"}
        async with external_fleet(others_start("a")) as (made, yard):
            await asyncio.sleep(5000)
            yard.joins("a/0", "x")
            await made.wait_ready([made.groups["a"]])
            assert not made.over.is_set()

    virtually(story())


def test_what_others_start_cannot_be_restarted_from_here() -> None:
    async def story() -> None:
        async with external_fleet(others_start("a")) as (made, yard):
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            for target, rolling in (("a", False), ("a/0", False), ("a", True)):
                with pytest.raises(errors.UsageError, match=r"group a is external"):
                    await made.restart(target, rolling=rolling)
            with pytest.raises(errors.UsageError, match="replica a/0 is external"):
                made.groups["a"].replicas[0].restart()
            assert yard.states() == {"a/0": "ready"}
            assert "its program is started by others" in (await made.groups["a"].replicas[0].stacks())["a/0"]

    virtually(story())


def test_as_many_ready_replicas_as_expected_are_enough_whatever_their_indices() -> None:
    async def story() -> None:
        groups = (others_start("a", replicas=2), group_of("b", depends_on=("a",)))
        async with external_fleet(*groups) as (made, yard):
            yard.joins("a/0", "x")
            await asyncio.sleep(1)
            assert (made.groups["a"].good, yard.states()["b/0"]) == (False, "pending")
            yard.joins("a/2", "y")
            await asyncio.sleep(1)
            assert yard.states() == {"a/0": "ready", "a/1": "pending", "a/2": "ready", "b/0": "ready"}
            await made.wait_ready([made.groups["a"]])

    virtually(story())

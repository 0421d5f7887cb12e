"""Histories of a supervisor that takes over what the one before had begun, in virtual
time.

Covers: supervisor/fleet/causes.py, supervisor/saving.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from msgspec.structs import replace

from replicas.coordinator import Readiness
from replicas.supervisor.reloading import Reloading
from replicas.supervisor.state.run_state import Cause
from tests.support.agents import Field, field
from tests.support.fleets import Life, group_of
from tests.support.virtual import history


def generations(made: Field) -> dict[str, int]:
    return {replica.name: replica.life.generation for replica in made.fleet.all()}


def restarts(made: Field) -> dict[str, int]:
    return made.fleet.groups["a"].status(0.0).restarts


@history
async def test_what_runs_goes_on() -> None:
    async with field(group_of("a", replicas=2)) as made:
        made.join("n1")
        await asyncio.sleep(5)
        await made.replace_supervisor()
        await asyncio.sleep(5)
        assert made.states() == {"a/0": "ready", "a/1": "ready"}
        assert generations(made) == {"a/0": 1, "a/1": 1}
        assert restarts(made) == {}


@history
async def test_a_restart_that_waits_for_a_sync_is_not_forgotten() -> None:
    async with field(group_of("a", replicas=2)) as made:
        made.on_channel.add("a")
        made.join("n1")
        await asyncio.sleep(5)
        made.syncs["a/0"] = "version 3 moves"
        made.fleet.groups["a"].replicas[0].restart()
        await asyncio.sleep(1)
        await made.replace_supervisor()
        await asyncio.sleep(2)
        assert made.states()["a/0"] == "draining"
        del made.syncs["a/0"]
        made.fleet.groups["a"].replicas[0].on_sync_over()
        await asyncio.sleep(10)
        assert generations(made) == {"a/0": 2, "a/1": 1}
        assert restarts(made) == {"requested": 1}


@history
async def test_a_fault_whose_processes_still_end_is_paid_for() -> None:
    async with field(group_of("a", restart={"max_restarts": 4}), lives={"a": [Life(stop_s=6.0), Life()]}) as made:
        made.join("n1")
        await asyncio.sleep(5)
        made.fleet.groups["a"].replicas[0].member_lost(0, "lease")
        await asyncio.sleep(1)
        await made.replace_supervisor()
        await asyncio.sleep(20)
        assert made.states() == {"a/0": "ready"}
        assert restarts(made) == {"heartbeat_timeout": 1}
        assert made.fleet.groups["a"].rules.remaining(0.0) == 3


@history
async def test_a_group_that_restarts_as_a_whole_does_so_under_the_next_supervisor() -> None:
    """A replica that has failed does not start beside others that still end."""
    lives = {"a/0": [Life(ends_s=4.0, code=1), Life()], "a/1": [Life(stop_s=8.0), Life()]}
    async with field(group_of("a", replicas=2, restart={"strategy": "group"}), lives=lives) as made:
        made.join("n1")
        await asyncio.sleep(6)
        await made.replace_supervisor()
        await asyncio.sleep(3)
        assert made.where("a/0") == ""
        assert made.where("a/1") == "n1"
        await asyncio.sleep(15)
        assert made.states() == {"a/0": "ready", "a/1": "ready"}
        assert generations(made) == {"a/0": 2, "a/1": 2}


@history
async def test_a_reload_that_had_not_come_to_all_replicas_goes_on() -> None:
    before = group_of("a", replicas=3)
    after = replace(before, command=("y",))
    async with field(before, lives={"a": [Life(stop_s=5.0), Life()]}) as made:
        made.join("n1")
        await asyncio.sleep(5)
        group = made.fleet.groups["a"]
        group.use(after)
        made.save()
        made.spawn(lambda: made.fleet.roll(group, group.replicas.values(), Cause("reload", "its config has changed")))
        await asyncio.sleep(7)
        assert generations(made) == {"a/0": 2, "a/1": 1, "a/2": 1}
        await made.replace_supervisor(after)
        replicas = made.fleet.groups["a"].replicas
        assert [replica.name for replica in replicas.values() if replica.outdated] == ["a/1", "a/2"]
        reloading = Reloading(made.context, lambda: made.fleet, cast("Any", None))
        await asyncio.wait_for(reloading.catch_up(), 60)
        assert generations(made) == {"a/0": 2, "a/1": 2, "a/2": 2}
        assert not any(replica.outdated for replica in replicas.values())


@history
async def test_a_generation_that_an_earlier_supervisor_saw_make_progress_spends_no_cycle() -> None:
    async with field(group_of("a")) as made:
        made.on_channel.add("a")
        made.views["a/0"] = Readiness(True)
        made.join("n1")
        await asyncio.sleep(5)
        made.steps["a/0"] = 7
        await made.replace_supervisor()
        await asyncio.sleep(5)
        made.fleet.groups["a"].replicas[0].member_lost(0, "lease")
        await asyncio.sleep(20)
        assert restarts(made) == {"heartbeat_timeout": 1}
        assert made.fleet.groups["a"].replicas[0].status(0.0).cycles == 0

"""Labels that a reload changes, of groups and of the supervisor's own machine: who
moves, and who starts at last. In virtual time, on fake agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from replicas import errors
from replicas.config.structs import ClusterConfig, Config, GroupConfig, PlacementConfig
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.reloading import Reloading
from replicas.telemetry.events import Reloaded
from tests.support.agents import Field, field
from tests.support.fleets import config_of, group_of
from tests.support.virtual import virtually

HERE = Machine(cpus=4, memory_nbytes=8 << 30)


async def check_plan(config: Config) -> Machine:
    return HERE


def on(label: str, name: str = "a", replicas: int = 1) -> GroupConfig:
    return group_of(name, replicas=replicas, placement=PlacementConfig(labels={"pool": label}))


def labelled(label: str, *groups: GroupConfig) -> Config:
    """A config in which this machine has the label."""
    config = config_of(*groups)
    return Config(schema_version=1, run=config.run, groups=config.groups, cluster=ClusterConfig(labels={"pool": label}))


@asynccontextmanager
async def nodes(config: Config) -> AsyncIterator[tuple[Field, Reloading]]:
    """The run of this config; its nodes are its own machine and n1 with pool=x."""
    async with field(*config.groups.values()) as made:
        made.join("local", local=True)
        await asyncio.sleep(0.1)
        made.resources.plan(config, HERE)
        made.join("n1", labels={"pool": "x"})
        made.context.config = config
        made.context.wake_monitor()
        await asyncio.sleep(3)
        yield made, Reloading(made.context, lambda: made.fleet, check_plan)


def reason(made: Field, name: str) -> str:
    (found,) = [one for group in made.fleet.groups.values() for one in group.status(0.0).replicas if one.name == name]
    return found.reason


def test_replicas_move_to_the_nodes_that_their_group_now_asks_for() -> None:
    async def scenario() -> None:
        async with nodes(labelled("own", on("x", replicas=2))) as (made, reloading):
            assert made.where("a/0") == made.where("a/1") == "n1"
            await reloading.reload(labelled("own", on("own", replicas=2)))
            assert made.states() == {"a/0": "ready", "a/1": "ready"}
            assert made.where("a/0") == made.where("a/1") == "local"
            assert made.fleet.groups["a"].status(0.0).restarts == {"reload": 2}

    virtually(scenario())


def test_replicas_that_wait_start_when_their_group_asks_for_what_is_there() -> None:
    async def scenario() -> None:
        async with nodes(labelled("own", on("nowhere", replicas=2))) as (made, reloading):
            assert reason(made, "a/0") == "waits for a node with pool=nowhere"
            await asyncio.wait_for(reloading.reload(labelled("own", on("x", replicas=2))), 20)
            assert made.states() == {"a/0": "ready", "a/1": "ready"}
            assert made.where("a/0") == "n1"

    virtually(scenario())


def test_replicas_that_wait_start_when_this_machine_gets_their_label() -> None:
    async def scenario() -> None:
        async with nodes(labelled("own", on("new"), on("x", "b"))) as (made, reloading):
            assert reason(made, "a/0") == "waits for a node with pool=new"
            await asyncio.wait_for(reloading.reload(labelled("new", on("new"), on("x", "b"))), 20)
            await asyncio.sleep(3)
            assert made.states() == {"a/0": "ready", "b/0": "ready"}
            assert made.where("a/0") == "local"
            assert {one.name: one.labels for one in made.cluster.status()}["local"] == {"pool": "new"}
            assert made.fleet.groups["b"].status(0.0).restarts == {}

    virtually(scenario())


def test_replicas_leave_this_machine_when_it_has_their_label_no_more() -> None:
    async def scenario() -> None:
        groups = (on("x", replicas=2), on("own", "b"), group_of("c"))
        async with nodes(labelled("x", *groups)) as (made, reloading):
            assert made.where("a/0") == made.where("a/1") == "local"
            assert reason(made, "b/0") == "waits for a node with pool=own"
            assert made.where("c/0") == "local"
            await asyncio.wait_for(reloading.reload(labelled("own", *groups)), 60)
            await asyncio.sleep(3)
            assert made.states() == {"a/0": "ready", "a/1": "ready", "b/0": "ready", "c/0": "ready"}
            assert made.where("a/0") == made.where("a/1") == "n1"
            assert made.where("b/0") == made.where("c/0") == "local"
            assert [made.fleet.groups[name].status(0.0).restarts for name in "abc"] == [{"reload": 2}, {}, {}]

    virtually(scenario())


def test_what_fits_nowhere_with_its_new_labels_waits_one_at_a_time() -> None:
    """The others go on where they are, until a reload finds room."""

    async def scenario() -> None:
        async with nodes(labelled("own", on("x", replicas=2))) as (made, reloading):
            hangs = asyncio.create_task(reloading.reload(labelled("own", on("nowhere", replicas=2))))
            await asyncio.sleep(20)
            assert made.where("a/1") == "n1"
            assert reason(made, "a/0").endswith("waits for a node with pool=nowhere")
            await asyncio.wait_for(reloading.reload(labelled("own", on("own", replicas=2))), 60)
            with pytest.raises(errors.WorldError, match="a newer reload"):
                await hangs
            assert made.where("a/0") == made.where("a/1") == "local"

    virtually(scenario())


def test_a_reload_that_moves_replicas_goes_on_with_the_roll_of_the_one_before() -> None:
    async def scenario() -> None:
        before = [on("x", replicas=3), group_of("b", env={"A": "1"})]
        after = group_of("a", replicas=3, placement=PlacementConfig(labels={"pool": "x"}), env={"A": "2"})
        async with nodes(labelled("x", *before)) as (made, reloading):
            first = asyncio.create_task(reloading.reload(labelled("x", after, before[1])))
            await asyncio.sleep(0.5)
            assert await reloading.reload(labelled("own", after, before[1])) == Reloaded()
            with pytest.raises(errors.WorldError, match="a newer reload"):
                await first
            assert {made.where(f"a/{index}") for index in range(3)} == {"n1"}
            assert set(made.states().values()) == {"ready"}

    virtually(scenario())

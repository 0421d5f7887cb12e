"""Reloads of a fleet that lives, in virtual time: one that hangs does not keep the next
one from mending it.

Covers: supervisor/reloading.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from replicas import errors
from replicas.config import file as config_file
from replicas.config.structs import Config, GroupConfig, ResourcesConfig
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.fleet.fleet import Fleet
from replicas.supervisor.fleet.plans import fitting, refuse_unfit
from replicas.supervisor.reloading import Reloading
from replicas.supervisor.state.run_state import SavedGroup
from replicas.telemetry.events import Reloaded, ReloadRefused
from tests.support.fleets import Life, Yard, config_of, fleet, group_of
from tests.support.virtual import virtually

EIGHT = Machine(gpus=tuple("01234567"), cpus=64, memory_nbytes=1 << 40)
HANGS = Life(start_s=1e6)


async def check_plan(config: Config) -> Machine:
    refuse_unfit(config, EIGHT)
    return EIGHT


@asynccontextmanager
async def reloadable(*groups: GroupConfig, **options: Any) -> AsyncIterator[tuple[Reloading, Fleet, Yard]]:
    async with fleet(*groups, **options) as (made, yard):
        yard.resources.plan(yard.config, EIGHT)
        yield Reloading(yard.context, lambda: made, check_plan), made, yard


def test_a_reload_that_mends_a_roll_without_end_takes_its_place() -> None:
    async def scenario() -> None:
        lives = {"a/0": [Life(), HANGS, Life()]}
        async with reloadable(group_of("a", replicas=2), lives=lives) as (reloading, made, yard):
            await made.wait_ready(made.groups.values())
            bad = config_of(group_of("a", replicas=3, env={"A": "bad"}))
            first = asyncio.create_task(reloading.reload(bad))
            await asyncio.sleep(5.0)
            assert yard.states() == {"a/0": "starting", "a/1": "ready"}
            good = config_of(group_of("a", replicas=3, env={"A": "good"}))
            assert await asyncio.wait_for(reloading.reload(good), 20) == Reloaded(changed=("a",))
            with pytest.raises(errors.WorldError, match="group a"):
                await first
            await made.wait_ready(made.groups.values())
            assert yard.states() == {"a/0": "ready", "a/1": "ready", "a/2": "ready"}
            assert [len(yard.shims[f"a/{index}"]) for index in range(3)] == [3, 2, 1]

    virtually(scenario())


def test_a_group_that_comes_back_waits_for_its_own_end() -> None:
    async def scenario() -> None:
        slow = group_of("a", stop_timeout_s=5.0)
        async with reloadable(slow, group_of("b"), lives={"a": [Life(stop_s=None), Life()]}) as (reloading, made, yard):
            await made.wait_ready(made.groups.values())
            removal = asyncio.create_task(reloading.reload(config_of(group_of("b"))))
            await asyncio.sleep(1.0)
            removal.cancel()  # who asked has gone away: the removal has not
            began = yard.now
            assert (await reloading.reload(config_of(slow, group_of("b")))).added == ("a",)
            assert 3.0 < yard.now - began < 6.0
            await made.wait_ready(made.groups.values())
            assert yard.states() == {"a/0": "ready", "b/0": "ready"}

    virtually(scenario())


def gpu_group(name: str, replicas: int = 1) -> GroupConfig:
    return group_of(name, replicas=replicas, resources=ResourcesConfig(gpus=1))


def test_a_plan_counts_the_replicas_that_were_scaled() -> None:
    async def scenario() -> None:
        async with reloadable(gpu_group("a", 2)) as (reloading, made, yard):
            await made.scale(made.groups["a"], 8)
            more = config_of(gpu_group("a", 2), gpu_group("b"))
            with pytest.raises(errors.BadConfig, match=r"a: 8 replicas x 1, b: 1"):
                await reloading.reload(more)
            assert isinstance(yard.events[-1][1], ReloadRefused)
            fewer = config_of(gpu_group("a", 3), gpu_group("b"))
            assert (await reloading.reload(fewer)).added == ("b",)
            await made.wait_ready(made.groups.values())
            assert made.groups["a"].size == 3

    virtually(scenario())


def test_sizes_that_do_not_fit_any_more_are_given_up() -> None:
    said: list[str] = []
    saved = {"a": SavedGroup(size=8, configured=2)}
    assert fitting(saved, config_of(gpu_group("a", 2)), EIGHT, said.append) == saved
    assert fitting(saved, config_of(gpu_group("a", 3), gpu_group("b", 5)), EIGHT, said.append) == saved  # not in use
    assert not said
    assert fitting(saved, config_of(gpu_group("a", 2), gpu_group("b")), EIGHT, said.append)["a"].size == 2
    assert len(said) == 1


def test_a_config_that_cannot_even_be_refused_is_told_of_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of ours: events and the metric of reloads must not say that all is well."""

    def fails(path: object) -> Config:
        raise OverflowError(f"int too large: {path}")

    async def scenario() -> None:
        async with reloadable(group_of("a")) as (reloading, made, yard):
            await made.wait_ready(made.groups.values())
            monkeypatch.setattr(config_file, "read", fails)
            with pytest.raises(OverflowError):
                await reloading.reload("x.toml")
            assert yard.events[-1][1] == ReloadRefused(problems=("a bug: OverflowError: int too large: x.toml",))
            assert yard.states() == {"a/0": "ready"}

    virtually(scenario())

"""GPUs, threads and limits: what a plan may ask for, and who gets what.

Covers: supervisor/fleet/plans.py, supervisor/fleet/resources.py.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from replicas.config.file import parse
from replicas.config.structs import Config, ControlConfig
from replicas.errors import BadConfig
from replicas.supervisor.agent import machine
from replicas.supervisor.agent.machine import Machine, inspect_machine, nvml_count, visible_gpus
from replicas.supervisor.fleet.plans import _peak, notes, problems, refuse_unfit
from replicas.supervisor.fleet.resources import Resources

EIGHT = Machine(gpus=tuple("01234567"), gpus_from="NVML", gpu_order="PCI_BUS_ID", cpus=8, memory_nbytes=64 << 30)


def config(**groups: dict[str, Any]) -> Config:
    mapping = {name: {"command": ["-m", "x"], **keys} for name, keys in groups.items()}
    return parse({"schema_version": 1, "run": {"name": "x"}, "groups": mapping}, base=Path("/"))


def gpus(count: int, **keys: Any) -> dict[str, Any]:
    return {"resources": {"gpus": count}, **keys}


def ledger(plan: Config, machine: Machine = EIGHT) -> Resources:
    resources = Resources()
    resources.plan(plan, machine)
    return resources


# ---------------------------------------------------------------- the plan


def test_a_plan_that_asks_for_nothing_fits_anywhere() -> None:
    assert problems(config(a={"replicas": 1000}), Machine()) == []


def test_gpus_that_are_not_there() -> None:
    plan = config(trainer=gpus(1, nproc_per_node=4), rollout=gpus(2, replicas=3), cpu={})
    assert problems(plan, EIGHT) == [
        "groups.trainer.resources.gpus: 10 GPUs are needed at once (trainer: 4 ranks x 1, rollout: 3 replicas x 2), "
        "but this machine has 8 (NVML)"
    ]
    with pytest.raises(BadConfig, match="this machine has 0"):
        refuse_unfit(plan, Machine())


def test_groups_that_never_run_at_once_may_use_the_same_gpus() -> None:
    chain = {"b": gpus(8, depends_on=["a:finished"]), "c": gpus(8, depends_on=["b:finished"])}
    assert problems(config(a=gpus(8), **chain), EIGHT) == []
    late = config(a=gpus(8), b={"depends_on": ["a:finished"]}, c=gpus(8, depends_on=["b:ready"]))
    assert problems(late, EIGHT) == []
    apart = config(a=gpus(8), b={}, c=gpus(8, depends_on=["b:finished"]))
    assert len(problems(apart, EIGHT)) == 1
    assert len(problems(config(a=gpus(8), b=gpus(1, depends_on=["a"])), EIGHT)) == 1


def test_memory_threads_and_limits() -> None:
    big = config(a={"replicas": 2, "resources": {"memory": "33GiB"}}, b={"resources": {"cpu_threads": 9}})
    assert problems(big, EIGHT) == [
        "groups.a.resources.memory: 66 GiB for all replicas of a, but this machine has 64 GiB",
        "groups.b.resources.cpu_threads: 9 for each rank, but this process may use 8 CPUs",
    ]
    here = Machine(memory_nbytes=1 << 40, limits_refused="no cgroup v2")
    small = config(a={"resources": {"memory": "1GiB", "max_processes": 5}})
    assert problems(small, here) == [
        "groups.a.resources.memory: this limit cannot be enforced here (no cgroup v2)",
        "groups.a.resources.max_processes: this limit cannot be enforced here (no cgroup v2)",
    ]


def test_shared_cpus_are_noted() -> None:
    plan = config(a={"replicas": 4, "resources": {"cpu_threads": 4}})
    assert problems(plan, EIGHT) == []
    assert notes(plan, EIGHT) == ["all replicas of a together have 16 CPU threads, which share 8 CPUs"]
    assert notes(config(a={"resources": {"cpu_threads": 8}}), EIGHT) == []


def grown(**groups: dict[str, Any]) -> Config:
    """The same, of a run that agents may join."""
    return replace(config(**groups), control=ControlConfig(host="10.0.0.5"))


def test_cpus_of_one_machine_are_shared_and_of_several_asked_for() -> None:
    """Where agents may join, a node with too few CPUs takes no part."""
    wants: dict[str, Any] = {"nproc_per_node": 3, "resources": {"cpu_threads": 3}}
    alone = config(a=wants)
    assert notes(alone, EIGHT) == ["all replicas of a together have 9 CPU threads, which share 8 CPUs"]
    assert ledger(alone).assign_nodes(alone.groups["a"], 0) is None
    plan = grown(a=wants, b={"resources": {"cpu_threads": 9}}, c={"replicas": 9, "resources": {"cpu_threads": 8}})
    assert notes(plan, EIGHT) == [
        "groups.b.resources.cpu_threads: 9 for each rank, but this process may use 8 CPUs; "
        "the run waits for agents on other machines",
        "groups.a.resources.cpu_threads: 3 for each of 3 ranks, but this machine has 8 CPUs; "
        "the run waits for agents on other machines",
    ]
    nodes = ledger(plan)
    assert nodes.assign_nodes(plan.groups["a"], 0) == "9 CPUs (at most 8 on a node)"
    assert {nodes.assign_nodes(plan.groups["c"], index) for index in range(9)} == {None}, "shared"
    nodes.offer("n1", replace(EIGHT, cpus=9), {})
    assert nodes.assign_nodes(plan.groups["a"], 0) is None
    assert [share.node for share in nodes.shares("a", 0)] == ["n1"]
    assert nodes.assign_nodes(plan.groups["c"], 0) is None
    assert [share.node for share in nodes.shares("c", 0)] == ["local"], "it keeps its place"
    more = grown(c={"resources": {"cpu_threads": 9}}).groups["c"]
    assert nodes.assign_nodes(more, 0) is None
    assert [share.node for share in nodes.shares("c", 0)] == ["n1"], "its own has too few by now"


# ---------------------------------------------------------------- the ledger


def held(resources: Resources, group: str, index: int) -> tuple[str, ...]:
    """The GPUs of a replica."""
    return tuple(gpu for share in resources.shares(group, index) for gpu in share.gpus)


def test_gpus_are_kept_over_restarts_and_given_back() -> None:
    plan = config(a=gpus(3, replicas=2), b=gpus(3))
    resources = ledger(plan)
    a, b = plan.groups["a"], plan.groups["b"]
    assert resources.assign_nodes(a, 0) is None
    assert resources.assign_nodes(a, 1) is None
    assert resources.assign_nodes(a, 0) is None
    assert (held(resources, "a", 0), held(resources, "a", 1)) == (("0", "1", "2"), ("3", "4", "5"))
    assert resources.assign_nodes(b, 0) == "3 GPUs (2 free)"
    resources.release("a", 0)
    assert resources.assign_nodes(b, 0) is None
    assert held(resources, "b", 0) == ("0", "1", "2")
    assert resources.free_on("local") == ("6", "7")


def test_a_group_that_asks_for_another_number_takes_anew() -> None:
    resources = ledger(config(a=gpus(8)))
    assert resources.assign_nodes(config(a=gpus(8)).groups["a"], 0) is None
    fewer = config(a=gpus(2)).groups["a"]
    assert resources.assign_nodes(fewer, 0) is None
    assert len(held(resources, "a", 0)) == 2


def test_the_environment_of_each_node() -> None:
    plan = config(a=gpus(2, nproc_per_node=2, nnodes=2), cpu={"resources": {"cpu_threads": 3}})
    resources = ledger(plan)
    a = plan.groups["a"]
    assert resources.assign_nodes(a, 0) is None
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert resources.environment(a, 0, 0) == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", **order}
    assert resources.environment(a, 0, 1) == {"CUDA_VISIBLE_DEVICES": "4,5,6,7", **order}
    nothing = resources.environment(plan.groups["cpu"], 0)
    assert nothing == {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3", **order}


def test_a_run_without_gpus_leaves_the_environment_alone() -> None:
    plan = config(a={})
    assert ledger(plan).environment(plan.groups["a"], 0) == {}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=30))
def test_no_gpu_has_two_owners(steps: list[tuple[str, int, bool]]) -> None:
    plan = config(a=gpus(1), b=gpus(3), c=gpus(0))
    resources = ledger(plan)
    for name, index, takes in steps:
        if takes:
            resources.assign_nodes(plan.groups[name], index)
        else:
            resources.release(name, index)
        given = [gpu for group in "abc" for replica in range(3) for gpu in held(resources, group, replica)]
        assert sorted([*given, *resources.free_on("local")]) == sorted(EIGHT.gpus)


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ()), ("0, 2", ("0", "2")), ("GPU-1a,MIG-2b", ("GPU-1a", "MIG-2b")), ("1,-1,0", ("1",)), ("NoDevFiles", ())],
)
def test_visible_gpus(text: str, found: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == found
    assert inspect_machine(environ={"CUDA_VISIBLE_DEVICES": text}).gpus == found


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("echo 8", (8, "")),
        ("echo Driver Not Loaded; exit 1", (None, "Driver Not Loaded")),
        ("kill -9 $$", (None, "nothing; it ended with -9")),
        ("exec sleep 60", (None, "nothing within 0.01 s: the driver hangs")),
    ],
)
def test_a_driver_that_hangs_or_says_no(program: str, found: tuple[int | None, str]) -> None:
    assert nvml_count(["sh", "-c", program], 0.01 if "sleep" in program else 10.0) == found


def test_this_machine_has_something() -> None:
    assert visible_gpus({}) is None
    here = inspect_machine(gpus=False)
    assert here.cpus >= 1
    assert here.memory_nbytes > 1 << 28
    assert here.gpus == ()


def test_limits_need_controllers_that_we_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_own", lambda: tmp_path)
    controllers = tmp_path / "cgroup.controllers"
    controllers.write_text("cpu memory pids\n")
    assert inspect_machine(gpus=False).limits_refused == ""
    controllers.write_text("cpu\n")
    for uid, remedy in ((0, "start it under systemd"), (7, "start it as root, or under systemd")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert f"; {remedy} with Delegate=yes" in inspect_machine(gpus=False).limits_refused
    assert inspect_machine(gpus=False).limits_refused.startswith(
        f"{tmp_path} has no controller memory or pids; start it"
    )
    controllers.unlink()
    assert inspect_machine(gpus=False).limits_refused.startswith("No such file or directory; ")


@given(st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_the_peak_is_never_below_that_of_all_sets_of_groups_that_may_run_at_once(seed: int) -> None:
    """And it is that one, unless some of the groups wait in the shape of an N."""
    draw = random.Random(seed)
    names = [f"g{number}" for number in range(draw.randrange(1, 8))]
    keys: dict[str, dict[str, Any]] = {}
    for at, name in enumerate(names):
        before = [one for one in names[:at] if draw.random() < 0.4]
        keys[name] = {"depends_on": [f"{one}:{draw.choice(('ready', 'finished'))}" for one in before]}
    plan = config(**keys)
    weights = {name: draw.randrange(4) for name in names}
    over: dict[str, set[str]] = {}  # groups that have finished when one starts
    for name in names:
        over[name] = set()
        for one in plan.groups[name].depends_on:
            over[name] |= over[one.group] | ({one.group} if one.condition == "finished" else set())
    best = max(
        sum(weights[name] for name in some)
        for size in range(len(names) + 1)
        for some in itertools.combinations(names, size)
        if all(one not in over[other] for one in some for other in some)
    )
    total, chosen = _peak(plan, weights)
    assert total == sum(weights[name] for name in chosen) >= best
    weighty = [name for name in names if weights[name]]
    shaped_as_an_n = any(
        {(one, other) for one in four for other in four if one in over[other]} == {(a, c), (b, c), (b, d)}
        for four in itertools.combinations(weighty, 4)
        for a, b, c, d in itertools.permutations(four)
    )
    if not shaped_as_an_n:
        assert total == best
        assert all(one not in over[other] for one in chosen for other in chosen)


def test_many_groups_that_wait_for_each_other_are_looked_through_at_once() -> None:
    """Trying all sets of these would take longer than anybody lives."""
    keys: dict[str, dict[str, Any]] = {}
    for number in range(120):
        keys[f"a{number}"] = gpus(1)
        keys[f"b{number}"] = gpus(2, depends_on=[f"a{number}:finished"])
    began = time.process_time()
    assert _peak(config(**keys), {name: len(name) for name in keys})[0] == sum(
        len(f"b{number}") for number in range(120)
    )
    assert time.process_time() - began < 10

"""What of a plan would wait, on nodes as the status of a run names them.

Covers: supervisor/fleet/placement_preview.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from replicas.config.file import parse
from replicas.config.structs import Config
from replicas.status import NodeStatus
from replicas.supervisor.fleet.placement_preview import predict_placement


def config(*, listen: str = "10.0.0.5:9477", labels: dict[str, str] | None = None, **groups: dict[str, Any]) -> Config:
    named = {name: {"command": ["-m", "x"], **keys} for name, keys in groups.items()}
    mapping = {"schema_version": 1, "run": {"name": "x"}, "control": {"listen": listen}, "groups": named}
    return parse({**mapping, "cluster": {"labels": labels or {}}}, base=Path("/"))


def node(name: str, gpus: int = 0, **more: Any) -> NodeStatus:
    return NodeStatus(name=name, gpus=gpus, **{"state": "up", "cpus": 8, "memory_nbytes": 8 << 30, **more})


def waiting(plan: Config, nodes: list[NodeStatus]) -> dict[str, str]:
    return predict_placement(plan, nodes)[1]


def gpus(count: int, **keys: Any) -> dict[str, Any]:
    return {"resources": {"gpus": count}, **keys}


HEAD = node("head", 2, local=True, labels={"pool": "old"})


def test_what_fits_waits_for_nothing() -> None:
    plan = config(a=gpus(1, replicas=4), b={"replicas": 9})
    assert waiting(plan, [HEAD, node("gpu2", 2, gpus_free=0, replicas=("a/0",))]) == {}, "as if they were empty"


def test_what_is_missing_is_said_of_each_replica() -> None:
    plan = config(
        a=gpus(1, replicas=4), b={"placement": {"labels": {"pool": "x"}}}, c={"resources": {"cpu_threads": 9}}
    )
    assert waiting(plan, [node("gpu2", 1), HEAD]) == {
        "a/3": "1 GPU (0 free on head, 0 free on gpu2)",
        "b/0": "a node with pool=x",
        "c/0": "9 CPUs (at most 8 on a node)",
    }
    assert waiting(config(a={}), []) == {"a/0": "a node: no agent has joined"}


def test_nodes_that_are_not_up_take_nothing_and_lost_ones_are_not_named() -> None:
    nodes = [node("n1", 4, state="draining"), node("n2", 4, state="away"), node("n3", 4, state="lost"), node("n4", 1)]
    assert waiting(config(a=gpus(2)), nodes) == {"a/0": "2 GPUs (1 free on n4)"}
    assert waiting(config(a=gpus(2)), nodes[:2]) == {"a/0": "a node that is not being drained"}
    assert waiting(config(a=gpus(2)), nodes[2:3]) == {"a/0": "a node: no agent has joined"}


def test_groups_are_placed_as_they_start() -> None:
    """Earlier levels go first, and what has finished leaves its GPUs."""
    first, then = gpus(2), gpus(2, depends_on=["c:finished"])
    last = gpus(2, depends_on=["d:finished"])
    plan = config(b=then, d={"depends_on": ["b"]}, c=first, e=last)
    assert waiting(plan, [HEAD]) == {"e/0": "2 GPUs (0 free)"}, "b may still run"
    assert waiting(config(a=gpus(1, depends_on=["c"]), c=first), [HEAD]) == {"a/0": "1 GPU (0 free)"}


def test_labels_of_this_machine_and_external_groups() -> None:
    """The config names the labels; others start an external group."""
    plan = config(labels={"pool": "new"}, a={"placement": {"labels": {"pool": "new"}}}, b=gpus(9))
    others = replace(plan, groups={**plan.groups, "b": replace(plan.groups["b"], launcher="external")})
    assert waiting(plan, [HEAD]) == {"b/0": "9 GPUs (2 free)"}
    assert waiting(others, [HEAD]) == {}


def test_cpus_of_one_machine_are_shared() -> None:
    plan = config(listen="127.0.0.1:0", a={"nproc_per_node": 8, "resources": {"cpu_threads": 8}})
    assert waiting(plan, [HEAD]) == {}
    assert waiting(plan, [node("n1")]) == {"a/0": "64 CPUs (at most 8 on a node)"}

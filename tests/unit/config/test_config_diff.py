"""What a reload does, from two configs.

Covers: config/diff.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicas.config.diff import ConfigDiff, diff
from replicas.config.file import parse
from replicas.config.structs import Config

BASE = Path("/")


def config(groups: dict[str, dict[str, Any]] | None = None, **tables: Any) -> Config:
    wanted = {"a": {}, "b": {}} if groups is None else groups
    mapping = {
        "schema_version": 1,
        "run": {"name": "x"},
        "groups": {name: {"command": ["-m", "x"], **keys} for name, keys in wanted.items()},
        **tables,
    }
    return parse(mapping, base=BASE)


def test_nothing_differs() -> None:
    assert diff(config(), config()) == ConfigDiff()


def test_groups_come_go_and_are_resized() -> None:
    found = diff(config({"a": {}, "b": {}, "c": {}}), config({"b": {"replicas": 3}, "d": {}, "c": {}}))
    assert found == ConfigDiff(added=("d",), removed=("a",), resized={"b": 3})


@pytest.mark.parametrize(
    "keys",
    [
        {"command": ["-m", "y"]},
        {"nproc_per_node": 2},
        {"nnodes": 2},
        {"launcher": "exec"},
        {"env": {"A": "1"}},
        {"cwd": "/tmp"},
        {"resources": {"cpu_threads": 1}},
    ],
)
def test_what_processes_are_started_with_replaces_them(keys: dict[str, Any]) -> None:
    assert diff(config(), config({"a": keys, "b": {}})) == ConfigDiff(restarted=("a",))
    both = {**keys, "replicas": 2, "stop_timeout": 1}
    assert diff(config(), config({"a": both, "b": {}})) == ConfigDiff(restarted=("a",), resized={"a": 2})


@pytest.mark.parametrize(
    "keys",
    [
        {"restart": {"max_restarts": 1}},
        {"health": {"start_timeout": 1}},
        {"depends_on": ["b"]},
        {"drain_timeout": 1},
        {"stop_timeout": 1},
        {"max_unavailable": 2},
    ],
)
def test_policies_apply_without_a_restart(keys: dict[str, Any]) -> None:
    assert diff(config(), config({"a": keys, "b": {}})) == ConfigDiff(adjusted=("a",))


def test_an_environment_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "x.env"
    file.write_text("A=1\n")
    before = config({"a": {"env_file": str(file)}})
    assert diff(before, config({"a": {"env": {"A": "1"}}})) == ConfigDiff()
    file.write_text("A=2\n")
    assert diff(before, config({"a": {"env_file": str(file)}})) == ConfigDiff(restarted=("a",))


def test_settings_of_the_run_apply() -> None:
    after = config(run={"name": "x", "stop_when": ["a"]}, logs={"tee": "always"})
    assert diff(config(), after) == ConfigDiff(), "nothing is refused or restarted"


def test_what_cannot_change_is_named() -> None:
    after = config(
        run={"name": "y", "state_dir": "/tmp/y", "events_max_size": "1MiB", "adopt": "2m"},
        store={"port": 1},
        control={"listen": "127.0.0.1:0"},
        cluster={"carry_port": 7100, "lease": "20s"},
        channels={"p": {"peers": ["a"]}},
    )
    end = ": end the run and start it again"
    assert diff(config(), after).refused == (
        f"run.name cannot change while the run lives (x -> y){end}",
        f"run.state_dir cannot change while the run lives (/.replicas/x -> /tmp/y){end}",
        f"run.events_max_size cannot change while the run lives (64 MiB -> 1 MiB){end}",
        f"run.adopt cannot change while the run lives (0 s -> 120 s){end}",
        f"store cannot change while the run lives{end}",
        f"control cannot change while the run lives{end}",
        f"cluster.lease cannot change while the run lives (10 s -> 20 s){end}",
        f"cluster.carry_port cannot change while the run lives (0 -> 7100){end}",
        f"channels cannot change while the run lives{end}",
    )


def test_limits_begin_with_the_run() -> None:
    limited = config({"a": {}, "b": {"resources": {"max_processes": 9}}})
    assert diff(config(), limited).refused == (
        "groups.b.resources: limits need control groups that are made at the start: end the run and start it again",
    )
    assert not diff(limited, config()).refused
    assert not diff(limited, config({"a": {"resources": {"memory": "1GiB"}}, "b": {}})).refused


def test_gpus_are_given_out_from_the_start_on() -> None:
    with_gpus = config({"a": {}, "b": {"resources": {"gpus": 1}}})
    assert diff(config(), with_gpus).refused == (
        "groups.b.resources.gpus: GPUs can be assigned only at the start of the run, as its processes may use all of them: "
        "end the run and start it again",
    )
    more = config({"a": {"resources": {"gpus": 2}}, "b": {"resources": {"gpus": 1}}})
    assert diff(with_gpus, more) == ConfigDiff(restarted=("a",))
    assert diff(with_gpus, config()) == ConfigDiff(restarted=("b",))


def test_every_field_is_accounted_for() -> None:
    """A new field of a group is a policy until somebody decides otherwise; one of the
    run must be decided on."""
    known = {"schema_version", "run", "store", "control", "logs", "cluster", "slurm", "groups", "channels", "source"}
    assert set(Config.__struct_fields__) == known
    assert set(config().run.__struct_fields__) == {"name", "stop_when", "state_dir", "events_max_nbytes", "adopt_s"}


def external(launcher: str = "external", **keys: Any) -> Config:
    others = {"launcher": launcher, **({} if launcher == "external" else {"command": ["-m", "x"]}), **keys}
    groups = {"a": {"command": ["-m", "x"]}, "others": others}
    mapping = {"schema_version": 1, "run": {"name": "x"}, "groups": groups}
    return parse(mapping | {"channels": {"policy": {"sources": ["a"], "targets": ["others"]}}}, base=BASE)


def test_nothing_restarts_what_others_start() -> None:
    found = diff(external(), external(nproc_per_node=2, replicas=3, drain_timeout="1s"))
    assert found == ConfigDiff(adjusted=("others",), resized={"others": 3})


def test_who_starts_a_group_cannot_change() -> None:
    for before, after in (("external", "exec"), ("torchrun", "external")):
        (refused,) = diff(external(before), external(after)).refused
        assert refused.startswith(
            'groups.others.launcher: a change from or to "external" is impossible while the run lives'
        )

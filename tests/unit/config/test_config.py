"""The strict TOML config: its defaults, its exact complaints, and that it finds all of
them at once.

Covers: config/file.py, config/channel_checks.py, config/structs.py, config/job.py,
config/tables.py, config/dependency.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.config.dependency import Dependency
from replicas.config.file import channels_from, load, parse
from replicas.config.structs import (
    ChannelConfig,
    ChannelRole,
    ControlConfig,
    LogsConfig,
    ResourcesConfig,
    RestartConfig,
)
from replicas.coordinator import Coordinator, GroupShape
from replicas.errors import BadConfig, UsageError

CONTRACT = """
schema_version = 1
[run]
name = "grpo"
stop_when = ["trainer"]
[store]
bind = "127.0.0.1"
port = 0
[control]
listen = "127.0.0.1:9477"
[groups.trainer]
replicas = 1
nproc_per_node = 2
command = ["train.py", "--steps", "200"]
[groups.rollout]
replicas = 2
nproc_per_node = 1
command = ["rollout.py"]
launcher = "torchrun"
depends_on = []
restart = { policy = "on-failure", max_restarts = 5, window = "10m", initial_delay = "1s", max_delay = "60s" }
health = { start_timeout = "5m", heartbeat_timeout = "30s", progress_timeout = "15m", load_deadline = "5m" }
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
backend = "auto"
transport = "auto"
deadline = "60s"
on_lost = "drop"
slots = 2
min_targets = 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for program in ("train.py", "rollout.py"):
        (tmp_path / program).touch()
    return tmp_path


POLICY: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"]}
STEERED: dict[str, Any] = {**POLICY, "follow": "promoted", "slots": 3}


def a_config(**changes: Any) -> dict[str, Any]:
    """A good mapping with some tables replaced."""
    return {
        "schema_version": 1,
        "run": {"name": "grpo"},
        "groups": {"trainer": {"command": ["train.py"]}, "rollout": {"command": ["rollout.py"]}},
        **changes,
    }


def problems(mapping: Any, folder: Path) -> tuple[str, ...]:
    with pytest.raises(BadConfig) as caught:
        parse(mapping, base=folder)
    return caught.value.problems


def group_problems(folder: Path, **keys: Any) -> tuple[str, ...]:
    return problems(a_config(groups={"trainer": {"command": ["train.py"], **keys}}), folder)


def channel_problems(folder: Path, **keys: Any) -> tuple[str, ...]:
    return problems(a_config(channels={"policy": keys}), folder)


def test_the_contracts_example_is_read_and_equals_the_defaults(folder: Path) -> None:
    path = folder / "grpo.toml"
    path.write_text(CONTRACT)
    config = load(path)
    assert config.source == path
    assert config.run.state_dir == folder / ".replicas" / "grpo"
    assert config.run.stop_when == ("trainer",)
    assert config.control == ControlConfig(host="127.0.0.1", port=9477)
    rollout = config.groups["rollout"]
    assert (rollout.replicas, rollout.world_size, rollout.cwd) == (2, 1, folder)
    assert rollout.restart == RestartConfig()
    assert config.groups["trainer"].health == rollout.health
    policy = config.channels["policy"]
    assert policy.sources == (ChannelRole("trainer", "leader"),)
    assert policy.targets == (ChannelRole("rollout", "all"),)
    assert {"policy": policy} == channels_from({"policy": {"sources": ["trainer"], "targets": ["rollout"]}}, {})
    assert {"policy": policy} == channels_from({"policy": policy}, {"rollout": 1})


def test_every_problem_is_reported_at_once_in_the_order_of_the_file(folder: Path) -> None:
    path = folder / "bad.toml"
    path.write_text(
        """
schema_version = 1
[run]
name = "grpo"
stop_when = ["trainr"]
[groups.trainer]
replica = 1
nproc_per_node = "2"
command = ["trian.py"]
[groups.rollout]
command = ["rollout.py"]
launcher = "exce"
[chanels.policy]
"""
    )
    with pytest.raises(BadConfig) as caught:
        load(path)
    assert str(caught.value) == "\n".join(
        [
            f"{path}: 6 problems",
            '  line 5: run.stop_when: there is no group "trainr"; did you mean "trainer"?',
            '  line 7: groups.trainer.replica: unknown key; did you mean "replicas"?',
            '  line 8: groups.trainer.nproc_per_node: expected a whole number of at least 1, got "2"',
            f'  line 9: groups.trainer.command: "trian.py" does not exist in {folder}',
            '  line 12: groups.rollout.launcher: expected "torchrun", "exec" or "external", got "exce"; did you mean "exec"?',
            '  line 13: chanels: unknown key; did you mean "channels"?',
        ]
    )


def test_an_unknown_key_near_to_none_lists_the_known_ones(folder: Path) -> None:
    assert problems(a_config(store={"tls": True}), folder) == ('store.tls: unknown key; known: "bind", "port"',)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"replicas": 0}, "groups.trainer.replicas: expected a whole number of at least 1, got 0"),
        ({"replicas": True}, "groups.trainer.replicas: expected a whole number of at least 1, got true"),
        ({"replicas": 1.0}, "groups.trainer.replicas: expected a whole number of at least 1, got 1.0"),
        ({"command": []}, "groups.trainer.command: is empty; name a program"),
        ({"command": ["-m"]}, 'groups.trainer.command: the name of a module must follow "-m"'),
        (
            {"command": "train.py"},
            'groups.trainer.command: expected a list of strings such as ["train.py", "--steps", "200"], got "train.py"',
        ),
        ({"env": {"A": 1}}, "groups.trainer.env.A: expected a string; put its value in quotes"),
        ({"env": "A=1"}, 'groups.trainer.env: expected a table of strings such as { NAME = "value" }'),
        (
            {"env": {"REPLICA_ID": "1"}},
            "groups.trainer.env.REPLICA_ID: is set for each rank by the supervisor; remove it",
        ),
        ({"env": {"A=B": "1"}}, 'groups.trainer.env."A=B": is not a usable environment variable'),
        (
            {"env": {"A": "é" * (64 << 10)}},
            "groups.trainer.env.A: is longer than the 128 KiB that Linux allows; put it into a file",
        ),
        (
            {"command": ["train.py", "x" * (128 << 10)]},
            "groups.trainer.command: a word is longer than the 128 KiB that Linux allows; put it into a file",
        ),
        ({"health": []}, "groups.trainer.health: expected a table, got a list"),
        (
            {"health": {"start_timeout": "5 minutes"}},
            'groups.trainer.health.start_timeout: expected a duration such as "500ms", "30s" or "10m", got "5 minutes"',
        ),
        (
            {"health": {"start_timeout": float("inf")}},
            'groups.trainer.health.start_timeout: expected a duration such as "500ms", "30s" or "10m", got Infinity',
        ),
        ({"stop_timeout": 0}, "groups.trainer.stop_timeout: expected a duration above 0, got 0"),
        ({"restart": {"max_delay": -1}}, "groups.trainer.restart.max_delay: expected a duration of 0 or more, got -1"),
        (
            {"restart": {"initial_delay": "2m"}},
            "groups.trainer.restart.initial_delay: 120 s is longer than max_delay, 60 s",
        ),
        (
            {"restart": {"policy": "on_failure"}},
            'groups.trainer.restart.policy: expected "always", "on-failure" or "never", got "on_failure"; '
            'did you mean "on-failure"?',
        ),
        (
            {"launcher": "exec", "nnodes": 2},
            'groups.trainer.nnodes: launcher = "exec" starts one program for each replica; leave nnodes at 1',
        ),
        ({"depends_on": ["rolout"]}, 'groups.trainer.depends_on: there is no group "rolout"; known: "trainer"'),
        (
            {"depends_on": ["trainer"]},
            "groups.trainer.depends_on: groups wait for each other in a circle: trainer -> trainer",
        ),
        (
            {"depends_on": ["trainer:redy"]},
            'groups.trainer.depends_on: expected "trainer:ready" or "trainer:finished", got "trainer:redy"',
        ),
        (
            {"resources": {"memory": "8 gigs"}},
            'groups.trainer.resources.memory: expected a size such as "64MiB" or "8GiB", got "8 gigs"',
        ),
        (
            {"resources": {"memory": "1kB"}},
            'groups.trainer.resources.memory: expected a size of at least 1048576 bytes, got "1kB"',
        ),
        ({"nproc": 2}, 'groups.trainer.nproc: unknown key; did you mean "nproc_per_node"?'),
        ({"resources": {"gpu": 1}}, 'groups.trainer.resources.gpu: unknown key; did you mean "gpus"?'),
        ({"resources": {"gpus": -1}}, "groups.trainer.resources.gpus: expected a whole number of at least 0, got -1"),
        (
            {"resources": {"gpus": 1}, "env": {"CUDA_VISIBLE_DEVICES": "3"}},
            "groups.trainer.resources.gpus: sets CUDA_VISIBLE_DEVICES, which env (or env_file) sets too; "
            "remove one of them",
        ),
        (
            {"resources": {"cpu_threads": 2}, "env": {"OMP_NUM_THREADS": "3"}},
            "groups.trainer.resources.cpu_threads: sets OMP_NUM_THREADS, which env (or env_file) sets too; "
            "remove one of them",
        ),
        (
            {"health": {"heartbeat_timeout": "1s"}},
            'groups.trainer.health.heartbeat_timeout: expected a duration of at least 2 seconds, got "1s"',
        ),
        ({"max_unavailable": 0}, "groups.trainer.max_unavailable: expected a whole number of at least 1, got 0"),
        ({"min_ready": 3}, "groups.trainer.min_ready: 3 is more than the 1 replicas of the group"),
        ({"on_failure": "none"}, 'groups.trainer.on_failure: expected "run", "group" or "replica", got "none"'),
        ({"restart": {"strategy": "all"}}, 'groups.trainer.restart.strategy: expected "replica" or "group", got "all"'),
    ],
)
def test_a_bad_group(folder: Path, keys: dict[str, Any], problem: str) -> None:
    assert group_problems(folder, **keys) == (problem,)


def test_a_command_that_does_not_exist(folder: Path) -> None:
    where = "groups.trainer.command:"
    assert group_problems(folder, command=["gone.py"]) == (f'{where} "gone.py" does not exist in {folder}',)
    assert group_problems(folder, command=["/gone/x.py"]) == (f'{where} "/gone/x.py" does not exist',)
    assert group_problems(folder, command=["./gone"], launcher="exec") == (
        f'{where} "./gone" does not exist in {folder}',
    )
    assert group_problems(folder, command=["no-such-program"], launcher="exec") == (
        f'{where} "no-such-program" is not on PATH; install it, or give its path',
    )
    assert group_problems(folder, command=["train.py --steps 3", "-v"]) == (
        f'{where} "train.py --steps 3" does not exist; write each argument as a separate word: '
        'command = ["train.py", "--steps", "3", "-v"]',
    )
    (folder / "data").touch(mode=0o644)
    assert group_problems(folder, command=["./data"]) == (f'{where} "./data" is not executable; run chmod +x on it',)


def test_a_working_folder_that_does_not_exist_is_the_only_complaint(folder: Path) -> None:
    assert group_problems(folder, cwd="nowhere") == (f'groups.trainer.cwd: folder "{folder}/nowhere" does not exist',)


def test_a_command_is_looked_up_in_the_groups_own_folder_and_path(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "serve").touch(mode=0o755)
    groups = {
        "a": {"command": ["serve"], "launcher": "exec", "env": {"PATH": str(folder / "sub")}},
        "b": {"command": ["./serve"], "launcher": "exec", "cwd": "sub"},
        "c": {"command": ["-m", "some.module"]},
    }
    config = parse(a_config(groups=groups), base=folder)
    assert config.groups["b"].cwd == folder / "sub"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"targets": ["rollout"]}, "channels.policy: has no members: name its sources (and targets), or its peers"),
        ({"sources": "trainer"}, 'channels.policy.sources: expected a list of group names, got "trainer"'),
        ({"sources": ["trainr"]}, 'channels.policy.sources: there is no group "trainr"; did you mean "trainer"?'),
        ({"peers": ["trainer", "trainer"]}, 'channels.policy.peers: group "trainer" is listed twice'),
        (
            {"sources": ["trainer"], "peers": ["trainer"]},
            'channels.policy.peers: group "trainer" cannot be a peer and a source or target; give it another channel',
        ),
        (
            {"sources": ["trainer"], "peers": ["rollout"]},
            "channels.policy.peers: a channel has either peers or sources and targets; make two channels of it",
        ),
        (
            {"peers": [{"group": "trainer", "ranks": "all"}, "rollout"]},
            "channels.policy.peers: all peers of a channel must have the same ranks",
        ),
        (
            {"sources": ["trainer"], "targets": ["rollout"], "slots": 1},
            "channels.policy.slots: 1 is too few: the newest version stays in one while the next is received into another; "
            "use at least 2",
        ),
        (
            {"sources": [{"group": "trainer", "ranks": "each"}]},
            'channels.policy.sources: ranks of group "trainer": expected "leader" or "all", got "each"',
        ),
        (
            {"sources": [{"group": "trainer", "rank": "all"}]},
            'channels.policy.sources.rank: unknown key; did you mean "ranks"?',
        ),
        (
            {"sources": ["trainer"], "ranks": "all"},
            'channels.policy.ranks: is for channels with peers; write sources = [{ group = "...", ranks = "all" }]',
        ),
        ({"peers": ["trainer"], "slots": 0}, "channels.policy.slots: expected a whole number of at least 1, got 0"),
        (
            {"peers": ["trainer"], "backend": "mpi"},
            'channels.policy.backend: expected "auto", "gloo" or "nccl", got "mpi"',
        ),
        (
            {"sources": ["trainer"], "targets": ["rollout"], "min_targets": 2},
            "channels.policy.min_targets: 2 is more than the 1 replicas of the target groups",
        ),
        ({**POLICY, "encrypt": 1}, "channels.policy.encrypt: expected true or false, got 1"),
        ({**POLICY, "adopt_together": 1}, "channels.policy.adopt_together: expected true or false, got 1"),
        (
            {"peers": ["trainer", "rollout"], "adopt_together": True},
            "channels.policy.adopt_together: is for targets, which load versions, and peers run collectives; remove it",
        ),
        (
            {**POLICY, "encrypt": True, "transport": "group"},
            'channels.policy.encrypt: transport = "group" uses process groups, which torch does not encrypt; '
            "remove one of the two",
        ),
        (
            {"peers": ["trainer", "rollout"], "encrypt": True},
            "channels.policy.encrypt: collectives of peers use process groups, which torch does not encrypt; remove it",
        ),
        (
            {**POLICY, "encrypt": True, "transport": "tcp", "staging": "device"},
            "channels.policy.encrypt: is for slots in host memory, and these are on GPUs; "
            'set staging = "host", or remove it',
        ),
        (
            {"peers": ["trainer", "rollout"], "follow": "promoted", "slots": 3},
            "channels.policy.follow: is for targets, which load versions, and peers run collectives; remove it",
        ),
        (
            {**POLICY, "follow": "promoted"},
            'channels.policy.slots: 2 is too few with follow = "promoted": the version that is served, the candidate '
            "and the next one need a slot each; use at least 3, and one more for each version to keep",
        ),
        (
            {**POLICY, "canary": {"group": "rollout"}},
            'channels.policy.canary: is for channels with follow = "promoted"; set it, or remove the canary',
        ),
        (
            {**STEERED, "adopt_together": True, "canary": {"group": "rollout"}},
            "channels.policy.canary: lets a few replicas load a version before the others, and adopt_together none; "
            "remove one",
        ),
        (
            {**STEERED, "canary": {"group": "trainer"}},
            'channels.policy.canary.group: "trainer" is no target of the channel',
        ),
        (
            {**STEERED, "canary": {"group": "rollout", "replicas": 2}},
            "channels.policy.canary.replicas: 2 is more than the 1 replicas of rollout",
        ),
        (
            {**STEERED, "canary": {"group": "rollout", "promote": "scored", "metric": "reward"}},
            'channels.policy.canary.promote: "scored" needs the key metric, and min or not_below_current_by',
        ),
        (
            {**STEERED, "canary": {"group": "rollout", "min": 0.5}},
            'channels.policy.canary.promote: metric, min and not_below_current_by are for promote = "scored"',
        ),
        *(
            (
                {**STEERED, "canary": {"group": "rollout", "share": share}},
                f'channels.policy.canary.share: expected a share above 0 % and below 100 %, such as "10%" or 0.1, '
                f"got {shown}",
            )
            for share, shown in [
                ("0%", '"0%"'),
                ("100%", '"100%"'),
                ("10", '"10"'),
                (1, "1"),
                (True, "true"),
                (1.0, "1.0"),
                (float("nan"), "NaN"),
                ("10s", '"10s"'),
            ]
        ),
    ],
)
def test_a_bad_channel(folder: Path, keys: dict[str, Any], problem: str) -> None:
    assert channel_problems(folder, **keys) == (problem,)


@pytest.mark.parametrize(("share", "found"), [("10%", 0.1), ("0.5%", 0.005), (" 25 % ", 0.25), (0.1, 0.1)])
def test_the_share_of_a_canary(folder: Path, share: str | float, found: float) -> None:
    keys = {**STEERED, "canary": {"group": "rollout", "share": share}}
    canary = parse(a_config(channels={"policy": keys}), base=folder).channels["policy"].canary
    assert canary is not None
    assert canary.share == pytest.approx(found)


@pytest.mark.parametrize("transport", [{}, {"transport": "tcp"}])
def test_a_channel_may_be_encrypted_through_fixed_ports(folder: Path, transport: dict[str, str]) -> None:
    channels = {"policy": {**POLICY, **transport, "encrypt": True}}
    config = parse(a_config(channels=channels, cluster={"carry_port": 7100}), base=folder)
    assert config.channels["policy"].encrypt
    assert config.cluster.carry_port == 7100


@pytest.mark.parametrize("share", [{}, {"resources": {"gpus": 0}}])
def test_slots_on_gpus_that_a_group_does_not_see(folder: Path, share: dict[str, Any]) -> None:
    groups = {
        "trainer": {"command": ["train.py"], "resources": {"gpus": 1}},
        "rollout": {"command": ["rollout.py"], **share},
    }
    channel = {"sources": ["trainer"], "targets": ["rollout"], "staging": "device"}
    assert problems(a_config(groups=groups, channels={"policy": channel}), folder) == (
        'channels.policy.staging: slots on GPUs, but group "rollout" sees none; set its resources.gpus, '
        'or staging = "host"',
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"schema_version": 2}, "schema_version: expected 1, the only version that this release reads, got 2"),
        ({"schema_version": True}, "schema_version: expected 1, the only version that this release reads, got true"),
        (
            {"run": {"name": "a/b"}},
            "run.name: expected a name of at most 63 letters, digits, '-', '_' and '.', got \"a/b\"",
        ),
        ({"run": {}}, "run.name: missing; this key is required"),
        ({"groups": {}}, "groups: is empty; define at least one group"),
        (
            {"groups": {"a b": {}}},
            "groups.\"a b\": expected a name of at most 63 letters, digits, '-', '_' and '.', got \"a b\"",
        ),
        (
            {"store": {"bind": "a b"}},
            'store.bind: expected an IP address such as "127.0.0.1", or a host name, got "a b"',
        ),
        ({"store": {"port": 65536}}, "store.port: expected a port from 0 to 65535, got 65536"),
        (
            {"control": {"listen": "127.0.0.1"}},
            'control.listen: expected "host:port" such as "127.0.0.1:9477" (port 0 to 65535), got "127.0.0.1"',
        ),
        (
            {"control": {"listen": "[127.0.0.1]:1"}},
            'control.listen: expected "host:port" such as "127.0.0.1:9477" (port 0 to 65535), got "[127.0.0.1]:1"',
        ),
        ({"store": {"port": 9477}}, "store.port: 9477 is the port of control.listen, too; use 0 or another port"),
        (
            {"cluster": {"carry_port": 9477}},
            "cluster.carry_port: 9477 is the port of control.listen, too; use 0 or another port",
        ),
        (
            {"store": {"port": 7100}, "cluster": {"carry_port": 7100}},
            "cluster.carry_port: 7100 is the port of store, too; use 0 or another port",
        ),
        ({"cluster": {"carry_port": 65_536}}, "cluster.carry_port: expected a port from 0 to 65535, got 65536"),
        (
            {
                "run": {"name": "x", "stop_when": ["a"]},
                "groups": {"a": {"command": ["train.py"], "restart": {"policy": "always"}}},
            },
            'run.stop_when: group "a" has restart policy "always", so it never finishes',
        ),
        (
            {
                "groups": {
                    "a": {"command": ["train.py"], "restart": {"policy": "always"}},
                    "b": {"command": ["train.py"], "depends_on": ["a:finished"]},
                }
            },
            'groups.b.depends_on: group "a" has restart policy "always", so it never finishes',
        ),
        (
            {
                "groups": {
                    "a": {"command": ["train.py"], "resources": {"gpus": 1}},
                    "b": {"command": ["train.py"], "env": {"CUDA_VISIBLE_DEVICES": "0"}},
                }
            },
            'groups.b.env: sets CUDA_VISIBLE_DEVICES while group "a" asks for resources.gpus; let both ask, '
            "so that no GPU is assigned twice",
        ),
        (
            {"control": {"socket": "/" + "x" * 107}},
            f"control.socket: /{'x' * 107} is longer than the 107 bytes of a socket's path",
        ),
        ({"logs": {"tee": True}}, 'logs.tee: expected "auto", "always" or "never", got true'),
        ({"logs": {"max_size": 100}}, "logs.max_size: expected a size of at least 4096 bytes, got 100"),
        (
            {"run": {"name": "x", "events_max_size": "1 MB/s"}},
            'run.events_max_size: expected a size such as "64MiB" or "8GiB", got "1 MB/s"',
        ),
    ],
)
def test_a_bad_table(folder: Path, changes: dict[str, Any], problem: str) -> None:
    assert problem in problems(a_config(**changes), folder)


def test_schema_version_is_required(folder: Path) -> None:
    mapping = a_config()
    del mapping["schema_version"]
    assert problems(mapping, folder) == ("schema_version: missing; begin the file with schema_version = 1",)


def test_what_a_failure_ends_by_default_and_when_it_is_said(folder: Path) -> None:
    """Trouble of a group that only receives is its own; of all others it is the
    run's."""
    groups: dict[str, Any] = {}
    groups |= {name: {"command": ["train.py"]} for name in ("source", "target", "both", "peer", "alone")}
    groups["said"] = {"command": ["train.py"], "on_failure": "group", "min_ready": 0}
    channels = {
        "a": {"sources": ["source"], "targets": ["target", "both", "said"]},
        "b": {"sources": ["both"], "targets": ["target"]},
        "c": {"peers": ["peer"]},
    }
    config = parse(a_config(groups=groups, channels=channels), base=folder)
    assert {name: group.on_failure for name, group in config.groups.items()} == {
        "source": "run", "target": "replica", "both": "run", "peer": "run", "alone": "run", "said": "group",
    }  # fmt: skip
    assert [config.groups[name].min_ready for name in ("target", "said")] == [None, 0]


def test_groups_that_wait_for_each_other(folder: Path) -> None:
    groups = {
        "a": {"command": ["train.py"], "depends_on": ["b"]},
        "b": {"command": ["train.py"], "depends_on": ["c"]},
        "c": {"command": ["train.py"], "depends_on": ["a"]},
    }
    assert problems(a_config(groups=groups), folder) == (
        "groups.c.depends_on: groups wait for each other in a circle: a -> b -> c -> a",
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("1s", 1.0), ("1.5m", 90.0), ("2 h", 7200.0), ("1d", 86400.0), (3, 3.0), (0.25, 0.25)],
)
def test_durations(folder: Path, text: object, seconds: float) -> None:
    config = parse(a_config(groups={"a": {"command": ["train.py"], "stop_timeout": text}}), base=folder)
    assert config.groups["a"].stop_timeout_s == seconds


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("1.5 MiB", 3 << 19), ("10MB", 10**7), ("2000kB", 2 * 10**6), (1 << 20, 1 << 20)],
)
def test_sizes(folder: Path, text: object, nbytes: int) -> None:
    config = parse(a_config(groups={"a": {"command": ["train.py"], "resources": {"memory": text}}}), base=folder)
    assert config.groups["a"].resources.memory_nbytes == nbytes


def test_what_operators_set(folder: Path) -> None:
    (folder / "x.env").write_text("A=from the file\nB=2\n")
    group = {
        "command": ["train.py"],
        "depends_on": ["trainer", "other:finished"],
        "env": {"A": "from the config"},
        "env_file": "x.env",
        "drain_timeout": 0,
        "max_unavailable": 2,
        "restart": {"strategy": "group", "no_progress_cycles": 0},
        "resources": {"gpus": 2, "cpu_threads": 4, "max_processes": 512},
    }
    mapping = a_config(
        groups={"trainer": {"command": ["train.py"]}, "other": {"command": ["train.py"]}, "a": group},
        logs={"max_size": "1MiB", "keep": 0, "tee": "always"},
        control={"socket": "c.sock"},
        run={"name": "x", "events_max_size": "2MiB"},
    )
    config = parse(mapping, base=folder)
    found = config.groups["a"]
    assert found.depends_on == (Dependency("trainer", "ready"), Dependency("other", "finished"))
    assert [str(one) for one in found.depends_on] == ["trainer", "other:finished"]
    assert (found.env, found.env_file) == ({"A": "from the config", "B": "2"}, folder / "x.env")
    assert (found.drain_timeout_s, found.max_unavailable) == (0.0, 2)
    assert (found.restart.strategy, found.restart.no_progress_cycles) == ("group", 0)
    assert found.resources == ResourcesConfig(gpus=2, cpu_threads=4, max_processes=512)
    assert config.logs == LogsConfig(max_nbytes=1 << 20, keep=0, tee="always")
    assert config.control == ControlConfig(socket=folder / "c.sock")
    assert config.run.events_max_nbytes == 2 << 20


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"A=\xff", "is not UTF-8 text: invalid start byte at byte 2"),
        (b"A=1\nsecret", ", line 2: expected NAME=value"),
        (b"REPLICAS_RUN=1", ": REPLICAS_RUN is set for each rank by the supervisor; remove it"),
    ],
)
def test_a_bad_environment_file(folder: Path, content: bytes | None, problem: str) -> None:
    if content is not None:
        (folder / "x.env").write_bytes(content)
    (found,) = group_problems(folder, env_file="x.env")
    assert found.startswith(f'groups.trainer.env_file: "{folder}/x.env"')
    assert found.endswith(problem)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("192.0.2.1:0", "192.0.2.1", 0), ("[::1]:80", "::1", 80), ("head-1.cluster:9477", "head-1.cluster", 9477)],
)
def test_listen(folder: Path, text: str, host: str, port: int) -> None:
    assert parse(a_config(control={"listen": text}), base=folder).control == ControlConfig(host=host, port=port)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("control", "listen", "0.0.0.0:9477"),
        ("control", "listen", "[::]:9477"),
        ("control", "listen", "0:0"),
        ("store", "bind", "0.0.0.0"),
        ("store", "bind", "::"),
    ],
)
def test_an_address_that_nobody_could_be_told(folder: Path, table: str, key: str, value: str) -> None:
    with pytest.raises(BadConfig) as caught:
        parse(a_config(**{table: {key: value}}), base=folder)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{table}.{key}: ")
    assert "means every address of this machine; other machines need a certain one: name the one by which" in problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a = [", "is not valid TOML: "),
        (b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
        (None, "the file cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadConfig) as caught:
        load(path)
    assert caught.value.source == str(path)
    assert caught.value.problems[0].startswith(problem)


def test_peers_share_the_channels_ranks() -> None:
    table = {"peers": ["a", {"group": "b"}], "ranks": "each", "deadline": 5, "staging": "device"}
    channel = channels_from({"outer": table}, {})["outer"]
    assert channel.peers == (ChannelRole("a", "each"), ChannelRole("b", "each"))
    assert channel.deadline_s == 5.0
    assert channel.staging == "device"


def test_a_channel_alone_is_checked_too() -> None:
    with pytest.raises(BadConfig) as caught:
        channels_from({"policy": {"source": ["a"]}}, {})
    assert str(caught.value) == "\n".join(
        ["channels: 1 problem", '  policy.source: unknown key; did you mean "sources"?']
    )


SOURCED = ChannelConfig(
    name="policy", sources=(ChannelRole("trainer", "leader"),), targets=(ChannelRole("rollout", "all"),)
)


@pytest.mark.parametrize(
    ("channels", "problem"),
    [
        ({"policy": {"sources": ["trainer"], "slots": 1}}, "policy.slots: 1 is too few"),
        ({"policy": msgspec.structs.replace(SOURCED, slots=1)}, "policy.slots: 1 is too few"),
        ({"policy": msgspec.structs.replace(SOURCED, slots=10**30)}, "policy.slots: expected at most 1,000,000"),
        ({"policy": msgspec.structs.replace(SOURCED, deadline_s=math.nan)}, "policy.deadline: expected a duration"),
        (
            {"policy": msgspec.structs.replace(SOURCED, deadline_s=1e10)},
            "policy.deadline: expected a duration of at most",
        ),
        (
            {"policy": msgspec.structs.replace(SOURCED, min_targets=3)},
            "policy.min_targets: 3 is more than the 2 replicas",
        ),
        ({"policy": msgspec.structs.replace(SOURCED, on_lost="cry")}, "policy.on_lost: expected"),
        ({"a/b": SOURCED}, '"a/b": expected a name'),
        ({7: SOURCED}, "7: expected a name"),
        ([], "expected a table"),
        ({"policy": None}, "policy: expected a table"),
    ],
)
def test_an_embedded_coordinators_channels_are_checked_as_a_files(channels: Any, problem: str) -> None:
    with pytest.raises(BadConfig, match=problem):
        channels_from(channels, {"rollout": 2})
    with pytest.raises(BadConfig, match=problem):
        Coordinator(channels, groups={"rollout": 2})


@pytest.mark.parametrize(
    "more",
    [
        {"groups": {"rollout": 1.5}},
        {"groups": {"a/b": 1}},
        {"groups": {"rollout": GroupShape(heartbeat_timeout_s=math.nan)}},
        {"groups": {"rollout": GroupShape(heartbeat_timeout_s=1.0)}},
        {"groups": 7},
        {"run": os.fsdecode(b"caf\xe9")},
        {"live": True},
        {"host": "0.0.0.0"},
        {"store_bind": "::"},
        {"host": "a b"},
        {"host": None},
        {"port": 65536},
        {"store_bind": "a b"},
        {"store_port": -1},
        {"token": ""},
        {"token": "geh€im"},
        {"state_dir": "a\0b"},
        {"state_dir": 7},
        {"epochs": {"policy": -1}},
        {"routes": [7]},
        {"routes": 7},
    ],
    ids=str,
)
def test_what_else_an_embedded_coordinator_cannot_use(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(more))):
        Coordinator({"policy": SOURCED}, **more)


def problems_of(mapping: Any) -> tuple[str, ...] | None:
    """What is wrong with ``mapping``; None when it is a config."""
    try:
        parse(mapping, base=Path("/"))
    except BadConfig as error:
        return error.problems
    return None


KEYS = st.sampled_from(
    [
        *(
            "schema_version",
            "run",
            "store",
            "control",
            "groups",
            "channels",
            "name",
            "stop_when",
            "listen",
            "bind",
            "port",
        ),
        *("command", "replicas", "launcher", "depends_on", "restart", "health", "env", "cwd", "window", "state_dir"),
        *(
            "logs",
            "tee",
            "max_size",
            "socket",
            "resources",
            "gpus",
            "memory",
            "env_file",
            "max_unavailable",
            "a:finished",
        ),
        *("sources", "targets", "peers", "ranks", "group", "deadline", "min_targets", "a", "b/c", "", "x" * 5000),
    ]
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4), st.dates(), KEYS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_no_input_does_anything_but_parse_or_tell_its_problems(mapping: dict[str, Any]) -> None:
    good = {"schema_version": 1, "run": {"name": "x"}, "groups": {"a": {"command": ["-m", "x"]}}}
    for candidate in (
        mapping,
        {**good, **mapping},
        {**good, "channels": {"a": mapping}},
        {**good, "groups": {"a": mapping}},
    ):
        problems_or_none = problems_of(candidate)
        assert problems_or_none is None or problems_or_none
        assert all("\n" not in problem for problem in problems_or_none or ())


def test_each_problem_is_one_line_whatever_it_quotes() -> None:
    config = {"schema_version": 1, "run": {"name": "x"}, "groups": {"a": {"command": ["\n"]}}}
    assert problems_of(config) == ('groups.a.command: "\\n" is not on PATH; install it, or give its path',)


def test_a_missing_required_key_hides_no_other_problem(tmp_path: Path) -> None:
    mapping = {
        "schema_version": 1,
        "run": {"nme": "x", "stop_when": ["trainr"]},
        "groups": {"trainer": {"replica": 2}},
        "channels": {"policy": {"sources": ["trainer"], "targets": ["rollout"]}},
    }
    with pytest.raises(BadConfig) as caught:
        parse(mapping, base=tmp_path)
    assert set(caught.value.problems) == {
        "run.name: missing; this key is required",
        'run.nme: unknown key; did you mean "name"?',
        'run.stop_when: there is no group "trainr"; did you mean "trainer"?',
        'groups.trainer.replica: unknown key; did you mean "replicas"?',
        "groups.trainer.command: missing; this key is required",
        'channels.policy.targets: there is no group "rollout"; known: "trainer"',
    }


# ---------------------------------------------------------------- external groups

SERVES = {"sources": ["trainer"], "targets": ["others"]}


def test_a_group_that_others_start_needs_a_channel_and_no_program(folder: Path) -> None:
    config = a_config(channels={"policy": SERVES})
    config["groups"]["others"] = {"launcher": "external", "replicas": 2, "health": {"heartbeat_timeout": "5s"}}
    assert parse(config, base=folder).groups["others"].external
    config["channels"] = {"policy": {"sources": ["trainer"]}}
    assert problems(config, folder) == (
        "groups.others: has no channel, and external programs are visible only on channels; remove it",
    )


def test_keys_without_an_effect_on_programs_that_others_start_are_refused(folder: Path) -> None:
    config = a_config(channels={"policy": SERVES}, run={"name": "x", "stop_when": ["others"]})
    config["groups"]["others"] = {
        "launcher": "external",
        "command": ["x.py"],
        "restart": {"policy": "never"},
        "health": {"start_timeout": "1m"},
        "stop_timeout": "1s",
        "min_ready": 1,
    }
    no_effect = 'has no effect on programs that others start (launcher = "external"); remove it'
    assert problems(config, folder) == (
        'run.stop_when: group "others" is external, so it is unknown when it has finished',
        f"groups.others.command: {no_effect}",
        f"groups.others.restart: {no_effect}",
        f"groups.others.health.start_timeout: {no_effect}",
        f"groups.others.stop_timeout: {no_effect}",
    )


def test_the_file_of_the_token_must_be_there(folder: Path) -> None:
    config = a_config(control={"token_file": "secret"})
    assert problems(config, folder) == (f'control.token_file: "{folder}/secret" does not exist',)
    (folder / "secret").write_text("x")
    assert parse(config, base=folder).control.token_file == folder / "secret"

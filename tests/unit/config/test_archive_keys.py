"""Archives in a config: the groups that they add, and what is wrong with their keys.

Covers: config/archive.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicas.config.archive import ArchiveConfig
from replicas.config.diff import diff
from replicas.config.file import channels_from, parse
from replicas.config.structs import ChannelRole, Config
from replicas.errors import BadConfig

KEY = f"ed25519:{'a1' * 32}"
POLICY: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"]}
SOURCE = {"archive": "s3://bucket/run/policy", "key": KEY}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def config(folder: Path, channel: dict[str, Any], **groups: Any) -> Config:
    known = {name: {"command": ["train.py"]} for name in ("trainer", "rollout")}
    tables = {"run": {"name": "grpo"}, "groups": {**known, **groups}, "channels": {"policy": channel}}
    return parse({"schema_version": 1, **tables}, base=folder)


def problems(folder: Path, channel: dict[str, Any], **groups: Any) -> tuple[str, ...]:
    with pytest.raises(BadConfig) as caught:
        config(folder, channel, **groups)
    return caught.value.problems


def test_an_archive_is_a_target(folder: Path) -> None:
    (folder / "secrets").write_text("AWS_SECRET_ACCESS_KEY=hunter2\n")
    keys = {"to": "s3://bucket/run", "keep": 5, "grace": "1h", "env_file": "secrets"}
    found = config(folder, {**POLICY, "archive": keys})
    assert found.channels["policy"].targets == (ChannelRole("rollout", "all"), ChannelRole("policy-archive", "all"))
    group = found.groups["policy-archive"]
    key = str(folder / ".replicas/grpo/archive.pem")
    words = ("--chain", "20", "--keep", "5", "--grace", "3600s", "--key", key)
    assert group.command == ("-m", "replicas", "archive", "policy", "s3://bucket/run", *words)
    assert (group.launcher, group.added, group.on_failure, group.min_ready) == ("exec", True, "replica", 0)
    assert (group.env, group.resources.gpus) == ({"AWS_SECRET_ACCESS_KEY": "hunter2"}, 0)
    assert not any(one.added for name, one in found.groups.items() if name != "policy-archive")


def test_a_key_and_a_state_folder_of_ones_own(folder: Path) -> None:
    found = config(folder, {**POLICY, "archive": {"to": "file:///data", "key": "keys/one.pem"}})
    assert found.groups["policy-archive"].command[-2:] == ("--key", str(folder / "keys/one.pem"))


def test_an_archive_may_be_the_only_target(folder: Path) -> None:
    found = config(folder, {"sources": ["trainer"], "archive": {"to": "file:///data"}})
    assert [one.group for one in found.channels["policy"].targets] == ["policy-archive"]


def test_an_archive_is_a_source(folder: Path) -> None:
    found = config(folder, {"sources": [SOURCE], "targets": ["rollout"]})
    assert found.channels["policy"].sources == (ChannelRole("policy-from-archive", "leader"),)
    group = found.groups["policy-from-archive"]
    assert group.command == ("-m", "replicas", "relay", SOURCE["archive"], "policy", "--archive-key", KEY)
    assert group.added


@pytest.mark.parametrize(
    ("channel", "problem"),
    [
        (
            {**POLICY, "archive": {"to": "s3://key:hunter2@bucket"}},
            'channels.policy.archive.to: expected a URL without credentials, such as "s3://bucket/run" or '
            '"file:///folder"',
        ),
        ({**POLICY, "archive": {}}, "channels.policy.archive.to: missing; this key is required"),
        (
            {**POLICY, "archive": {"to": "s3://bucket", "kept": 3}},
            'channels.policy.archive.kept: unknown key; did you mean "keep"?',
        ),
        (
            {**POLICY, "archive": {"to": "s3://bucket"}, "staging": "device", "transport": "group"},
            'channels.policy.archive: copies versions from host memory; remove it, or staging = "device"',
        ),
        (
            {**POLICY, "sources": [{**SOURCE, "key": "secret"}]},
            'channels.policy.sources.key: expected a public key, such as "ed25519:" and 64 digits, which the writer logs',
        ),
        (
            {**POLICY, "sources": [{"archive": "s3://bucket"}]},
            "channels.policy.sources.key: missing; this key is required",
        ),
        (
            {"peers": ["trainer"], "archive": {"to": "s3://bucket"}},
            "channels.policy.peers: a channel has either peers or sources and targets; make two channels of it",
        ),
    ],
)
def test_bad_keys(folder: Path, channel: dict[str, Any], problem: str) -> None:
    found = problems(folder, channel)
    assert problem in found
    assert "hunter2" not in str(found)


def test_a_group_of_its_name(folder: Path) -> None:
    (problem,) = problems(
        folder, {**POLICY, "archive": {"to": "s3://bucket"}}, **{"policy-archive": {"command": ["train.py"]}}
    )
    assert problem == (
        'channels.policy.archive: makes the group "policy-archive", which the file has, too; name that one otherwise'
    )


def test_a_reload_adds_and_removes_it(folder: Path) -> None:
    without, archived = config(folder, POLICY), config(folder, {**POLICY, "archive": {"to": "s3://bucket"}})
    assert diff(without, archived).added == ("policy-archive",)
    assert diff(archived, without).removed == ("policy-archive",)


def test_a_coordinator_takes_the_channel_of_such_a_config(folder: Path) -> None:
    keys = {"to": "s3://bucket", "grace": "5s", "env_file": str(folder / "train.py")}
    channel = config(folder, {**POLICY, "archive": keys}).channels["policy"]
    assert channels_from({"policy": channel}, {})["policy"] == channel
    assert channel.archive == ArchiveConfig(to="s3://bucket", grace_s=5.0, env_file=folder / "train.py")

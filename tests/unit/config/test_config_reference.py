"""Every key of a config is told in words, and what is told is what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicas.config.file import parse
from replicas.errors import BadConfig
from tests.support.reference.config import Key, keys

KEYS = {key.name: key for key in keys()}


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_a_key_is_known_and_told(key: Key) -> None:
    assert key.type
    assert key.default
    assert key.sentence.endswith(".")
    assert not key.when or key.when.endswith(".")
    config: dict[str, Any] = {}
    table, names = config, key.name.split(".")
    for name in names[:-1]:
        table = table.setdefault(name, {})
    table[names[-1]] = object()  # is of no use to any of them
    with pytest.raises(BadConfig) as caught:
        parse(config, base=Path("/"))
    (problem,) = [one for one in caught.value.problems if one.startswith(f"{key.name}: ")]
    assert problem.startswith(f"{key.name}: expected ")


@pytest.mark.parametrize(
    ("name", "type", "default", "range"),
    [
        ("run.name", "name", "required", "at most 63 letters, digits, '-', '_' and '.'"),
        ("run.stop_when", "list of group names", "empty", "at most 256"),
        ("run.events_max_size", "size", '"64MiB"', "4,096 bytes to 1 EiB"),
        (
            "control.listen",
            '"host:port"',
            '"127.0.0.1:9477", or a free port if that is in use',
            "one host; port 0 to 65535",
        ),
        ("groups.NAME.replicas", "whole number", "1", "1 to 100,000"),
        ("groups.NAME.restart.window", "duration", '"10m"', "above 0 to 1,000,000,000 s"),
        ("groups.NAME.restart.no_progress_cycles", "whole number", "3", "0 to 1,000,000"),
        ("groups.NAME.launcher", "string", '"torchrun"', '"torchrun", "exec" or "external"'),
        ("groups.NAME.env_file", "path of a file", "none", ""),
        ("channels.NAME.ranks", "string", '"leader"', '"leader", "each" or "all"'),
    ],
)
def test_what_is_told(name: str, type: str, default: str, range: str) -> None:
    key = KEYS[name]
    assert (key.type, key.default, key.range) == (type, default, range)


def test_the_keys_that_a_config_can_have() -> None:
    assert len(KEYS) == len(keys())
    assert {name.rpartition(".")[0] for name in KEYS} == {
        "",
        "run",
        "store",
        "cluster",
        "slurm",
        "control",
        "logs",
        "groups.NAME",
        "groups.NAME.restart",
        "groups.NAME.health",
        "groups.NAME.resources",
        "groups.NAME.placement",
        "channels.NAME",
        "channels.NAME.archive",
        "channels.NAME.canary",
    }

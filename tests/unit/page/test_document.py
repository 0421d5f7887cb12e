"""The page's document of a status, and merge patches between two.

Covers: page/document.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from replicas.page.document import difference, document, merge
from replicas.status import (
    ChannelStatus,
    GroupStatus,
    MemberStatus,
    NodeStatus,
    PublishStatus,
    ReplicaStatus,
    RunStatus,
    StoreStatus,
)

NOW = 5000.0


def status(**replica: Any) -> RunStatus:
    about: dict[str, Any] = {"state": "ready", "generation": 2, "state_age_s": 10.0, "lived_s": 12.0, **replica}
    one = ReplicaStatus(name="a/0", group="a", replica=0, **about)
    publish = PublishStatus(
        version=8, publisher="t/0", state="moving", seconds=3.5, waits_for=("a/0/0",), waiting=1, left_s=56.5
    )
    member = MemberStatus(name="a/0/0", state="live", role="target", held=(7,), info={"host": "x" * 500})
    return RunStatus(
        run="grpo",
        version="1",
        endpoint="127.0.0.1:1",
        pid=3,
        uptime_s=100.0,
        ready=True,
        store=StoreStatus(up=True, host="h", port=1),
        groups=(GroupStatus(name="a", launcher="exec", world_size=1, replicas=(one,)),),
        channels=(
            ChannelStatus(
                name="policy", epoch=3, committed_version=7, digest="", members=(member,), under_way=(publish,)
            ),
        ),
        nodes=(NodeStatus(name="n1", state="up", heard_age_s=0.5, replicas=("a/0",)),),
    )


def test_ages_are_moments_and_what_says_nothing_is_left_out() -> None:
    found = document(status(lag_s={"policy": 4.0, "other": 0.0}, heartbeat_age_s=1.0), NOW)
    replica = found["replicas"]["a/0"]
    assert replica["since"] == 4990.0
    assert replica["behind_since"] == {"policy": 4996.0}
    assert {"reason", "pid", "versions", "heartbeat_age_s", "lag_s", "open_since"}.isdisjoint(replica)
    assert found["run"]["started"] == 4900.0
    assert found["run"]["store"] is True
    assert found["channels"]["policy"]["under_way"]["8"] == {
        "version": 8,
        "publisher": "t/0",
        "state": "moving",
        "since": 4996.5,
        "waits_for": ("a/0/0",),
        "waiting": 1,
        "until": 5056.5,
        "kept": 0,
    }
    text = "The publish of version 8 of policy (moving) waits for a/0/0."
    about = {"level": "note", "about": "channel policy", "text": text, "since": 4996.5, "until": 5056.5, "then": ""}
    assert found["verdict"]["troubles"] == {text: about}
    assert found["channels"]["policy"]["members"]["a/0/0"]["held"] == (7,)
    assert "info" not in found["channels"]["policy"]["members"]["a/0/0"], "it is long"
    assert found["nodes"]["n1"] == {
        "name": "n1",
        "state": "up",
        "local": False,
        "gpus": 0,
        "gpus_free": 0,
        "cpus": 0,
        "memory_nbytes": 0,
        "replicas": ("a/0",),
        "heard": 4999.5,
    }


def test_time_alone_changes_nothing() -> None:
    first = document(status(heartbeat_age_s=0.2, lag_s={"policy": 3.0}), NOW)
    jitter = {"state_age_s": 10.9, "lived_s": 12.6, "heartbeat_age_s": 0.4, "lag_s": {"policy": 3.6}}
    later = document(status(**jitter), NOW + 0.7)
    later["run"]["started"] = later["nodes"]["n1"]["heard"] = 0
    later["channels"]["policy"]["under_way"]["8"]["since"] = 0
    patch = difference(first, later)
    assert set(patch) == {"run", "nodes", "channels"}


def test_a_patch_has_only_what_is_new() -> None:
    before, after = document(status(), NOW), document(status(state="backoff", reason="died", state_age_s=0.0), NOW)
    patch = difference(before, after)
    assert patch["replicas"] == {"a/0": {"state": "backoff", "reason": "died", "since": NOW}}
    assert set(patch) == {"replicas", "verdict"}
    assert difference(after, before)["replicas"]["a/0"]["reason"] is None


def a_tree(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    def value() -> Any:
        kind = dice.randrange(5 if depth else 3)
        return (
            a_tree(dice, depth - 1) if kind > 2 else (dice.randrange(3), dice.choice("xy"), [dice.randrange(3)])[kind]
        )

    return {name: value() for name in "abcd" if dice.random() < 0.6}


@pytest.mark.parametrize("seed", range(5))
def test_the_patch_of_two_makes_the_second_of_the_first(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        old, new = a_tree(dice), a_tree(dice)
        patch = difference(old, new)
        merge(old, patch)
        assert old == new
        assert difference(old, new) == {}

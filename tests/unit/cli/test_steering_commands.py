"""Commands that serve, keep, name and score versions: what they send and print.

Covers: cli/steering_commands.py.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from replicas.cli import main as cli
from replicas.cli.find_run import RunAddress
from replicas.cli.steering_commands import is_served, wait_until_served
from replicas.control.commands import Answer
from replicas.control.exit_codes import USAGE
from replicas.errors import Disconnected, SyncError
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import Steered, VersionOrder
from replicas.status import (
    ChannelStatus,
    GroupStatus,
    LeaseStatus,
    ReplicaStatus,
    RunStatus,
    StoreStatus,
    VersionStatus,
)

VERSIONS = (
    VersionStatus(number=3, content_of=1, at=1.0, nbytes=2**20, labels=("current",), held=2, serving=("rollout/0",)),
    VersionStatus(number=2, at=1.0, rejected="reward 0.1 is below 0.5", scores={"reward": 0.1}, held=2),
    VersionStatus(
        number=1, step=7, leases=(LeaseStatus(name="evaluation", version=1, holder="evaluator/0/0"),), labels=("best",)
    ),
)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[VersionOrder]:
    """The orders that were sent; each is carried out."""
    found: list[VersionOrder] = []

    class Client:
        def order(self, order: VersionOrder, *, wait: bool = True) -> Answer:
            found.append(order)
            decided = Steered(channel=order.channel, version=3, content_of=1, name="evaluation", until=1.0)
            return Answer(done=True, result=msgspec.to_builtins(decided))

    policy = ChannelStatus(
        name="policy", epoch=1, committed_version=3, digest="", members=(), versions=VERSIONS, follow="promoted"
    )
    outer = ChannelStatus(name="outer", epoch=1, committed_version=0, digest="", members=())
    store = StoreStatus(up=True, host="127.0.0.1", port=1)
    status = RunStatus(
        run="r", version="1", endpoint="", pid=1, uptime_s=1.0, ready=True, store=store, channels=(policy, outer)
    )
    monkeypatch.setattr(RunAddress, "client", lambda self: Client())
    monkeypatch.setattr(RunAddress, "status", lambda self, **more: status)
    return found


@pytest.mark.parametrize(
    ("typed", "order", "said"),
    [
        ("promote policy", orders.Promote(), "policy: version 3 is served"),
        ("promote policy 2", orders.Promote(version="2"), "policy: version 3 is served"),
        ("reject policy --why bad", orders.Reject(why="bad"), "policy: version 3 is rejected"),
        ("rollback policy", orders.Rollback(), "policy: version 3 is served, with the content of version 1"),
        ("rollback policy --to best", orders.Rollback(to="best"), "with the content of version 1"),
        ("hold policy 3 --for 10m", orders.Hold(version="3", seconds=600.0), "evaluation keeps version 3, until "),
        ("hold policy 3 --name a", orders.Hold(version="3", name="a"), "evaluation keeps version 3"),
        ("release policy a", orders.Release(name="a"), "lease evaluation no longer keeps version 3"),
        ("label policy best 3", orders.Label(label="best", version="3"), "label evaluation points to version 3"),
        (
            "label policy best 3 --move",
            orders.Label(label="best", version="3", move=True),
            "label evaluation points to version 3",
        ),
        ("label policy best --remove", orders.Label(label="best", version=""), "evaluation is removed"),
        (
            "score policy 3 reward=0.5 n=2",
            orders.Score(version="3", scores={"reward": 0.5, "n": 2.0}),
            "has the scores",
        ),
    ],
)
def test_a_command_is_an_order(
    typed: str, order: VersionOrder, said: str, sent: list[VersionOrder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == 0
    assert sent == [msgspec.structs.replace(order, channel="policy")]
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("hold policy 3 --for soon", '"soon" is not a duration'),
        ("label policy best", "give VERSION or --remove"),
        ("label policy best 3 --remove", "give VERSION or --remove"),
        ("score policy 3 reward", '"reward" is not NAME=VALUE'),
        ("score policy 3 reward=high", '"reward=high" is not NAME=VALUE'),
        ("versions polcy", 'no channel "polcy"; did you mean "policy"?'),
    ],
)
def test_a_wrong_command_sends_nothing(
    typed: str, said: str, sent: list[VersionOrder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == USAGE
    assert not sent
    assert said in capsys.readouterr().err


def test_the_versions_are_a_table(sent: list[VersionOrder], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["versions"]) == 0
    shown = capsys.readouterr().out
    assert "policy: follows promoted" in shown
    assert "outer" not in shown
    for said in ("content of 1", "1 MiB", "rejected: reward 0.1", "gone", "evaluation of evaluator/0/0", "best"):
        assert said.split()[-1] in shown, said


def test_the_versions_as_json(sent: list[VersionOrder], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["versions", "policy", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in found["policy"]["versions"]] == [3, 2, 1]
    assert found["policy"]["follow"] == "promoted"


def a_status(current: int, committed: int, loaded: dict[str, int], rejected: str = "") -> RunStatus:
    """Of a run whose replicas have loaded these versions; a "-": it is not ready."""
    versions = tuple(VersionStatus(number=number, rejected=rejected if number == 5 else "") for number in range(1, 9))
    channel = ChannelStatus(
        name="policy",
        epoch=1,
        committed_version=committed,
        digest="",
        members=(),
        current=current,
        targets=("rollout",),
        versions=versions,
        follow="promoted",
    )

    def group(name: str, loaded: dict[str, int]) -> GroupStatus:
        replicas = tuple(
            ReplicaStatus(
                name=f"{name}/{number}",
                group=name,
                replica=number,
                state="starting" if one.startswith("-") else "ready",
                generation=1,
                versions={"policy": version} if version else {},
            )
            for number, (one, version) in enumerate(loaded.items())
        )
        return GroupStatus(
            name=name, launcher="exec", size=len(replicas), world_size=1, min_ready=None, replicas=replicas
        )

    return RunStatus(
        run="r",
        version="1",
        endpoint="",
        pid=1,
        uptime_s=1.0,
        ready=True,
        store=StoreStatus(up=True, host="127.0.0.1", port=1),
        groups=(group("rollout", loaded), group("trainer", {"a": 0})),
        channels=(channel,),
    )


@pytest.mark.parametrize(
    ("current", "committed", "loaded", "found"),
    [
        (4, 5, {"a": 4, "b": 4}, False),  # it is the candidate
        (4, 5, {"a": 4, "b": 5}, False),  # on its canary
        (5, 5, {"a": 4, "b": 5}, False),  # it was promoted
        (5, 5, {"a": 5, "b": 0}, False),  # and one has never loaded any
        (5, 5, {}, False),  # and nobody is ready
        (5, 5, {"-a": 5}, False),
        (5, 5, {"a": 5, "b": 5}, True),
        (5, 5, {"a": 5, "-b": 0}, True),
        (6, 6, {"a": 6, "b": 6}, True),  # and a later one, too
        (5, 6, {"a": 5, "b": 6}, True),
    ],
)
def test_a_version_is_served_when_all_have_loaded_it(
    current: int, committed: int, loaded: dict[str, int], found: bool
) -> None:
    assert is_served(a_status(current, committed, loaded), "policy", 5) is found


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (a_status(4, 5, {"a": 4}, "reward 0.1 is below 0.5"), "version 5 was rejected: reward 0.1 is below 0.5"),
        (a_status(6, 6, {"a": 6}, "by hand"), "version 5 was rejected: by hand"),  # and its canary went back
        (a_status(4, 6, {"a": 4}), "version 6 has taken the place of version 5"),
    ],
)
def test_a_version_that_is_never_served_is_an_error_with_its_reason(status: RunStatus, said: str) -> None:
    with pytest.raises(SyncError, match=said):
        is_served(status, "policy", 5)


def test_a_wait_ends_with_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*answers: RunStatus | Disconnected, limit_s: float = 0.0) -> int:
        said = iter(answers)

        def status(self: RunAddress, **more: object) -> RunStatus:
            if isinstance(found := next(said), Disconnected):
                raise found
            return found

        monkeypatch.setattr(RunAddress, "status", status)
        return wait_until_served(RunAddress(), "policy", 5, limit_s)

    with pytest.raises(SyncError, match="not served within 0 s: that version is the candidate") as caught:
        wait(a_status(4, 5, {"a": 4}))
    assert "replicas promote policy" in caught.value.hint
    with pytest.raises(SyncError, match="a target has not loaded that version yet"):
        wait(a_status(5, 5, {"a": 5, "b": 4}))
    with pytest.raises(SyncError, match="within 0 s: nobody answers"):
        wait(Disconnected("nobody answers"))
    monkeypatch.setattr("replicas.cli.steering_commands._LOOK_S", 0.0)
    assert wait(Disconnected("nobody answers"), a_status(6, 6, {"a": 6}), limit_s=60.0) == 6

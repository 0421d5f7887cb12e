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
from replicas.errors import SyncError
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import Steered, VersionOrder
from replicas.status import ChannelStatus, LeaseStatus, RunStatus, StoreStatus, VersionStatus

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
        ("release policy a", orders.Release(name="a"), "evaluation no longer keeps version 3"),
        ("label policy best 3", orders.Label(label="best", version="3"), "evaluation is version 3"),
        ("label policy best 3 --move", orders.Label(label="best", version="3", move=True), "evaluation is version 3"),
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


def a_channel(current: int, committed: int, served: dict[int, int], rejected: str = "") -> ChannelStatus:
    versions = tuple(VersionStatus(number=number, rejected=rejected if number == 5 else "") for number in range(1, 9))
    return ChannelStatus(
        name="policy",
        epoch=1,
        committed_version=committed,
        digest="",
        members=(),
        current=current,
        served=served,
        versions=versions,
        follow="promoted",
    )


@pytest.mark.parametrize(
    ("current", "committed", "served", "found"),
    [
        (4, 5, {4: 3}, False),  # it is the candidate
        (4, 5, {4: 2, 5: 1}, False),  # on its canary
        (5, 5, {4: 1, 5: 2}, False),  # it was promoted
        (5, 5, {}, False),  # and nobody is ready
        (5, 5, {5: 3}, True),
        (6, 6, {6: 3}, True),  # and a later one, too
        (5, 6, {5: 3}, True),
    ],
)
def test_a_version_is_served_when_all_have_loaded_it(
    current: int, committed: int, served: dict[int, int], found: bool
) -> None:
    assert is_served(a_channel(current, committed, served), 5) is found


@pytest.mark.parametrize(
    ("channel", "said"),
    [
        (a_channel(4, 5, {4: 3}, "reward 0.1 is below 0.5"), "version 5 was rejected: reward 0.1 is below 0.5"),
        (a_channel(6, 6, {6: 3}, "by hand"), "version 5 was rejected: by hand"),  # and its canary went back
        (a_channel(4, 6, {4: 3}), "version 6 has taken the place of version 5"),
    ],
)
def test_a_version_that_is_never_served_is_an_error_with_its_reason(channel: ChannelStatus, said: str) -> None:
    with pytest.raises(SyncError, match=said):
        is_served(channel, 5)


def test_a_wait_ends_with_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    status = RunStatus(
        run="r",
        version="1",
        endpoint="",
        pid=1,
        uptime_s=1.0,
        ready=True,
        store=StoreStatus(up=True, host="127.0.0.1", port=1),
        channels=(a_channel(4, 5, {4: 3}),),
    )
    monkeypatch.setattr(RunAddress, "status", lambda self, **more: status)
    with pytest.raises(SyncError, match="not served within 0 s: it is the candidate") as caught:
        wait_until_served(RunAddress(), "policy", 5, 0.0)
    assert "replicas promote policy" in caught.value.hint
    status = msgspec.structs.replace(status, channels=(a_channel(5, 5, {4: 3, 5: 1}),))
    with pytest.raises(SyncError, match="a target has not loaded it"):
        wait_until_served(RunAddress(), "policy", 5, 0.0)

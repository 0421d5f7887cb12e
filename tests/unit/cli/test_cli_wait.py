"""The command ``wait``: what it waits for, and what it does not wait for any longer.

Covers: cli/base.py, cli/order_commands.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from replicas.cli import base as cli_base
from replicas.cli import main as cli
from replicas.cli import order_commands as cli_wait
from replicas.cli.find_run import RunAddress
from replicas.control.commands import Answer
from replicas.errors import Disconnected, UsageError, WorldError
from replicas.status import GroupStatus, ReplicaStatus, RunStatus, StoreStatus
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import RunEnded, RunStarted


def one(name: str, state: str, reason: str = "") -> ReplicaStatus:
    group, _, index = name.partition("/")
    return ReplicaStatus(
        name=name,
        group=group,
        replica=int(index),
        state=state,  # type: ignore[arg-type]  # the test names valid states
        generation=1,
        reason=reason,
    )


def run_of(*replicas: ReplicaStatus) -> RunStatus:
    names = dict.fromkeys(each.group for each in replicas)
    groups = tuple(
        GroupStatus(
            name=name, launcher="exec", world_size=1, replicas=tuple(each for each in replicas if each.group == name)
        )
        for name in names
    )
    store = StoreStatus(up=True, host="127.0.0.1", port=1)
    return RunStatus(
        run="r", version="1", endpoint="127.0.0.1:1", pid=1, uptime_s=1.0, ready=False, store=store, groups=groups
    )


READY, STARTING = one("rollout/0", "ready"), one("rollout/1", "starting", "has not joined")


def test_what_is_waited_for() -> None:
    status = run_of(READY, STARTING, one("trainer/0", "finished"))
    assert cli_wait.unready(status, None) == [STARTING]
    assert cli_wait.unready(status, "rollout") == [STARTING]
    assert cli_wait.unready(status, "rollout/0") == []
    assert cli_wait.unready(status, "trainer") == [], "it has done its work"


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (one("rollout/1", "failed", "all restarts are used"), "rollout/1 has failed: all restarts are used"),
        (one("rollout/1", "drained"), "rollout/1 was drained"),
    ],
)
def test_what_will_not_come_is_not_waited_for(lost: ReplicaStatus, words: str) -> None:
    with pytest.raises(WorldError, match=words):
        cli_wait.unready(run_of(READY, lost), "rollout")
    assert cli_wait.unready(run_of(READY, lost), "rollout/0") == []


def test_a_group_is_ready_with_as_many_as_it_needs() -> None:
    lost = one("rollout/1", "failed", "all restarts are used")
    group = msgspec.structs.replace(run_of(READY, lost).groups[0], min_ready=1)
    status = msgspec.structs.replace(run_of(READY), groups=(group,))
    assert cli_wait.unready(status, "rollout") == []
    with pytest.raises(WorldError, match="rollout/1 has failed"):
        cli_wait.unready(status, "rollout/1")


def test_who_is_not_there_is_named() -> None:
    for target, more in (("rolout", 'did you mean "rollout"'), ("rollout/7", "rollout has 1 replica")):
        with pytest.raises(UsageError, match=f'run "r" has no "{target}"; {more}'):
            cli_wait.unready(run_of(READY), target)


class FakePlace(RunAddress):
    """A run that looks different each time; None: it is gone."""

    def __init__(self, *statuses: RunStatus | None) -> None:
        super().__init__(endpoint="127.0.0.1:1")
        self.left = list(statuses)

    def status(self, *, timeout_s: float = 5.0) -> RunStatus:
        found = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if found is None:
            raise Disconnected("nobody answers") from ConnectionRefusedError()
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_wait, "_LOOK_AGAIN_S", 0.001)


def wait_for(monkeypatch: pytest.MonkeyPatch, place: FakePlace, *words: str) -> int:
    monkeypatch.setattr(cli_base, "place_of", lambda **_: place)
    return cli.main(["wait", *words])


def test_it_waits_until_all_are_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    later = one("rollout/1", "ready")
    place = FakePlace(run_of(READY, STARTING), run_of(READY, STARTING), run_of(READY, later))
    assert wait_for(monkeypatch, place, "rollout", "--ready") == 0
    assert capsys.readouterr().out == "rollout: ready\n"


@pytest.mark.parametrize(
    ("option", "said"), [((), "wanted"), (("--ready",), "wanted, and ready"), (("--ready", "--no-wait"), "")]
)
def test_a_scale_waits_for_new_replicas_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: tuple[str, ...], said: str
) -> None:
    class Taker:
        def order(self, order: object, *, wait: bool) -> Answer:
            return Answer(done=True)

    monkeypatch.setattr(FakePlace, "client", lambda _: Taker())
    place = FakePlace(run_of(READY, STARTING), run_of(READY, STARTING), run_of(READY, one("rollout/1", "ready")))
    monkeypatch.setattr(cli_base, "place_of", lambda **_: place)
    code = cli.main(["scale", "rollout", "2", *option])
    out, problem = capsys.readouterr()
    assert (code, out) == ((0, f"rollout: 2 replicas {said}\n") if said else (2, "")), problem
    assert len(place.left) == (1 if said.endswith("ready") else 3)


def test_it_ends_in_time_and_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait_for(monkeypatch, FakePlace(run_of(READY, STARTING)), "rollout", "-t", "20ms") == 1
    expected = "replicas: timed out after 20ms: not ready: rollout/1 (has not joined) (replicas status shows why)\n"
    assert capsys.readouterr().err == expected


def test_a_run_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert wait_for(monkeypatch, FakePlace(run_of(READY, STARTING), None)) == 1
    assert capsys.readouterr().err == "replicas: the run is over\n"


@pytest.mark.parametrize("option", ["-t1m", "-t50ms"])
def test_a_run_that_comes_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """As with ``replicas run & replicas wait``."""
    late = [None] * (3 if option == "-t1m" else 10_000)
    code = wait_for(monkeypatch, FakePlace(*late, run_of(READY, STARTING), run_of(READY)), option)
    said = capsys.readouterr()
    if option == "-t1m":
        assert (code, said.out) == (0, "the run: ready\n")
    else:
        assert (code, said.err.partition(" (")[0]) == (69, "replicas: nobody answers")


@pytest.mark.parametrize("starting", [False, True])
def test_a_run_that_does_not_appear_is_given_up_earlier_than_one_that_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], starting: bool
) -> None:
    monkeypatch.setattr(cli_wait, "_COMING_S", 0.01)
    monkeypatch.setattr(FakePlace, "starting", starting)
    code = wait_for(monkeypatch, FakePlace(*[None] * 100, run_of(READY)), "-t1m")
    assert code == (0 if starting else 69), capsys.readouterr().err


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_that_is_over_is_not_waited_for_unless_somebody_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, begins: bool
) -> None:
    """``replicas run & replicas wait`` of a second run finds the end of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".replicas" / "r").mkdir(parents=True)
    log = EventLog(tmp_path / ".replicas" / "r" / "events.jsonl", now=lambda: 1.8e9)
    log.emit(RunStarted(run="r", pid=1, version="1"))
    log.emit(RunEnded(exit_code=1, reason="group trainer failed"))
    log.close()
    (tmp_path / ".replicas" / "r" / "lock").touch()
    command = [sys.executable, "-c", "input()", "replicas", "run" if begins else "check", "run.toml"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        monkeypatch.setattr(cli_wait, "processes", lambda: [other.pid])
        began = time.monotonic()
        assert cli.main(["wait", "-t1s"]) == 1
        assert (time.monotonic() - began >= 1.0) is begins
        other.kill()
    said = capsys.readouterr().err
    assert said.startswith('replicas: run "r" is not running: it ended at 2027-01-')
    assert said.endswith(" with exit code 1: group trainer failed (start it with: replicas run CONFIG)\n")
    assert cli.main(["events", "--follow"]) == 0
    assert "over, exit code 1: group trainer failed" in capsys.readouterr().out


def test_a_duration_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["wait", "-t", "soon"]) == 2
    assert '"soon" is not a duration' in capsys.readouterr().err

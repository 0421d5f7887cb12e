"""The supervisor's pure parts, and its folder.

Covers: core/lives/ordering.py, supervisor/shim/starting.py, supervisor/supervisor.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from replicas import errors
from replicas.config.dependency import Dependency
from replicas.config.structs import GroupConfig
from replicas.coordinator import Coordinator
from replicas.core.lives.lifecycle import Lifecycle, ReplicaEvent, Transition
from replicas.core.lives.ordering import start_levels
from replicas.supervisor.fleet.causes import line, verdict
from replicas.supervisor.shim.starting import resolve_command
from replicas.supervisor.state.run_state import Cause, Saved
from replicas.supervisor.state.state import AlreadySupervised, StateDir
from replicas.supervisor.supervisor import Supervisor
from replicas.supervisor.wire import orders
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, Inventory, LogLoss, PartState, RankExit, Remains
from replicas.telemetry.events import RunEnded, RunStarted
from replicas.trust.tokens import Tokens

OK = ExitReport("ok")


def config(tmp_path: Path, **changes: object) -> GroupConfig:
    values: dict[str, object] = {"name": "a", "command": ("x",), "cwd": tmp_path, "launcher": "exec", **changes}
    return GroupConfig(**values)  # type: ignore[arg-type]  # the tests give what the struct asks for


def test_what_the_programs_report_raises_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(text: str) -> None:
        raise SystemExit("of the program")

    given = {
        "schema_version": 1,
        "run": {"name": "r", "state_dir": str(tmp_path)},
        "groups": {"a": {"replicas": 1, "command": ["true"], "launcher": "exec"}},
    }
    Supervisor(given, report=fail).say("a line")
    assert "report() failed on a line" in caplog.text


def test_a_run_that_starts_has_no_status_yet_and_says_where_to_look(tmp_path: Path) -> None:
    given = {
        "schema_version": 1,
        "run": {"name": "r", "state_dir": str(tmp_path)},
        "groups": {"a": {"replicas": 1, "command": ["true"], "launcher": "exec"}},
    }
    made = Supervisor(given)
    with pytest.raises(errors.UsageError, match="is not running"):
        made.status()
    made._context.opened = cast("Coordinator", SimpleNamespace(endpoint="127.0.0.1:1"))
    with pytest.raises(errors.UsageError, match=r"the run still starts at 127\.0\.0\.1:1 \(its log says what"):
        assert made.fleet


def test_no_state_is_saved_behind_the_last_event_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hide that the run has ended: a start after a kill would repeat it."""
    given = {
        "schema_version": 1,
        "run": {"name": "r", "state_dir": str(tmp_path)},
        "groups": {"a": {"replicas": 1, "command": ["true"], "launcher": "exec"}},
    }
    made, saves = Supervisor(given), list[bool]()

    def save(*_: object, sync: bool) -> bool:
        saves.append(sync)
        return True

    monkeypatch.setattr(made, "_fleet", SimpleNamespace(draining=False, over=asyncio.Event()))
    monkeypatch.setattr(made._saving, "save", save)
    assert made.save()
    assert saves == [False]
    monkeypatch.setattr(made._reporting, "ended", RunEnded(exit_code=0))
    assert made.save()
    assert made.save(order=True)
    assert saves == [False]
    monkeypatch.setattr(made, "_preempted", True)
    assert made.save()
    assert saves == [False, False], "the next supervisor goes on from it"


# ---------------------------------------------------------------- reports


def test_the_first_failure_counts_and_not_those_that_torchrun_stopped() -> None:
    stopped = RankExit(0, -signal.SIGTERM, at=1.0)
    second = RankExit(3, 1, text="ValueError: x", at=3.0)
    first = RankExit(2, -signal.SIGSEGV, text="Fatal Python error", at=2.0)
    reports = [ExitReport("failed", ranks=(second,)), ExitReport("failed", ranks=(first, stopped)), ExitReport("lost")]
    assert verdict(reports) == Cause("signal", "rank 2 was killed by SIGSEGV: Fatal Python error")
    assert verdict([OK, ExitReport("failed", ranks=(second,))]) == Cause(
        "exit", "rank 3 exited with code 1: ValueError: x"
    )
    killed = RankExit(1, -signal.SIGKILL, text="step 41", at=1.0)
    assert verdict([ExitReport("failed", ranks=(killed,))]) == Cause("signal", "rank 1 was killed by SIGKILL")
    assert verdict([OK, ExitReport("lost", text="torchrun died")]) == Cause("lost", "torchrun died")
    assert verdict([OK, OK]) is None


def test_messages_keep_their_content_and_others_are_refused() -> None:
    spec = PartSpec("r", "g", 0, 1, 0, 2, 4, "exec", ("a", "b"), {"K": "v"}, "/", "/l", 1.5, "n")
    assert PartSpec.of(json.loads(json.dumps(plain(spec)))) == spec
    report = ExitReport("failed", "text", (RankExit(1, -9, 5, "words", 2.0),))
    state = UNKNOWN.with_identity_of(spec)._replace(
        rendezvous=("h", 1),
        report=report,
        remains=Remains(1.5, ((1, "x"),)),
        belongings=Inventory(gpu=True, processes=((1, 2),)),
        losses=(LogLoss(3, "file", "full"),),
    )
    told = json.loads(json.dumps(plain(state)))
    assert orders.read(PartState, told) == state
    assert orders.read(PartState, {**told, "of another release": 1}) == state
    changes: tuple[dict[str, object], ...] = ({"pid": True}, {"nonce": "n" * 65}, {"belongings": []}, {"losses": [[3]]})
    for change in changes:
        with pytest.raises(orders.Malformed):
            orders.read(PartState, told | change)
    for bad in (b"[]", b'{"type": 1}', b"{}"):
        with pytest.raises(ValueError, match="not a message"):
            orders.decode(bad)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        theirs.close()
        assert orders.send(ours, {"type": "x"}) is False
        assert orders.receive(ours) is None


def test_a_spec_with_a_field_of_another_type_is_refused() -> None:
    spec = PartSpec("r", "g", 0, 1, 0, 2, 4, "exec", ("a", "b"), {"K": "v"}, "/", "/l", 1.5, "n")
    for change in ({"run": 7}, {"nnodes": "2"}, {"stop_timeout_s": None}, {"tee": "no"}):
        with pytest.raises(orders.OtherOrders, match="is not of type"):
            PartSpec.of({**plain(spec), **change})


def test_commands_of_python_run_in_this_interpreter() -> None:
    assert resolve_command(["train.py", "--x"]) == [sys.executable, "-u", "train.py", "--x"]
    assert resolve_command(["-m", "pkg"]) == [sys.executable, "-u", "-m", "pkg"]
    assert resolve_command(["vllm", "serve"]) == ["vllm", "serve"]


# ---------------------------------------------------- config, environment, words, state


def test_groups_start_after_those_they_depend_on(tmp_path: Path) -> None:
    groups = {
        name: config(tmp_path, name=name, depends_on=tuple(map(Dependency, on)))
        for name, on in {"c": ("b",), "a": (), "b": ("a",)}.items()
    }
    assert start_levels(groups) == [["a"], ["b"], ["c"]]
    with pytest.raises(errors.UsageError, match="cycle"):
        start_levels({"a": config(tmp_path, depends_on=(Dependency("a"),))})


def test_lines_name_the_log() -> None:
    step = Transition(
        group="a",
        replica=1,
        generation=2,
        event=ReplicaEvent.RETRY,
        before="ready",
        after="backoff",
        reason="rank 0 died",
        resume_s=1.5,
    )
    text = line(step, Path("/run/logs"))
    assert text == "a/1: rank 0 died; starting again in 1.5 s; logs: /run/logs/a/1/gen-2"
    text = line(step, None)
    assert text == "a/1: rank 0 died; starting again in 1.5 s; logs: replicas logs a/1 -g 2"
    text = line(msgspec.structs.replace(step, resume_s=0.0), None)  # no node may take it
    assert text == "a/1: rank 0 died; starting again when its old processes have ended; logs: replicas logs a/1 -g 2"


def test_the_last_word_on_a_healthy_replica_is_that_it_is_ready() -> None:
    life = Lifecycle("a", 1, now=0.0)
    said = [
        line(life.apply(event, now=1.0, reason=reason), Path("/run/logs"))
        for event, reason in (
            (ReplicaEvent.START, ""),
            (ReplicaEvent.READY, ""),
            (ReplicaEvent.UNREADY, "no version of policy loaded yet (newest: 2)"),
            (ReplicaEvent.READY, ""),
        )
    ]
    assert said[1:] == [
        "a/1: ready after 0.0 s",
        "a/1: not ready (no version of policy loaded yet (newest: 2))",
        "a/1: ready again",
    ]


def test_one_supervisor_of_a_state_folder(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path / "s", "r"), StateDir(tmp_path / "s", "r")
    first.acquire()
    with pytest.raises(AlreadySupervised, match=f'run "r" is already supervised by process {os.getpid()}'):
        second.acquire()
    first.write(endpoint="127.0.0.1:1", tokens=Tokens("secret"))
    assert first.token_file.stat().st_mode & 0o777 == 0o600
    assert json.loads(first.endpoint_file.read_text()) == {
        "endpoint": "127.0.0.1:1",
        "pid": os.getpid(),
        "run": "r",
        "socket": "",
    }
    (first.logs / "old").touch()
    first.release()
    assert not first.token_file.exists()
    assert not first.endpoint_file.exists()
    second.acquire()
    assert (tmp_path / "s" / "logs.previous" / "old").exists()
    assert not list(second.logs.iterdir())
    second.release()


def test_a_run_that_goes_on_keeps_its_token_through_starts_that_fail(tmp_path: Path) -> None:
    """Programs that others have started still use it."""
    killed = StateDir(tmp_path, "r")
    killed.acquire()
    killed.write(endpoint="127.0.0.1:1", tokens=Tokens("secret"))
    killed.run_state.save(Saved(run="r"))
    os.close(killed.lock)
    for _ in range(3):  # such as those for which a port is in use
        failed = StateDir(tmp_path, "r")
        failed.acquire()
        assert failed.token == "secret"
        failed.release()
    after = StateDir(tmp_path, "r")
    after.acquire()
    assert after.token == "secret"
    after.write(endpoint="127.0.0.1:1", tokens=Tokens("secret"))
    assert after.token_file.read_text() == "secret"
    after.release(ended=True)
    assert not after.token_file.exists()
    fresh = StateDir(tmp_path, "r")
    fresh.token_file.write_text("somebody's")
    fresh.acquire()
    assert fresh.token is None
    assert not fresh.token_file.exists()
    fresh.release()


def test_starts_that_come_to_nothing_leave_the_logs_of_the_run_before(tmp_path: Path) -> None:
    for _ in range(3):
        folder = StateDir(tmp_path, "r")
        folder.acquire()
        if not (tmp_path / "logs.previous").exists():
            (folder.logs / "old").touch()
        folder.release()
    assert (tmp_path / "logs.previous" / "old").exists()


def test_a_start_that_fails_lets_the_run_go(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    for _ in range(2):
        with pytest.raises(errors.UsageError, match=r"Not a directory: .*/logs"):
            StateDir(tmp_path, "r").acquire()
    (tmp_path / "logs").unlink()
    folder = StateDir(tmp_path, "r")
    folder.acquire()
    (tmp_path / "endpoint.json.new").mkdir()
    with pytest.raises(errors.WorldError, match=r"Is a directory"):
        folder.write(endpoint="x", tokens=Tokens("y"))
    folder.release()


@pytest.mark.parametrize(("code", "goes_on"), [(0, False), (1, False), (75, True)])
def test_a_run_that_had_ended_in_order_begins_afresh(tmp_path: Path, code: int, goes_on: bool) -> None:
    first = StateDir(tmp_path, "r")
    first.acquire()
    events = first.open_events(1 << 20)
    first.run_state.save(Saved(run="r", seq=events.seq, tally=events.tally))
    first.decisions_file.touch()
    events.emit(RunEnded(exit_code=code))
    first.release()  # it was killed before it could remove its state
    again = StateDir(tmp_path, "r")
    again.acquire()
    assert again.resumed == (again.saved is not None) == goes_on
    assert again.decisions_file.exists() == goes_on
    (record,) = again.open_events(1 << 20).after(2)  # numbers go on in any case
    assert isinstance(record.event, RunStarted)
    assert record.event.resumed == goes_on
    again.release()


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.UsageError, match=r"file/run: Not a directory"):
        StateDir(tmp_path / "file" / "run", "r").acquire()

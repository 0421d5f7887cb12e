"""A start touches no process of a run that lives, whatever the two have in common; and
one that fails touches nobody."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicas.linux.processes import MARK
from replicas.supervisor.state.run_state import Saved, ShimRecord, machine
from replicas.supervisor.state.state import StateDir
from tests.support.machine.users import as_user, needs_users
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

TWO = group("a", SLEEPS, "replicas = 2")


def ranks(run: Run) -> list[int]:
    """Pids of both ranks, once they are up."""
    logs = [f"/proc/{run.pid}/root{run.log(f'a/{index}')}" for index in range(2)]
    eventually(lambda: all(Path(log).exists() and "up" in Path(log).read_text() for log in logs), "both ranks")
    return [pid for pid, line in run.processes().items() if "time.sleep(600)" in line and "-c" in line.split()[1]]


def assert_untouched(run: Run, pids: list[int]) -> None:
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    assert run.running
    assert not [line for line in run.said() if "was killed" in line or "again" in line]


@needs_users
def test_a_run_with_the_same_paths_in_another_container(tmp_path: Path) -> None:
    """Containers that share their processes: the same path is another folder in
    each."""
    own = f"mkdir -p {tmp_path}/.replicas && mount -t tmpfs tmpfs {tmp_path}/.replicas"
    command = as_user(os.getuid(), [sys.executable, "-m", "replicas.supervisor"], before=own)
    with running(tmp_path, TWO, command=command) as first:
        pids = ranks(first)
        with running(tmp_path, TWO, command=command) as second:
            ranks(second)
            assert_untouched(first, pids)
        assert_untouched(first, pids)


def test_a_state_folder_that_was_removed_under_its_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    head = f'[control]\nlisten = "127.0.0.1:{port}"\n'
    with running(tmp_path, TWO, head=head) as first:
        pids = ranks(first)
        shutil.rmtree(first.state_dir)
        with running(tmp_path, TWO, head=head) as second:
            assert second.wait() == 2
        assert_untouched(first, pids)
        with running(tmp_path, TWO) as third:  # on another port
            ranks(third)
            assert_untouched(first, pids)


def test_a_copy_of_the_state_folder_of_a_living_run(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    with running(tmp_path, TWO) as first:
        pids = ranks(first)
        eventually((first.state_dir / "endpoint.json").exists, "the whole state")
        shutil.copytree(first.state_dir, elsewhere / ".replicas" / "test", ignore=shutil.ignore_patterns("*.sock"))
        (elsewhere / ".replicas" / "test" / "state.json").unlink()  # else it would tell of the living supervisor
        with running(elsewhere, TWO) as second:
            ranks(second)
            assert_untouched(first, pids)


@contextmanager
def left_by_a_dead_supervisor(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and the state that names its mark."""
    run.state_dir.mkdir(parents=True)
    shims = (ShimRecord(nonce="0123456789abcdef", group="a", replica=0, generation=1),)
    StateDir(run.state_dir, "test").run_state.save(Saved(run="test", machine=machine(), shims=shims))
    env = {**os.environ, MARK: "0123456789abcdef"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE) as process:
        yield process
        process.communicate(b"\n", timeout=20)


@pytest.mark.parametrize(
    "head", ['[control]\nlisten = "127.0.0.1:{}"\n', "[store]\nport = {}\n"], ids=["control", "store"]
)
def test_a_start_that_fails_kills_nobody_and_the_next_one_does(tmp_path: Path, head: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failing = Run(tmp_path, TWO, head=head.format(taken.getsockname()[1]))
        with left_by_a_dead_supervisor(failing) as left:
            try:
                assert failing.start().wait() == 2, failing.lines
            finally:
                failing.clean_up()
            assert alive(left.pid)
            with running(tmp_path, TWO) as run:
                ranks(run)
                assert left.wait(20) == -signal.SIGKILL
                found = [
                    json.loads(line)["event"] for line in (run.state_dir / "events.jsonl").read_text().splitlines()
                ]
                assert [(one["pid"], one["how"], one["swept"]) for one in found if one["type"] == "LeftoverFound"] == [
                    (left.pid, "mark", True)
                ]

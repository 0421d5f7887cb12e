"""Starts that take for ever, or come to nothing: they are given up when somebody says
so, and say why they failed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicas import errors
from replicas.linux.processes import is_stopped
from replicas.supervisor.state.state import StateDir
from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

SITE = """
import os, signal, sys
if "replicas.coordinator.store_process" in sys.orig_argv:
    {does}
"""


@contextmanager
def with_a_store_that(folder: Path, does: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose store process does this before anything else."""
    (site := folder / "site").mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(does=does))
    monkeypatch.setenv("PYTHONPATH", str(site))
    with running(folder, group("a", SLEEPS)) as run:
        yield run


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGUSR1, 75)])
def test_a_start_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, code: int
) -> None:
    with with_a_store_that(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)", monkeypatch) as run:
        store = run.find("store_process")
        eventually(lambda: is_stopped(store), "a store that hangs")
        run.signal(signum)
        run.wait_line(f"{signum.name}: cancelling the start")
        assert run.wait(timeout_s=30) == code
        assert run.lines[-1].endswith("run test: not started, as the start was cancelled")
        run.assert_nothing_left()
        assert not (run.state_dir / "endpoint.json").exists()


def test_a_store_that_ends_at_its_start_is_no_matter_of_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with with_a_store_that(tmp_path, "os._exit(3)", monkeypatch) as run:
        assert run.wait() == 2
        assert "rendezvous store: its process ended with code 3 before it listened" in run.lines[-1]
        assert "port" not in run.lines[-1]
        run.assert_nothing_left()


def test_whoever_waits_for_a_run_can_give_up(tmp_path: Path) -> None:
    """The lock is held by what a dead supervisor left."""
    holder, waiting = StateDir(tmp_path, "r"), StateDir(tmp_path, "r")
    holder.acquire()
    (tmp_path / "lock").write_text("1 1")  # of a supervisor that is dead
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            waiting.acquire()
        except errors.WorldError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.given_up.set()
    thread.join(20)
    assert not thread.is_alive()
    assert [str(one) for one in ended] == [f"the start of the run in {tmp_path} was cancelled"]
    holder.release()

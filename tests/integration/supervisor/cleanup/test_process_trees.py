"""kill -9 of two at once, and processes that hide: nothing of the affected replica is
left alive. (kill -9 of one, with what is said of it: test_supervisor_kills.py.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from replicas.linux.cgroups import find_own
from replicas.linux.processes import start_time
from replicas.supervisor.fleet.local_agent import AGENT
from tests.support.processes import parent_of
from tests.support.programs import SLEEPS, group
from tests.support.runs import WITHOUT_CGROUPS, Run, alive, running
from tests.support.waits import eventually

BOUND_S = 10.0
"""Five seconds are promised, and held in the chaos suite; a machine that runs other
tests meanwhile gets twice that."""
RESTART = 'restart = { initial_delay = "100ms", no_progress_cycles = 0 }'

HIDES = """
import os, subprocess, sys, time
sleep = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'
out = os.environ['OUT'] + '/pids'
def note():
    with open(out, 'a') as file:
        file.write(f'{os.getpid()}\\n')
for environment in (dict(os.environ), {}):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note()
            os.execve(sys.executable, [sys.executable, '-c', sleep], environment)
        os._exit(0)
    os.wait()
note()
time.sleep(600)
"""
"""Starts two double-forked daemons that are deaf to SIGTERM, one of them with an empty
environment; sleeps."""


def cgroups_work() -> bool:
    try:
        folder = find_own()
    except OSError:
        return False
    return (folder / "cgroup.kill").exists() or folder.joinpath("cgroup.procs").exists()


needs_cgroups = pytest.mark.skipif(not cgroups_work(), reason="no control groups can be made here")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take control groups away")


def kill(*pids: int) -> None:
    """SIGKILL, as nearly at once as that can be: on a busy machine the first one's end
    may have brought that of the next."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    for number, pidfd in enumerate(pidfds):
        with suppress(ProcessLookupError) if number else nullcontext():
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def main_pid(run: Run, *, besides: int = 0) -> int:
    def look() -> int:
        pid = run.status().groups[0].replicas[0].pid
        return 0 if pid in (None, besides) else int(pid)

    return int(eventually(look, "a main process"))


def all_pids(folder: Path, count: int) -> list[tuple[int, int]]:
    """Pids, with start times, that ``count`` programs :data:`HIDES` have noted."""
    path = folder / "pids"

    def look() -> list[tuple[int, int]]:
        found = [int(line) for line in path.read_text().split()] if path.exists() else []
        return [(pid, start_time(pid) or 0) for pid in found] if len(found) == count * 3 else []

    noted: list[tuple[int, int]] = eventually(look, f"{count * 3} processes in {path}")
    path.unlink()
    return noted


def gone(processes: list[tuple[int, int]], since: float) -> None:
    """None of them is alive ``BOUND_S`` after ``since``."""
    left = max(0.1, BOUND_S - (time.monotonic() - since))
    eventually(
        lambda: not [pid for pid, start in processes if start_time(pid) == start], f"{processes}", timeout_s=left
    )


@contextmanager
def hiding(folder: Path, text: str, **options: object) -> Iterator[tuple[Run, int]]:
    """A run whose programs hide processes; and a stranger that looks like one of them,
    which must live."""
    env = f'env = {{ OUT = "{folder}" }}\n'
    with subprocess.Popen([sys.executable, "-c", SLEEPS], cwd=folder, stdout=subprocess.DEVNULL) as stranger:
        try:
            with running(folder, text.replace("ENV", env), name=f"trees-{os.getpid()}", **options) as run:
                yield run, stranger.pid
                assert alive(stranger.pid)
        finally:
            stranger.kill()
            for pid in map(int, (folder / "pids").read_text().split() if (folder / "pids").exists() else []):
                if b"time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes() if alive(pid) else False:
                    kill(pid)


EXEC = group("a", HIDES, f"ENV{RESTART}")


@needs_cgroups
@pytest.mark.parametrize("victims", [("supervisor", "shim"), ("supervisor", "rank"), ("supervisor", "agent")])
def test_a_run_that_loses_its_supervisor_and_another_one_leaves_nothing(
    tmp_path: Path, victims: tuple[str, str]
) -> None:
    with hiding(tmp_path, EXEC) as (run, _):
        noted = all_pids(tmp_path, 1)
        rank = main_pid(run)
        pids = {"supervisor": run.pid, "shim": parent_of(rank), "rank": rank, "agent": run.find(AGENT)}
        groups = list(find_own().glob(f"replicas-{run.name}-*"))
        assert groups
        everyone = [*noted, *((pid, start_time(pid) or 0) for pid in (*run.processes(), run.pid))]
        began = time.monotonic()
        kill(*(pids[name] for name in victims))
        gone(everyone, began)
        eventually(lambda: not any(path.exists() for path in groups), f"the end of {groups}")
        run.wait()


@needs_cgroups
def test_a_replica_that_loses_two_of_its_processes_leaves_nothing_and_starts_again(tmp_path: Path) -> None:
    """Pairs of a torchrun replica, one after the other."""
    (tmp_path / "rank.py").write_text(HIDES)
    text = f'[groups.a]\ncommand = ["rank.py"]\nENV{RESTART}\n'
    with hiding(tmp_path, text) as (run, _):
        launcher = 0
        for victims in (("shim", "launcher"), ("launcher", "rank"), ("supervisor", "launcher")):
            noted = all_pids(tmp_path, 1)
            launcher = main_pid(run, besides=launcher)
            rank = next(
                pid for pid, line in run.processes().items() if "rank.py" in line and parent_of(pid) == launcher
            )
            pids = {"supervisor": run.pid, "shim": parent_of(launcher), "launcher": launcher, "rank": rank}
            of_it = [(pid, start_time(pid) or 0) for pid in (*pids.values(),) if pid != run.pid]
            began = time.monotonic()
            kill(*(pids[name] for name in victims))
            gone([*noted, *of_it], began)
        run.assert_nothing_left()


def test_a_killed_agent_is_replaced_and_its_replicas_start_again(tmp_path: Path) -> None:
    """Nothing is left of the earlier one when they do, and it spends no budget."""
    with running(tmp_path, group("a", SLEEPS)) as run:
        rank = main_pid(run)
        first = run.find(AGENT)
        kill(first)
        second = run.find(AGENT, besides=first)
        again = main_pid(run, besides=rank)
        assert not alive(rank)
        eventually(lambda: run.status().groups[0].replicas[0].state == "ready", "a replica that is ready again")
        assert run.status().groups[0].restarts == {"node": 1}
        kill(run.pid, parent_of(again))  # the second one ends what the shim has left
        run.assert_nothing_left(timeout_s=BOUND_S)
        eventually(lambda: not alive(second), "the end of the agent")  # its environment is gone a moment before it is


def test_a_frozen_agent_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS)) as run:
        rank = main_pid(run)
        first = run.find(AGENT)
        os.kill(first, signal.SIGSTOP)
        run.find(AGENT, besides=first, timeout_s=60)
        assert main_pid(run, besides=rank) != rank
        run.signal(signal.SIGTERM)
        run.wait()
        run.assert_nothing_left(timeout_s=BOUND_S)


@needs_root
def test_without_control_groups_marks_and_descent_do_it(tmp_path: Path) -> None:
    text = group("a", HIDES.replace("(dict(os.environ), {})", "(dict(os.environ),)"), f"ENV{RESTART}")
    with hiding(tmp_path, text, command=WITHOUT_CGROUPS) as (run, _):
        path = tmp_path / "pids"
        eventually(lambda: path.exists() and len(path.read_text().split()) == 2, "both processes")
        noted = [(int(pid), start_time(int(pid)) or 0) for pid in path.read_text().split()]
        path.unlink()
        rank = main_pid(run)
        began = time.monotonic()
        kill(parent_of(rank), rank)
        gone([*noted, (rank, start_time(rank) or 0)], began)
        run.wait_line("a/0: starting (generation 2)")
        eventually(lambda: path.exists() and len(path.read_text().split()) == 2, "both processes again")
        noted = [(int(pid), start_time(int(pid)) or 0) for pid in path.read_text().split()]
        rank = main_pid(run, besides=rank)
        began = time.monotonic()
        kill(run.pid, parent_of(rank))
        gone(noted, began)
        run.assert_nothing_left()

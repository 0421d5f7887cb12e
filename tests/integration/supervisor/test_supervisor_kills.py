"""kill -9 of any one process of a run: nothing of what it affects is left, and nothing
else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.linux.processes import descendants, is_below, marked, signal_each, signal_marked, start_time
from tests.support.processes import kill, parent_of
from tests.support.programs import DAEMONIZES, SLEEPS, group
from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

RESTART = 'restart = { initial_delay = "100ms", no_progress_cycles = 0 }'


def up(run: Run, replica: str, generation: int = 1) -> list[int]:
    """Pids that a daemonizing replica has printed."""
    path = run.log(replica, generation)
    return [int(pid) for pid in eventually(lambda: path.exists() and path.read_text(), f"{path}").split()]


def main_pid(run: Run, group_index: int) -> int:
    return int(eventually(lambda: run.status().groups[group_index].replicas[0].pid, "a main process"))


@pytest.mark.parametrize("victim", ["shim", "rank", "daemon"])
def test_a_killed_part_of_a_replica_takes_its_generation_with_it_and_no_other(tmp_path: Path, victim: str) -> None:
    with running(tmp_path, group("a", DAEMONIZES, RESTART) + group("b", SLEEPS)) as run:
        daemons = up(run, "a/0")
        rank, other = main_pid(run, 0), main_pid(run, 1)
        shim = parent_of(rank)
        kill({"shim": shim, "rank": rank, "daemon": daemons[1]}[victim])
        if victim == "daemon":  # a grandchild that dies is the program's own business
            assert alive(rank)
        else:
            reason = {"shim": "the shim on node 0, which watches the ranks,", "rank": "rank 0"}[victim]
            run.wait_line(f"a/0: {reason} was killed by SIGKILL")
            run.wait_line("a/0: starting (generation 2)", timeout_s=10)
            assert not any(map(alive, [shim, rank, *daemons]))
            up(run, "a/0", 2)
            label = {"shim": "lost", "rank": "signal"}[victim]
            assert run.status().groups[0].restarts == {label: 1}
        assert main_pid(run, 1) == other
        run.end()


def test_a_killed_store_is_replaced_and_no_replica_is_touched(tmp_path: Path) -> None:
    with running(tmp_path, group("b", SLEEPS)) as run:
        rank = main_pid(run, 0)
        before = run.status().store.port
        store = run.find("store_process")
        kill(store)
        eventually(lambda: run.status().store.up and run.status().store.port != before, "another store")
        assert main_pid(run, 0) == rank
        kill(run.pid)
        run.assert_nothing_left(before)


def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    with running(tmp_path, group("a", DAEMONIZES, "replicas = 2") + group("b", SLEEPS)) as run:
        pids = up(run, "a/0") + up(run, "a/1")
        status = run.status()
        kill(run.pid)
        run.assert_nothing_left(int(status.endpoint.rpartition(":")[2]), status.store.port)
        assert not any(map(alive, pids))
        run.wait()
        # the next supervisor takes over the state folder that the killed one left as it
        # was
        with running(tmp_path, group("b", "pass")) as after:
            assert after.wait() == 0
        assert (run.state_dir / "logs.previous" / "a" / "0" / "gen-1").is_dir()


def test_the_parts_of_a_torchrun_replica_one_after_the_other(tmp_path: Path) -> None:
    """rank, launcher, forkserver, shim and supervisor: one run, to save time."""
    (tmp_path / "rank.py").write_text(DAEMONIZES)
    text = f'[groups.a]\nnproc_per_node = 2\ncommand = ["rank.py"]\n{RESTART}\n[channels.c]\npeers = ["a"]\n'
    with running(tmp_path, text) as run:
        log = run.log("a/0", rank=1)
        daemons = [*up(run, "a/0"), *eventually(lambda: log.exists() and log.read_text(), "rank 1").split()]
        launcher = main_pid(run, 0)
        forkserver = run.find("sidecar.forkserver")
        ranks = [pid for pid, line in run.processes().items() if "rank.py" in line]
        assert len(ranks) == 2
        assert {parent_of(pid) for pid in ranks} == {launcher}
        shim = parent_of(launcher)

        kill(forkserver)  # replaced, without any harm to the replica
        run.find("sidecar.forkserver", besides=forkserver)
        assert main_pid(run, 0) == launcher

        kill(ranks[1])
        run.wait_line("was killed by SIGKILL")
        run.wait_line("a/0: starting (generation 2)", timeout_s=10)
        assert not any(map(alive, [*map(int, daemons), *ranks, launcher, shim]))

        daemons = up(run, "a/0", 2)
        launcher = main_pid(run, 0)
        kill(launcher)
        run.wait_line("a/0: torchrun of node 0 was killed by SIGKILL")
        run.wait_line("a/0: starting (generation 3)", timeout_s=10)
        assert not any(map(alive, daemons))

        daemons = up(run, "a/0", 3)
        launcher = main_pid(run, 0)
        shim = parent_of(launcher)
        kill(shim)
        run.wait_line("a/0: the shim on node 0, which watches the ranks, was killed by SIGKILL")
        run.wait_line("a/0: starting (generation 4)", timeout_s=10)
        assert not any(map(alive, [*daemons, launcher]))
        assert run.status().groups[0].restarts == {"signal": 1, "lost": 2}

        daemons = up(run, "a/0", 4)
        kill(run.pid)
        run.assert_nothing_left()
        assert not any(map(alive, daemons))


def test_only_marked_or_descending_processes_are_signalled() -> None:
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "REPLICAS_SHIM": "abc"}, **pipes) as tree:  # type: ignore[call-overload]  # plain keyword arguments
        eventually(lambda: len(marked("abc")) == 2, "both processes")
        assert tree.pid in descendants(os.getpid())
        assert sorted(marked("abc")) == sorted([tree.pid, *descendants(tree.pid)])
        assert signal_marked("other", signal.SIGKILL) == []
        assert len(signal_each(descendants(tree.pid), signal.SIGKILL, lambda pid: is_below(pid, tree.pid))) == 1
        eventually(lambda: list(marked("abc")) == [tree.pid], "the end of the child")
        assert signal_marked("abc", signal.SIGKILL) == [tree.pid]
        assert tree.wait(10) == -signal.SIGKILL
    assert start_time(tree.pid) is None

"""What died first is named, also when the program itself goes on for a while.

Covers: supervisor/shim/deaths.py.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from pathlib import Path

import pytest

from replicas.linux.processes import descendants, parents
from replicas.supervisor.shim.deaths import DeathWatch
from tests.support.programs import group
from tests.support.runs import running
from tests.support.waits import eventually

ENGINE = """
import multiprocessing, os, time
def core():
    print("core", os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=core)
    child.start()
    child.join()
    print("one more line", flush=True)
    time.sleep(0.5)
    try:
        raise RuntimeError("the core is dead")
    finally:
        print("resource_tracker.py:254: UserWarning: there appear to be leaked objects\\n  warnings.warn('x')", flush=True)
"""


@pytest.fixture
def watch() -> DeathWatch:
    selector = selectors.DefaultSelector()
    return DeathWatch(selector, lambda: descendants(os.getpid()))


def known(watch: DeathWatch) -> int:
    """How many deaths it knows of."""
    for key, _ in watch._selector.select(0):
        key.data()
    return len(watch._deaths)


def watched_by(pid: int) -> set[int]:
    """The processes for which it has pidfds."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found |= {int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("Pid:")}
    return found


@pytest.mark.parametrize("waited_for", [False, True])
@pytest.mark.parametrize(("signum", "named"), [(signal.SIGSEGV, True), (signal.SIGTERM, False)])
def test_the_first_that_a_signal_killed(watch: DeathWatch, waited_for: bool, signum: int, named: bool) -> None:
    first, second = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        watch.watch_new_processes()
        first.send_signal(signum)
        if waited_for:
            first.wait(30)
        eventually(lambda: known(watch) == 1, "the end of the first")
        second.kill()
        eventually(lambda: known(watch) == 2, "the end of the second")
        death = watch.first([second.pid])
        if waited_for and death is None and named:
            pytest.skip("this kernel does not tell how a process ended that was waited for (Linux 6.15 does)")
        assert (death.pid if death is not None else 0) == (first.pid if named else 0)
        assert watch.first([first.pid]) is None
        if named:
            assert str(death) == f"its process {first.pid} (sleep) was killed by SIGSEGV"
    finally:
        for one in (first, second):
            one.kill()
            one.wait(30)


def test_the_status_names_the_child_that_was_killed_and_the_exception(tmp_path: Path) -> None:
    rules = 'restart = { policy = "never" }'
    with running(tmp_path, group("engine", ENGINE, rules)) as run:
        log = run.log("engine/0")
        core = int(eventually(lambda: log.exists() and log.read_text().partition("core ")[2], "the core").split()[0])
        shim = parents(int(run.status().groups[0].replicas[0].pid or 0))[0]
        eventually(lambda: core in watched_by(shim), "that its shim knows of the core")
        os.kill(core, signal.SIGKILL)
        line = run.wait_line("engine/0: failed: ", timeout_s=90.0)
        assert f"rank 0 exited with code 1 after its process {core} (python" in line
        assert ") was killed by SIGKILL: RuntimeError: the core is dead; " in line

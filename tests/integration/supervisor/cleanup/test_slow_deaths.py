"""Processes that SIGKILL does not end at once: they are named and waited for, and
nobody else ends because of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from replicas.control.exit_codes import CUT, DONE
from replicas.linux.processes import children, parents, start_time
from tests.support.machine.freezer import freezes, frozen
from tests.support.programs import SLEEPS, group
from tests.support.runs import ROOT, Run, alive, running
from tests.support.waits import eventually

SLEEPER = f"'{sys.executable}', '-c', 'import time; time.sleep(600)'"
NAMESPACE = f"import os; os.execvp('unshare', ['unshare', '--pid', '--fork', {SLEEPER}])"
"""Its child is the first process of a pid namespace: it dies only when all others in
there have been waited for."""


def pid_of(run: Run, name: str) -> int:
    """Pid of the main process of a replica."""

    def look() -> int:
        return next(one.pid or 0 for its in run.status().groups for one in its.replicas if one.name == name)

    return int(eventually(look, f"the main process of {name}"))


@contextmanager
def not_waited_for(pid: int) -> Iterator[int]:
    """A namespace whose first process cannot die, as nobody waits for another one in
    it."""
    first = int(eventually(lambda: next(iter(children(pid)), 0), "the first process of the namespace"))
    with subprocess.Popen(["nsenter", "--target", str(first), "--pid", "sleep", "600"]) as outside:
        try:
            eventually(lambda: children(outside.pid), "a process that was put into the namespace")
            outside.send_signal(signal.SIGSTOP)
            yield first
        finally:
            outside.send_signal(signal.SIGCONT)
            outside.wait(30)


def has_namespaces() -> bool:
    command = ["unshare", "--pid", "--fork", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


COMMAND = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]
CASES: dict[str, tuple[str, Callable[[], bool], Callable[[int], AbstractContextManager[int]], bool]] = {
    "its shim was killed": (SLEEPS, freezes, frozen, True),
    "it was asked to end": (SLEEPS, freezes, frozen, False),
    "it has lost its memory": (NAMESPACE, has_namespaces, not_waited_for, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_process_that_does_not_die_is_named_and_waited_for(tmp_path: Path, case: str) -> None:
    code, possible, holding, by_kill = CASES[case]
    if not possible():
        pytest.skip("a process cannot be held so here")
    rules = 'restart = { initial_delay = "10ms" }\nstop_timeout = "500ms"'
    with running(tmp_path, group("trainer", SLEEPS) + group("rollout", code, rules)) as run, ExitStack() as stack:
        run.wait_line("rollout/0: ready", timeout_s=90.0)
        trainer, main = pid_of(run, "trainer/0"), pid_of(run, "rollout/0")
        stuck = stack.enter_context(holding(main))
        started = start_time(stuck)
        if by_kill:
            os.kill(parents(main)[0], signal.SIGKILL)
        else:
            order = [*COMMAND, "restart", "rollout/0", "--no-wait", "-c", str(run.config)]
            subprocess.run(order, check=True, cwd=ROOT, capture_output=True)
        run.wait_line(f"held up by process {stuck} (", timeout_s=90.0)
        (rollout,) = next(one.replicas for one in run.status().groups if one.name == "rollout")
        assert (rollout.state, rollout.generation) == ("draining", 1)
        assert f"held up by process {stuck} (" in rollout.reason
        assert start_time(stuck) == started
        stack.close()
        run.wait_line("rollout/0: starting (generation 2)", timeout_s=90.0)
        assert not alive(stuck)
        run.wait_line("rollout/0: ready", timeout_s=90.0)
        assert pid_of(run, "trainer/0") == trainer
        run.signal(signal.SIGTERM)
        assert run.wait() in (DONE, CUT), "half a second to end may be too short here"
        run.assert_nothing_left()

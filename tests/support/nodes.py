"""Runs over several nodes, each with a real agent, here all on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replicas.linux.processes import descendants, signal_each
from replicas.status import RunStatus
from replicas.trust.tokens import OPERATOR_FILE
from tests.support.programs import group
from tests.support.runs import MARK, ROOT, Run, alive, running
from tests.support.waits import eventually

__all__ = ["AGENT_COMMAND", "LEASE_S", "Agent", "over_nodes", "placed", "ready", "replicas_of", "states", "there"]

LEASE_S = 8.0
AGENT_COMMAND = (sys.executable, "-m", "replicas", "agent")


class Agent:
    """``replicas agent`` in a process of its own, as on another machine.

    :param gpus: its ``CUDA_VISIBLE_DEVICES``; None: it looks for GPUs.
    """

    def __init__(self, run: Run, name: str, *words: str, token: str = "", gpus: str | None = None) -> None:
        self.name, self.state_dir = name, run.folder / f"agent-{name}"
        self.output = run.folder / f"agent-{name}.txt"
        token = token or (run.state_dir / OPERATOR_FILE).read_text()
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, MARK: run.mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        env |= {"TMPDIR": str(run.scratch), "REPLICAS_JOIN": f"{token}@{run.endpoint()}"}
        env |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        command = [*AGENT_COMMAND, "--name", name, "--state-dir", str(self.state_dir)]
        with self.output.open("ab") as output:
            self.popen = subprocess.Popen(
                [*command, *words], env=env, cwd=run.folder, stdin=subprocess.DEVNULL, stderr=output, stdout=output
            )

    def wait(self, timeout_s: float = 30.0) -> int:
        return self.popen.wait(timeout_s)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def kill_all(self) -> None:
        """All processes of the node, at once: nobody says goodbye."""
        signal_each([self.popen.pid, *descendants(self.popen.pid)], signal.SIGKILL, alive)
        self.popen.wait()

    def log(self, replica: str, generation: int = 1, rank: int = 0) -> Path:
        return self.state_dir / "logs" / replica / f"gen-{generation}" / f"rank-{rank}.log"


@contextmanager
def over_nodes(folder: Path, text: str, nodes: Sequence[str], **options: Any) -> Iterator[tuple[Run, dict[str, Agent]]]:
    """A run with these agents besides its own, all up."""
    head = (
        f'[cluster]\nlease = "{LEASE_S:g}s"\nmin_nodes = {1 + len(nodes)}\nlabels = {{ place = "here" }}\n'
        + options.pop("head", "")
    )
    with running(folder, text, head=head, **options) as run:
        run.wait_line("control at", timeout_s=60)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # those of this machine can be offered once
        agents = {name: Agent(run, name, "--label", "place=there", gpus=gpus) for name in nodes}
        try:
            for name in nodes:
                eventually(lambda name=name: states(run).get(name) == "up", f"node {name}")  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            yield run, agents
        finally:
            for agent in agents.values():
                agent.kill()


def states(run: Run) -> dict[str, str]:
    return {node.name: node.state for node in run.status().nodes}


def placed(where: str, *, spread: bool = True) -> str:
    return f'[groups.{{}}.placement]\nspread = {str(spread).lower()}\nlabels = {{{{ place = "{where}" }}}}\n'


def replicas_of(status: RunStatus, name: str) -> dict[str, tuple[str, int, int | None, str]]:
    """State, generation, pid and nodes of each replica of a group."""
    (found,) = [one for one in status.groups if one.name == name]
    return {one.name: (one.state, one.generation, one.pid, " ".join(one.nodes)) for one in found.replicas}


def ready(run: Run, name: str) -> dict[str, tuple[str, int, int | None, str]]:
    """The replicas of a group, once all are ready."""

    def all_ready() -> dict[str, tuple[str, int, int | None, str]] | None:
        found = replicas_of(run.status(), name)
        return found if all(state == "ready" for state, *_ in found.values()) else None

    return dict(eventually(all_ready, f"group {name}, ready", timeout_s=60))


def there(name: str, program: str, more: str = "", where: str = "there") -> str:
    return group(name, program, f"{more}\n[groups.{name}.restart]\ninitial_delay = 0\n") + placed(where).format(name)

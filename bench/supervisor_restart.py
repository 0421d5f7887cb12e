"""From the kill of a replica to its program running again, against how long its
launcher takes to start by itself?

Theory of operation
===================

Killed with -9 are the program, torchrun's process, and the shim, of a replica that has
no backoff to speak of (``initial_delay`` is 1 ms). The time ends with the clock that
the next program reads first. Beside it, in turn: ``torchrun`` started by hand with the
same program, and, for ``launcher = "exec"``, the bare program.

By itself torchrun sleeps before it joins its rendezvous, for a random time of up to 0.3
s, which makes its start scatter; with one node, or a few, our launcher does not. So a
replica can be back sooner than a bare torchrun is up.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.trees import Supervised, Tree, send, supervised, until, worker

__all__ = ["TORCHRUN", "RestartSample", "measure"]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
VICTIMS = {"exec": ("program", "shim"), "torchrun": ("program", "torchrun", "shim")}


@dataclass(frozen=True)
class RestartSample:
    """``what``: who was killed, or ``start`` of the bare launcher. Seconds until the
    program runs."""

    launcher: str
    what: str
    seconds: float


def _text(folder: Path, launcher: str) -> str:
    command = ", ".join(f'"{word}"' for word in worker("plain", folder / "workers.jsonl"))
    return (
        f'[groups.one]\nlauncher = "{launcher}"\ncommand = [{command}]\nstop_timeout = "1s"\n'
        'restart = { policy = "always", initial_delay = "1ms", max_delay = "1ms", max_restarts = 1000 }\n'
    )


def _restarts(run: Supervised, launcher: str) -> Iterator[RestartSample]:
    until(run.told, "the program runs")
    for what in VICTIMS[launcher]:
        until(lambda: run.status().ready, "the replica is ready")
        if what == "program":
            pid = run.told()[-1]["pid"]
            victim = next(process for process in run.processes() if process[0] == pid)
        else:
            victim = run.find("supervisor.shim.launcher" if what == "torchrun" else "supervisor.shim.shim")
        at = _kill(victim)
        yield RestartSample(launcher, what, _next(run, at) - at)


def _next(run: Supervised, at: float) -> float:
    """When the next program was up that came after ``at``."""

    def later() -> list[float]:
        return [line["at"] for line in run.told() if line["at"] > at]

    return until(later, "the program runs again")[0]


def _kill(victim: tuple[int, int]) -> float:
    at = time.monotonic()
    send(victim, signal.SIGKILL)
    return at


@contextmanager
def _bare(folder: Path, launcher: str) -> Iterator[Tree]:
    folder.mkdir(parents=True)
    program = worker("plain", folder / "workers.jsonl")
    tree = Tree([*TORCHRUN, "--nproc-per-node=1", *program] if launcher == "torchrun" else program, folder)
    try:
        yield tree
    finally:
        tree.close()


def measure(folder: Path, repetitions: int, done: Callable[[RestartSample], None]) -> list[RestartSample]:
    samples: list[RestartSample] = []
    for launcher in VICTIMS:
        inside = folder / launcher
        with supervised(inside, _text(inside, launcher)) as run:
            for repetition in range(repetitions):
                with _bare(folder / f"bare-{launcher}-{repetition}", launcher) as tree:
                    told = until(tree.told, "the bare program runs")
                    samples.append(RestartSample(launcher, "start", told[0]["at"] - tree.began))
                done(samples[-1])
                for sample in _restarts(run, launcher):
                    samples.append(sample)
                    done(sample)
    return samples

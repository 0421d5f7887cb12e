"""What is left of a torchrun job of two ranks when its supervisor, its launcher, or
both are killed with -9, or told to end?

Theory of operation
===================

The same job under each contender: ``plain`` ranks, and ``stubborn`` ones, which ignore
SIGTERM and have three daemons each (``bench/tree_worker.py``): eight processes beside
torchrun's. Of the processes of the job as it was at the fault those count that are
alive ``AFTER_S`` seconds later; after a SIGTERM to the supervisor, so long after that
has ended. Whatever restarts the job may start a new one: that does not count.

supervisord and circus run with the settings that kill most: ``stopasgroup`` and
``killasgroup``, and ``stop_children``. Bare torchrun is its own supervisor: killing
either is the same.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers import python_with
from bench.supervisor_restart import TORCHRUN
from bench.trees import Process, Supervised, Tree, alive, send, until, worker

__all__ = ["AFTER_S", "FAULTS", "KINDS", "LeftoverSample", "contenders", "measure"]

RANKS = 2
AFTER_S = 5.0
STOP_S = 5
END_TIMEOUT_S = 90.0
KINDS = ("plain", "stubborn")
FAULTS = ("kill -9 supervisor", "kill -9 launcher", "kill -9 both", "SIGTERM supervisor")

SUPERVISORD = """[supervisord]
nodaemon=true
logfile={folder}/supervisord.log
pidfile={folder}/supervisord.pid
[program:job]
command={command}
stopasgroup=true
killasgroup=true
stopwaitsecs={stop_s}
redirect_stderr=true
stdout_logfile={folder}/job.log
"""
CIRCUS = """[circus]
endpoint = ipc://{folder}/control
pubsub_endpoint = ipc://{folder}/events
[watcher:job]
cmd = {command}
numprocesses = 1
copy_env = True
stop_children = True
graceful_timeout = {stop_s}
"""


@dataclass(frozen=True)
class LeftoverSample:
    """``left``: of ``of`` processes; ``lines``: their command lines. ``took_s``: from
    SIGTERM to the supervisor's end."""

    contender: str
    kind: str
    fault: str
    left: int
    of: int
    lines: list[str]
    took_s: float | None = None


def contenders() -> list[str]:
    """By name; those that are not installed are left out."""
    found = [name for name in ("supervisor", "circus") if python_with(name) is not None]
    return ["replicas", "torchrun", *("supervisord" if name == "supervisor" else name for name in found)]


def _start(contender: str, kind: str, folder: Path) -> Tree:
    folder.mkdir(parents=True)
    program = worker(kind, folder / "workers.jsonl")
    job = [*TORCHRUN, f"--nproc-per-node={RANKS}", *program]
    where = {"folder": folder, "command": " ".join(job), "stop_s": STOP_S}
    if contender == "replicas":
        command = ", ".join(f'"{word}"' for word in program)
        text = f'[groups.job]\ncommand = [{command}]\nnproc_per_node = {RANKS}\nstop_timeout = "{STOP_S}s"\n'
        return Supervised(folder, text)
    if contender == "torchrun":
        return Tree(job, folder)
    if contender == "supervisord":
        (folder / "supervisord.conf").write_text(SUPERVISORD.format(**where))
        arguments = ["-m", "supervisor.supervisord", "-n", "-c", str(folder / "supervisord.conf")]
        return Tree([python_with("supervisor") or sys.executable, *arguments], folder)
    (folder / "circus.ini").write_text(CIRCUS.format(**where))
    return Tree([python_with("circus") or sys.executable, "-m", "circus.circusd", str(folder / "circus.ini")], folder)


def _hit(tree: Tree, fault: str) -> float | None:
    """Do it, and wait; seconds that a SIGTERM took to end the supervisor."""
    launcher = tree.find("supervisor.shim.launcher", "torch.distributed.run")
    if fault == "SIGTERM supervisor":
        began = time.monotonic()
        send(tree.main, signal.SIGTERM)
        tree.popen.wait(END_TIMEOUT_S)
        took_s = time.monotonic() - began
        time.sleep(AFTER_S)
        return took_s
    victims = {"kill -9 supervisor": [tree.main], "kill -9 launcher": [launcher], "kill -9 both": [tree.main, launcher]}
    for victim in victims[fault]:
        send(victim, signal.SIGKILL)
    time.sleep(AFTER_S)
    return None


def _once(contender: str, kind: str, fault: str, folder: Path) -> LeftoverSample:
    tree = _start(contender, kind, folder)
    try:
        until(lambda: len(tree.told()) == RANKS, f"{RANKS} ranks under {contender}")
        job = tree.processes()
        if fault == "kill -9 launcher":  # the others stay, and may go on
            job = _job(tree, job)
        took_s = _hit(tree, fault)
        left = alive(job)
        return LeftoverSample(contender, kind, fault, len(left), len(job), sorted(job[one] for one in left), took_s)
    finally:
        tree.close()


def _job(tree: Tree, processes: dict[Process, str]) -> dict[Process, str]:
    """Torchrun, its ranks and their daemons."""
    told = {pid for line in tree.told() for pid in (line["pid"], *line["daemons"])}
    launcher = tree.find("supervisor.shim.launcher", "torch.distributed.run")
    return {one: line for one, line in processes.items() if one[0] in told or one == launcher}


def measure(folder: Path, kinds: tuple[str, ...], done: Callable[[LeftoverSample], None]) -> list[LeftoverSample]:
    samples: list[LeftoverSample] = []
    for kind in kinds:
        for fault in FAULTS:
            for contender in contenders():
                if contender == "torchrun" and fault in ("kill -9 launcher", "kill -9 both"):
                    continue
                samples.append(_once(contender, kind, fault, folder / f"{len(samples)}"))
                done(samples[-1])
    return samples

"""What does a supervisor that is killed and replaced cost a run with ``adopt``?

Theory of operation
===================

A trainer and two rollouts of one machine; the trainer makes steps of 10 ms, and
publishes 1 MiB after each, waiting for the commit. The supervisor is killed with -9 and
another one started at once. *Taken over*: from its start to the first status in which
all are ready. *Commit*: from its start to the next commit. *Step*: the trainer's
longest step around that, without its publishes, beyond the median of all. *Publish*:
the longest call of ``publish`` and wait for its commit, which has to wait for the new
supervisor. *Start*: of a whole run, from the start of the supervisor to all ready, for
comparison.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.trees import Supervised, alive, send, supervised, until
from replicas.control.client import Client
from replicas.errors import Disconnected
from replicas.linux.processes import start_time

__all__ = ["AdoptSample", "measure"]

UP_TIMEOUT_S = 180.0
SETTLE_S = 3.0
LOOK_S = 0.02
TRAINER = """
import json, sys, time, torch, replicas
weight = torch.zeros(1 << 18)
with open(sys.argv[1], "a", buffering=1) as out, replicas.join("policy") as channel:
    while True:
        began = time.monotonic()
        time.sleep(0.01)
        stepped = time.monotonic()
        receipt = channel.publish({"w": weight}, deadline=120).wait()
        at = time.monotonic()
        line = {"at": at, "step_s": stepped - began, "publish_s": at - stepped, "version": receipt.version}
        out.write(json.dumps(line) + "\\n")
"""
ROLLOUT = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait():
            pass
"""


@dataclass(frozen=True)
class AdoptSample:
    """Seconds; ``step_growth_s``: the longest step less the median. ``same``: all
    processes and generations are those of before."""

    start_s: float
    taken_over_s: float
    commit_s: float
    step_growth_s: float
    publish_s: float
    same: bool
    versions_missed: int


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _all_ready(run: Supervised) -> dict[str, tuple[int | None, int]] | None:
    """Pids and generations by replica, once all are ready; of a supervisor that
    answers."""
    time.sleep(LOOK_S)
    try:
        status = Client(f"unix:{run.state_dir / 'control.sock'}").status()
    except (Disconnected, OSError):
        return None
    found = {one.name: one for group in status.groups for one in group.replicas}
    if any(one.state != "ready" or one.pid is None for one in found.values()):
        return None
    return {name: (one.pid, one.generation) for name, one in found.items()}


def measure(folder: Path, repetitions: int, done: Callable[[AdoptSample], None]) -> list[AdoptSample]:
    said = folder / "steps.jsonl"
    trainer = json.dumps([sys.executable, "-c", TRAINER, str(said)])
    rollout = json.dumps([sys.executable, "-c", ROLLOUT])
    text = f'[groups.trainer]\nlauncher = "exec"\ncommand = {trainer}\n'
    text += f'[groups.rollout]\nlauncher = "exec"\nreplicas = 2\ncommand = {rollout}\n'
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\ndeadline = "120s"\n'
    samples: list[AdoptSample] = []
    with supervised(folder, text, 'adopt = "120s"') as run:
        before = until(lambda: _all_ready(run), "all are ready", UP_TIMEOUT_S)
        start_s, supervisor = time.monotonic() - run.began, run.main
        for _ in range(repetitions):
            time.sleep(SETTLE_S)
            at = len(_lines(said))
            send(supervisor, signal.SIGKILL)
            until(lambda victim=supervisor: not alive([victim]), "the supervisor is dead")  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            began = time.monotonic()
            popen = run.start(run.command)
            supervisor = (popen.pid, start_time(popen.pid) or 0)
            after = until(lambda: _all_ready(run), "all are ready again", UP_TIMEOUT_S)
            taken_over_s = time.monotonic() - began
            commit = until(lambda since=began: _next(said, since), "the next commit", UP_TIMEOUT_S)  # type: ignore[misc]  # see above
            assert commit is not None
            time.sleep(SETTLE_S)
            lines = _lines(said)
            around = lines[max(0, at - 5) :]
            versions = [line["version"] for line in lines]
            samples.append(
                AdoptSample(
                    start_s,
                    taken_over_s,
                    commit - began,
                    max(line["step_s"] for line in around) - statistics.median(line["step_s"] for line in lines),
                    max(line["publish_s"] for line in around),
                    before == after,
                    versions[-1] - versions[0] + 1 - len(versions),
                )
            )
            done(samples[-1])
    return samples


def _next(said: Path, began: float) -> float | None:
    return next((float(line["at"]) for line in _lines(said) if line["at"] > began), None)

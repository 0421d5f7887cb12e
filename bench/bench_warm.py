"""What does ``groups.NAME.preload`` save, in time and memory?

    python bench/bench_warm.py [--quick] [--repetitions N] [--replicas N]

A trainer that has published a small model, and rollouts that load it, in runs of a
supervisor on this host: *cold*, and *warm* with ``preload = ["torch"]``. Measured, in
turn:

* from kill -9 of the rank of a rollout until the replica is ready again, with the
  newest version; beside it ``torchrun --max-restarts`` of a script that imports the
  same and makes the same model, from kill -9 of its worker until the next one has got
  as far (it joins nothing, and loads no version);
* from the start of the supervisor until 50 rollouts are ready (8 with ``--quick``), and
  the memory of all processes then (the sum of their PSS, which shares pages out).
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support import Bar, Spread, busy_ratio, machine, rotated, run_bench, show, write
from bench.trees import Supervised, Tree, pss_nbytes, send, supervised, until

TRAINER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    channel.publish(torch.nn.Linear(100, 100)).wait(60)
    time.sleep(3600)
"""
ROLLOUT = """
import torch, replicas
model = torch.nn.Linear(100, 100)
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            update.load_into(model)
"""
ALONE = """
import os, sys, time
import torch, replicas
replicas.join
model = torch.nn.Linear(100, 100)
open(sys.argv[1], "a", buffering=1).write(f'{{"at": {time.monotonic()}, "pid": {os.getpid()}, "daemons": []}}' + chr(10))
time.sleep(3600)
"""
KINDS = ("cold", "warm")
START_S = 300.0


@contextmanager
def fleet(folder: Path, kind: str, replicas: int) -> Iterator[Supervised]:
    """A run whose rollouts are all ready, with the newest version."""
    folder.mkdir()
    for name, text in (("trainer", TRAINER), ("rollout", ROLLOUT)):
        (folder / f"{name}.py").write_text(text)
    rules = 'restart = { initial_delay = "1ms", max_delay = "1ms", max_restarts = 1000, no_progress_cycles = 0 }\n'
    text = f'[groups.trainer]\ncommand = ["{folder}/trainer.py"]\n'
    text += f'[groups.rollout]\ncommand = ["{folder}/rollout.py"]\nreplicas = {replicas}\n{rules}'
    text += 'preload = ["torch"]\n' if kind == "warm" else ""
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with supervised(folder / "run", text) as run:
        until(lambda: run.status().ready, "all replicas are ready", START_S)
        yield run


def restart_s(run: Supervised) -> float:
    """Seconds from kill -9 of a rollout to its readiness."""

    def rollout() -> Any:
        (group,) = [one for one in run.status().groups if one.name == "rollout"]
        return group.replicas[0]

    before = rollout()
    rank = next(one for one, line in run.processes().items() if line.endswith("/rollout.py"))
    began = time.monotonic()
    send(rank, signal.SIGKILL)
    until(lambda: (now := rollout()).generation > before.generation and now.state == "ready", "a rollout is back")
    return time.monotonic() - began


@contextmanager
def torchrun(folder: Path) -> Iterator[Tree]:
    """The script under torchrun, once it has got so far."""
    folder.mkdir()
    (folder / "alone.py").write_text(ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
    tree = Tree([*command, str(folder / "alone.py"), str(folder / "workers.jsonl")], folder)
    try:
        until(tree.told, "the script runs", START_S)
        yield tree
    finally:
        tree.close()


def torchrun_restart_s(tree: Tree) -> float:
    told = tree.told()
    began = time.monotonic()
    send(next(one for one in tree.processes() if one[0] == told[-1]["pid"]), signal.SIGKILL)
    until(lambda: len(tree.told()) > len(told), "the script runs again")
    return float(tree.told()[-1]["at"]) - began


def restarts(folder: Path, repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"cold": [], "warm": [], "torchrun": []}
    with (
        fleet(folder / "cold", "cold", 1) as cold,
        fleet(folder / "warm", "warm", 1) as warm,
        torchrun(folder / "torchrun") as alone,
    ):
        ways = {"cold": lambda: restart_s(cold), "warm": lambda: restart_s(warm)}
        ways["torchrun"] = lambda: torchrun_restart_s(alone)
        for number in range(repetitions):
            for name in rotated([*ways], number):
                found[name].append(ways[name]())
    return found


def starts(folder: Path, replicas: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {kind: {"seconds": [], "nbytes": []} for kind in KINDS}
    for number in range(repetitions):
        for kind in rotated(KINDS, number):
            with fleet(folder / f"{kind}-{number}", kind, replicas) as run:
                found[kind]["seconds"].append(time.monotonic() - run.began)
                found[kind]["nbytes"].append(float(pss_nbytes(run.processes())))
    return found


async def run(options: argparse.Namespace) -> None:
    repetitions = options.repetitions or (3 if options.quick else 7)
    replicas = options.replicas or (8 if options.quick else 50)
    result: dict[str, Any] = {"machine": machine(), "busy_before": await busy_ratio(), "replicas": replicas}
    with tempfile.TemporaryDirectory(prefix="replicas-bench-") as name:
        again = restarts(Path(name), repetitions)
        started = starts(Path(name), replicas, max(1, repetitions // 2))
    median = {name: statistics.median(found) for name, found in again.items()}
    up = {kind: statistics.median(found["seconds"]) for kind, found in started.items()}
    memory = {kind: statistics.median(found["nbytes"]) for kind, found in started.items()}
    figures = {
        "kill -9 to ready, of cold (at most 0.35)": (median["warm"] / median["cold"], 0.35),
        "kill -9 to ready, of torchrun --max-restarts (at most 0.33)": (median["warm"] / median["torchrun"], 1 / 3),
        f"{replicas} rollouts ready, of cold (at most 0.25)": (up["warm"] / up["cold"], 0.25),
        f"memory of {replicas} rollouts, of cold (at most 0.4)": (memory["warm"] / memory["cold"], 0.4),
    }
    bars = [Bar(text, figure, figure <= limit) for text, (figure, limit) in figures.items()]
    rows = [[f"kill -9 to ready, {name}", *Spread(found).cells()] for name, found in again.items()]
    rows += [[f"{replicas} rollouts ready, {kind}", *Spread(started[kind]["seconds"]).cells()] for kind in KINDS]
    rows += [[f"memory, {kind}", f"{memory[kind] / (1 << 20):,.0f} MiB", ""] for kind in KINDS]
    show("Warm starts", ["", "median", "range"], rows, "\n".join(bar.line() for bar in bars))
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    write("bench_warm", {**result, "restarts": again, "starts": started, "bars": kept})


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts of replicas with and without preload.")
    parser.add_argument("--quick", action="store_true", help="8 rollouts, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--replicas", type=int, default=None, help="rollouts that are started; default 50")
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()

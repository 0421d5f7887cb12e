"""What does ``groups.NAME.preload`` save, in time and memory?

    python bench/bench_warm.py [--quick] [--repetitions N] [--replicas N] [--against PY]

A trainer that has published a small model, and rollouts that load it, in runs of a
supervisor on this host: *cold*, and *warm* with ``preload = ["torch"]``; *before* is
cold, with the release that ``--against`` has installed. Measured, in turn:

* from kill -9 of the rank of a rollout until the replica is ready again, with the
  newest version; beside it ``torchrun --max-restarts`` of a script that imports the
  same and makes the same model, from kill -9 of its worker until the next one has got
  as far (it joins nothing, and loads no version);
* from the start of the supervisor until 50 rollouts are ready (8 with ``--quick``), and
  the memory of all processes then (the sum of their PSS, which shares pages out);
* ``examples/quickstart``, from the start of the supervisor until its trainer has said
  that all rollouts have loaded the last version.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.support import ROOT, Bar, Spread, busy_ratio, machine, rotated, run_bench, show, write
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
START_S = 300.0
QUICKSTART = ROOT / "examples" / "quickstart"
LAST, VERSIONS = "loaded by all rollouts", 3


@dataclass(frozen=True)
class Kind:
    """A way to start: ``python`` has the library; ``preload``: keys of each group."""

    python: str = sys.executable
    preload: str = ""


WARM = Kind(preload='preload = ["torch"]\n')


@contextmanager
def fleet(folder: Path, kind: Kind, replicas: int) -> Iterator[Supervised]:
    """A run whose rollouts are all ready, with the newest version."""
    folder.mkdir()
    for name, text in (("trainer", TRAINER), ("rollout", ROLLOUT)):
        (folder / f"{name}.py").write_text(text)
    rules = 'restart = { initial_delay = "1ms", max_delay = "1ms", max_restarts = 1000, no_progress_cycles = 0 }\n'
    text = f'[groups.trainer]\ncommand = ["{folder}/trainer.py"]\n'
    text += f'[groups.rollout]\ncommand = ["{folder}/rollout.py"]\nreplicas = {replicas}\n{rules}'
    text += kind.preload
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with supervised(folder / "run", text, python=kind.python) as run:
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


def restarts(folder: Path, kinds: dict[str, Kind], repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in (*kinds, "torchrun")}
    with ExitStack() as stack:
        alone = stack.enter_context(torchrun(folder / "torchrun"))
        ways: dict[str, Callable[[], float]] = {"torchrun": partial(torchrun_restart_s, alone)}
        for name, kind in kinds.items():
            ways[name] = partial(restart_s, stack.enter_context(fleet(folder / name, kind, 1)))
        for number in range(repetitions):
            for name in rotated([*ways], number):
                found[name].append(ways[name]())
    return found


def starts(folder: Path, kinds: dict[str, Kind], replicas: int, repetitions: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "nbytes": []} for name in kinds}
    for number in range(repetitions):
        for name in rotated([*kinds], number):
            with fleet(folder / f"{name}-{number}", kinds[name], replicas) as run:
                found[name]["seconds"].append(time.monotonic() - run.began)
                found[name]["nbytes"].append(float(pss_nbytes(run.processes())))
    return found


def _all_loaded(folder: Path) -> bool:
    """Whether the trainer of the quickstart in this folder has told of all versions."""
    logs = folder.glob(".replicas/quickstart/logs/trainer/0/gen-1/rank-0.log")
    return any(log.read_text().count(LAST) == VERSIONS for log in logs)


def quickstarts(folder: Path, kinds: dict[str, Kind], repetitions: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in kinds}
    head = re.compile(r"^(\[groups\.\w+\]\n)preload.*\n", re.MULTILINE)
    for number in range(repetitions):
        for name in rotated([*kinds], number):
            kind, where = kinds[name], folder / f"quickstart-{name}-{number}"
            shutil.copytree(QUICKSTART, where, ignore=shutil.ignore_patterns(".*"))
            config = where / "run.toml"
            config.write_text(head.sub(rf"\1{kind.preload}", config.read_text()))
            root = ROOT if kind.python == sys.executable else None
            tree = Tree([kind.python, "-m", "replicas.supervisor", str(config)], where, root=root)
            try:
                until(partial(_all_loaded, where), "the last version is loaded", START_S)
                found[name].append(time.monotonic() - tree.began)
            finally:
                tree.close()
    return found


async def run(options: argparse.Namespace) -> None:
    repetitions = options.repetitions or (3 if options.quick else 7)
    replicas = options.replicas or (8 if options.quick else 50)
    kinds = {"cold": Kind(), "warm": WARM}
    if options.against:
        kinds["before"] = Kind(options.against)
    old = "before" if options.against else "cold"
    result: dict[str, Any] = {"machine": machine(), "busy_before": await busy_ratio(), "replicas": replicas}
    with tempfile.TemporaryDirectory(prefix="replicas-bench-") as name:
        again = restarts(Path(name), kinds, repetitions)
        first = quickstarts(Path(name), kinds, repetitions)
        started = starts(Path(name), kinds, replicas, max(1, repetitions // 2))
    median = {name: statistics.median(found) for name, found in again.items()}
    quick = {name: statistics.median(found) for name, found in first.items()}
    up = {name: statistics.median(found["seconds"]) for name, found in started.items()}
    memory = {name: statistics.median(found["nbytes"]) for name, found in started.items()}
    figures = {
        f"kill -9 to ready, of {old} (at most 0.35)": (median["warm"] / median[old], 0.35),
        "kill -9 to ready, of torchrun --max-restarts (at most 0.33)": (median["warm"] / median["torchrun"], 1 / 3),
        f"{replicas} rollouts ready, of {old} (at most 0.25)": (up["warm"] / up[old], 0.25),
        f"memory of {replicas} rollouts, of {old} (at most 0.4)": (memory["warm"] / memory[old], 0.4),
        f"quickstart to the last version, of {old} (at most 0.5)": (quick["warm"] / quick[old], 0.5),
    }
    bars = [Bar(text, figure, figure <= limit) for text, (figure, limit) in figures.items()]
    rows = [[f"kill -9 to ready, {name}", *Spread(found).cells()] for name, found in again.items()]
    rows += [[f"quickstart, {name}", *Spread(found).cells()] for name, found in first.items()]
    rows += [
        [f"{replicas} rollouts ready, {name}", *Spread(found["seconds"]).cells()] for name, found in started.items()
    ]
    rows += [[f"memory, {name}", f"{found / (1 << 20):,.0f} MiB", ""] for name, found in memory.items()]
    show("Warm starts", ["", "median", "range"], rows, "\n".join(bar.line() for bar in bars))
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    samples = {"restarts": again, "quickstarts": first, "starts": started}
    write("bench_warm", {**result, **samples, "bars": kept})


def main() -> None:
    parser = argparse.ArgumentParser(description="Starts of replicas with and without preload.")
    parser.add_argument("--quick", action="store_true", help="8 rollouts, 3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 7")
    parser.add_argument("--replicas", type=int, default=None, help="rollouts that are started; default 50")
    parser.add_argument("--against", metavar="PYTHON", help="interpreter with another release, to compare with")
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()

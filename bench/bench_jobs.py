"""How soon does a run that is submitted to a cluster commit its first version?

    python bench/bench_jobs.py [--quick] [--repetitions N] [--only slurm|ray]

A trainer and two rollouts on a Slurm of two nodes and on a Ray of three raylets, all on
this machine (``tests/engines``, which says what they need; what is missing is left
out). By what takes turns:

* *submitted*: from ``ray job submit``, or from the time at which Slurm gives the
  submitted job its nodes, to the first commit;
* *its own*: what the scheduler takes to start something trivial in the same places;
* *alone*: the same programs under a supervisor that is started by hand, to the first
  commit.

*added* is the median of *submitted* without those of the other two: what the supervisor
and the agents take because they are started in a job.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support import Bar, Spread, busy_ratio, machine, rotated, run_bench, show, write

LIMIT_S = 3.0
REPETITIONS, QUICK = 7, 3
PARTS = ("submitted", "its own", "alone")
Measure = Callable[[Path], float]
"""Seconds of one of :data:`PARTS`, in a folder of its own."""


@contextmanager
def slurm(folder: Path) -> Iterator[list[Measure] | str]:
    """What measures on a cluster; a text: why there is none."""
    from tests.engines import test_slurm
    from tests.engines.programs import slurm_cluster

    if reason := slurm_cluster.why_no_slurm():
        yield reason
        return
    with slurm_cluster.slurm(folder) as cluster:
        parts = (test_slurm.queued, test_slurm.slurms_own, test_slurm.alone)
        yield [lambda where, part=part: part(cluster, where) for part in parts]  # type: ignore[misc]  # mypy cannot infer a lambda with a default


@contextmanager
def ray(_: Path) -> Iterator[list[Measure] | str]:
    try:
        from tests.engines import test_ray_job
        from tests.engines.programs import ray_cluster
    except ModuleNotFoundError as error:
        yield f"needs {error.name}"
        return
    with ray_cluster.raylets(1, 1, 1, include_dashboard=True, dashboard_port=0) as cluster:

        def measured(part: Callable[[Any, Path], float], where: Path) -> float:
            took_s = part(cluster, where)
            cluster.wait_until_free(timeout_s=60)
            return took_s

        parts = (test_ray_job.submitted, test_ray_job.rays_own, test_ray_job.alone)
        yield [lambda where, part=part: measured(part, where) for part in parts]  # type: ignore[misc]  # mypy cannot infer a lambda with a default


CLUSTERS = {"slurm": slurm, "ray": ray}


def sampled(measures: list[Measure], folder: Path, repetitions: int) -> dict[str, Spread]:
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for repetition in range(repetitions):
        for part, measure in rotated(list(zip(PARTS, measures, strict=True)), repetition):
            where = folder / f"{part.replace(' ', '-')}-{repetition}"
            where.mkdir()
            samples[part].append(measure(where))
    return {part: Spread(found) for part, found in samples.items()}


def added_s(found: dict[str, Spread]) -> float:
    submitted, own, alone = (found[part].median for part in PARTS)
    return submitted - own - alone


async def run(repetitions: int, names: list[str]) -> None:
    facts = {"machine": machine(), "busy_before": await busy_ratio()}
    found: dict[str, dict[str, Spread]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="jobs") as folder:
            (places := Path(folder) / "cluster").mkdir()
            with CLUSTERS[name](places) as measures:  # in this thread, with which the cluster's processes end
                if isinstance(measures, str):
                    print(f"{name} is left out: {measures}")
                else:
                    found[name] = sampled(measures, Path(folder), repetitions)
    report(found, facts)


def report(found: dict[str, dict[str, Spread]], facts: dict[str, Any]) -> None:
    if not found:
        return
    table: list[list[str] | None] = []
    for name, spreads in found.items():
        table += [[name, part, *spread.cells()] for part, spread in spreads.items()]
        table += [[name, "added", f"{added_s(spreads):.2f} s", ""], None]
    note = f"Others used {facts['busy_before']:.0%} of the cores before."
    show("Time to the first commit", ["", "", "median", "range"], table, note)
    bars = [
        Bar(f"{name}: seconds added to the first commit, at most {LIMIT_S:g}", added, added <= LIMIT_S)
        for name, added in ((name, added_s(spreads)) for name, spreads in found.items())
    ]
    for bar in bars:
        print(bar.line())
    rows = [
        {"cluster": name, "what": part, **spread.report()}
        for name, spreads in found.items()
        for part, spread in spreads.items()
    ]
    write("bench_jobs", {**facts, "rows": rows, "bars": [{"text": bar.text, "kept": bar.kept} for bar in bars]})


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon a submitted run commits.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help=f"default {REPETITIONS}")
    parser.add_argument("--only", choices=list(CLUSTERS), help="one of the clusters")
    options = parser.parse_args()
    names = [options.only] if options.only else list(CLUSTERS)
    run_bench(run(options.repetitions or (QUICK if options.quick else REPETITIONS), names))


if __name__ == "__main__":
    main()

"""What does one tensor more cost, from ``publish`` to loaded?

    python -m bench.bench_many [--quick] [--repetitions N]

Many small tensors: 1,000 of 1 KiB, and 200,000 of 256 bytes. Trainer and rollout are in
one process, with a coordinator on a thread. "plain" is a Python loop of ``copy_`` over
the same tensors, beside it in each repetition; ``publish`` is the call, "to loaded" the
time from it until the rollout has loaded and reported. The loop runs twice for "to
loaded": publish and load each copy once. "first" is the first time, which lays out.

*Stages*: where the time of "to loaded" goes. The call of ``publish`` (with the part of
it that waits for the coordinator and a slot, and the part that plans and copies); from
its end until the rollout has the version (the digest, two messages of the coordinator,
a map, a decision on disk); the load; and the report.

"changed only" is ``load_into(changed_only=True)`` and "changes" a walk over
``changes()``, in CPU time, beside "all" and "walk" of the same version; they take
turns to be first. An element of every tenth tensor changes from version to version.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import replicas
from bench.support import Bar, busy_ratio, machine, rotated, run_bench, show, write
from replicas.coordinator import Coordinator

SETS = {"1,000 of 1 KiB": (1000, 256), "200,000 of 256 B": (200_000, 64)}
WAIT_S = 120.0
BARS = {("1,000 of 1 KiB", "to loaded"): 3.0, ("200,000 of 256 B", "to loaded"): 2.5}
STAGES = ("publish: plan and copy", "publish: wait", "to received", "load_into", "report")


_WAYS: dict[str, Callable[[replicas.Update, dict[str, torch.Tensor]], object]] = {
    "all": lambda update, model: update.load_into(model),
    "changed only": lambda update, model: update.load_into(model, changed_only=update.base > 0),
    "walk": lambda update, _: all(tensor is not None for _, tensor in update),
    "changes": lambda update, _: all(change is not None for change in update.changes()),
}
SLOWER = 1.1
"""No slower than a load of all of it, but for the noise."""
CPU_US = 5.0
"""A load of all of it, each tensor."""


def _plain(targets: dict[str, torch.Tensor], sources: dict[str, torch.Tensor]) -> None:
    for name, source in sources.items():
        targets[name].copy_(source)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _measure(coordinator: Any, count: int, numel: int, repetitions: int) -> dict[str, list[float]]:
    where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
    whole = torch.randn(count, numel)
    weights = {f"t{number}": whole[number].clone() for number in range(count)}
    model = {name: torch.zeros_like(value) for name, value in weights.items()}
    names = ("plain", "publish", "load_into", "to loaded", *_WAYS, *STAGES)
    found: dict[str, list[float]] = {name: [] for name in names}
    with (
        replicas.join("policy", group="trainer", replica=0, rank=0, world_size=1, **where) as trainer,
        replicas.join("policy", group="rollout", replica=0, rank=0, world_size=1, **where) as rollout,
    ):
        for repetition in range(repetitions + 1):
            found["plain"].append(_timed(lambda: _plain(model, weights)))
            waiting = rollout.receive()
            began = time.perf_counter()
            pending = trainer.publish(weights, new_manifest=True)
            published = time.perf_counter()
            with waiting.wait(WAIT_S) as update:
                received = time.perf_counter()
                update.load_into(model)
                loaded = time.perf_counter()
            ended = time.perf_counter()
            phases = pending.wait(WAIT_S).phases
            found["publish"].append(published - began)
            found["to loaded"].append(ended - began)
            found["publish: plan and copy"].append(phases["pack"])
            found["publish: wait"].append(max(0.0, published - began - phases["pack"]))
            found["to received"].append(received - published)
            found["load_into"].append(loaded - received)
            found["report"].append(ended - loaded)
            for value in list(weights.values())[::10]:
                value[0] += 1
            waiting = rollout.receive()
            pending = trainer.publish(weights, new_manifest=True)
            with waiting.wait(WAIT_S) as update:
                for what in rotated(list(_WAYS), repetition):
                    began = time.process_time()
                    _WAYS[what](update, model)
                    found[what].append(time.process_time() - began)
            pending.wait(WAIT_S)
            assert all(torch.equal(model[name], weights[name]) for name in list(weights)[::97])
            for value in weights.values():
                value[0] += 1
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int, default=0)
    arguments = parser.parse_args()
    repetitions = arguments.repetitions or (3 if arguments.quick else 9)
    busy, rows, stages, bars = await busy_ratio(), list[list[str]](), list[list[str]](), list[Bar]()
    samples: dict[str, dict[str, list[float]]] = {}
    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "60s", "slots": 2}}
    for name, (count, numel) in SETS.items():
        with Coordinator(channels).in_thread() as coordinator:
            found = samples[name] = await asyncio.to_thread(_measure, coordinator, count, numel, repetitions)
        plain = statistics.median(found["plain"][1:])
        for what, times in found.items():
            if what in STAGES and what != "load_into":
                continue
            median = statistics.median(times[1:])
            ratio = median / plain
            rows.append([name, what, *(f"{one / count * 1e6:.2f}" for one in (median, times[0])), f"{ratio:.1f}"])
            if (most := BARS.get((name, what))) is not None:
                bars.append(Bar(f"{name}: {what} takes at most {most:g} x plain", ratio, ratio <= most))
        medians = [statistics.median(found[what][1:]) for what in STAGES]
        stages += [
            [name, what, f"{one * 1e3:.2f} ms", f"{one / sum(medians):.0%}"]
            for what, one in zip(STAGES, medians, strict=True)
        ]
        each = {what: statistics.median(found[what][1:]) / count * 1e6 for what in _WAYS}
        bars.append(
            Bar(f"{name}: a load of all takes at most {CPU_US:g} us of CPU each", each["all"], each["all"] <= CPU_US)
        )
        for what, whole in {"changed only": "all", "changes": "walk"}.items():
            ratio = each[what] / each[whole]
            bars.append(Bar(f"{name}: {what} takes no longer than {whole}", ratio, ratio <= SLOWER))
    show("where it goes", ("tensors", "", "median", "share"), stages)
    show("many tensors", ("tensors", "", "us each", "first", "x plain"), rows)
    print(*(bar.line() for bar in bars), sep="\n")
    write("bench_many", {"machine": machine(), "busy_before": busy, "samples": samples})


if __name__ == "__main__":
    run_bench(main())

"""What does a sync of verl cost, with a channel and with verl's own engine?

    .venv-engines/bin/python -m bench.bench_verl [--repetitions N] [--quick]

verl's released ``CheckpointEngineManager`` calls a trainer and 4 or 2 rollout workers,
Ray actors on this host; each worker copies the tensors into a model of its own.
Measured is one call of ``manager.update_weights()``: the first, which starts a
coordinator and makes the memory; those that follow; and the one after the kill of a
worker, over those that are left.

Of verl's own engines only ``naive`` runs without a GPU. It hands the trainer's tensors
to a model in the same process, one model after the other, and moves nothing between
processes: so it is the floor, and no other way for the same work. (nccl, nixl, kimi,
mooncake and delta import CUDA; verl's sender into an engine's process calls it.)
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.support import ROOT, Spread, machine, run_bench, show, write

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager, ColocatedCheckpointEngine
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig

from bench.verl_rank import Rollout, Trainer
from bench.weights import Weights

COUNTS = (4, 2)
WAIT_S = 600.0


class TrainerMethods:
    """How verl calls its ActorRolloutRefWorker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]  # verl's
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[untyped-decorator]  # verl's
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> None: ...


class Replica:
    """A server of one worker."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def nothing(self, reject_request: bool = False) -> None: ...

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


def timed(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def measure(what: str, repetitions: int) -> dict[str, Any]:
    """All times, by what was done."""
    make = ray.remote(num_cpus=0)
    trainer = make(Trainer).remote(what, 1)
    rollouts = [make(Rollout).remote(what, 2 + number) for number in range(max(COUNTS))]
    methods = RayClassWithInitArgs(cls=ray.remote(TrainerMethods))
    replicas = [Replica(one) for one in rollouts]
    group = RayWorkerGroup(worker_handles=[trainer], ray_cls_with_init=methods)
    manager = CheckpointEngineManager(CheckpointEngineConfig(backend="replicas"), group, list(replicas))
    (figure, *_) = ray.get([one.figure.remote() for one in (trainer, *rollouts)], timeout=WAIT_S)
    torch.set_num_threads(1)
    own, models = Weights(what, 1), [Weights(what, 9) for _ in rollouts]
    engine = ColocatedCheckpointEngine(bucket_size=0)

    def sync(count: int) -> None:
        manager.replicas = replicas[:count]
        manager.update_weights(global_steps=1)
        assert {*ray.get([one.figure.remote() for one in rollouts[:count]], timeout=WAIT_S)} == {figure}

    def timed_sync(count: int) -> float:
        manager.replicas = replicas[:count]
        return timed(lambda: manager.update_weights(global_steps=1))

    def naive(count: int) -> None:
        for model in models[:count]:
            engine.send_weights(iter(own.tensors.items()))
            for name, tensor in engine.receive_weights():
                model.tensors[name].copy_(tensor)

    found: dict[str, Any] = {"nbytes": own.nbytes, "first": [timed_sync(max(COUNTS))]}
    sync(max(COUNTS))
    naive(max(COUNTS))
    for _ in range(repetitions):
        for count in COUNTS:
            found.setdefault(f"sync {count}", []).append(timed_sync(count))
            found.setdefault(f"naive {count}", []).append(timed(lambda: naive(count)))  # noqa: B023  # it is called here
        found.setdefault("copy", []).append(timed(lambda: naive(1)))
    ray.kill(rollouts[-1])
    found["after a kill"] = [timed_sync(max(COUNTS) - 1)]
    return found


def start_ray() -> None:
    """Ray gives its own processes half a minute, which a busy machine may not do."""
    for last in (False, False, True):
        try:
            ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
            return
        except Exception:  # Ray raises this class
            ray.shutdown()
            if last:
                raise


async def main(options: argparse.Namespace) -> None:
    what = "smollm2-small" if options.quick else "smollm2"
    start_ray()
    try:
        found = measure(what, options.repetitions)
    finally:
        ray.shutdown()
    spreads = {name: Spread(samples) for name, samples in found.items() if name != "nbytes"}
    names = {"copy": "one copy of the bytes", "first": f"replicas, the first to {max(COUNTS)}"}
    names |= {f"sync {count}": f"replicas, to {count}" for count in COUNTS}
    names |= {"after a kill": f"replicas, after a kill, to {max(COUNTS) - 1}"}
    names |= {f"naive {count}": f"verl's naive, {count} models of one process" for count in COUNTS}
    rows = [[text, *spreads[name].cells(spreads["copy"])] for name, text in names.items()]
    show(f"{found['nbytes'] / 1e6:.0f} MB by verl's manager", ["", "median", "range", "x copy"], rows)
    for count in COUNTS:
        ratio = spreads[f"sync {count}"].median / spreads[f"naive {count}"].median
        print(f"to {count} rollouts in {ratio:.2f} of the time of verl's naive engine, which leaves no process")
    write("verl", {"machine": machine(), **found})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A sync of verl's manager, over a channel and by verl's own engine.")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a ninth of the bytes")
    run_bench(main(parser.parse_args(sys.argv[1:])))

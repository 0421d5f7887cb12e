"""A tensor-parallel engine that starts its own workers: they are the ranks of one
replica, and receive the same versions, of which each loads its part.

python -m replicas.supervisor examples/own_engine/run.toml
cat examples/own_engine/.replicas/*/logs/engine/0/gen-1/*.log

The workers inherit all of the supervisor's variables, and pass only their rank. A
worker that dies ends the engine, and so the replica is restarted.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from multiprocessing.connection import wait

import torch

import replicas

WORKERS = 2


def work(rank: int) -> None:
    part = torch.zeros(8 // WORKERS, 1)
    with replicas.join("policy", rank=rank, world_size=WORKERS) as channel:
        while True:
            with channel.receive().wait() as update:
                rows = slice(rank * len(part), (rank + 1) * len(part))
                part.copy_(dict(update)["weight"][rows])
                wanted = torch.arange(8.0).reshape(8, 1)[rows] * float(str(update.meta["step"]))
                torch.testing.assert_close(part, wanted)
                line = f"RESULT engine rank {rank}: rows {rows.start} to {rows.stop - 1} of version {update.version}"
                print(f"{line}\n", end="", flush=True)  # in one piece: both workers write to one log


def main() -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(rank,), daemon=True) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # a drain: the workers are daemons, and end with this
    wait([worker.sentinel for worker in workers])
    sys.exit(1)


if __name__ == "__main__":
    main()

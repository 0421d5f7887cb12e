"""A source: publishes for ever. Every element of a version is its *stamp*, the clock in
microseconds when it was made, so that weights that mix two versions, or that nobody
committed, show by themselves.

The stamp, and each tensor on the way, are agreed on by collectives of the program's own
process group.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

import replicas
from tests.chaos.programs.member import RANK, REJOINS, Log, Orders, agreed, joined, now, wait
from tests.chaos.programs.peer import start_peer

NBYTES = int(os.environ.get("CHAOS_NBYTES", str(4 * 2**20)))
ALL_RANKS = os.environ.get("CHAOS_SOURCE_RANKS") == "all"
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PAUSE_S = float(os.environ.get("CHAOS_PAUSE_S", "0.05"))


def weights(stamp: int, orders: Orders) -> Iterator[tuple[str, object]]:
    """What this rank publishes; each step is a collective of the program's own."""
    total = NBYTES // 8 // 4
    for part in range(4):
        orders.obey()
        value = agreed(stamp)
        if ALL_RANKS and WORLD > 1:
            mine = total // WORLD
            own = torch.full((mine,), value)
            yield f"part{part}", replicas.Shard(own, (RANK * mine,), (mine * WORLD,))
        else:
            yield f"part{part}", torch.full((total,), value)


def publish_for_ever(channel: replicas.Channel, log: Log, orders: Orders) -> None:
    while True:
        stamp = agreed(int(now() * 1e6))
        log.tell(began=stamp)
        try:
            pending = channel.publish(weights(stamp, orders), meta={"stamp": stamp})
            receipt = wait(pending, orders)
            log.tell(ended=stamp, version=receipt.version, lost=receipt.lost)
        except replicas.errors.ReplicasError as error:
            fenced = isinstance(error, replicas.errors.Fenced)
            if not fenced or REJOINS:
                log.tell(ended=stamp, error=type(error).__name__, text=str(error), unanimous=error.unanimous)
            if fenced:
                raise
        log.tell(own=stamp, works=agreed(stamp) == stamp)
        orders.obey()
        time.sleep(PAUSE_S + stamp % 50 / 1000)


def main() -> None:
    log = Log()
    with Orders() as orders:
        if WORLD > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        start_peer(orders)
        joined(lambda channel: publish_for_ever(channel, log, orders), log)


if __name__ == "__main__":
    main()

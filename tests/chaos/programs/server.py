"""A target: receives for ever, and writes down each version with all values that occur
in it.

A slow reader keeps some of its updates open for a while, reads the same tensors again,
and then writes into them, of which nobody else may ever see anything.

The ranks of a replica compare what they serve by a collective of their own process
group. Ordered to rejoin, it leaves the channel and joins it again, which makes a new
epoch, a new lane and a catch-up without the start of any process.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import replicas
from tests.chaos.programs.member import NAME, Log, Orders, agreed, joined, now
from tests.chaos.programs.peer import start_peer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
HOLDS_S = float(dict(hold.split("=") for hold in os.environ.get("CHAOS_HOLDS", "").split()).get(NAME, 0.0))

HOLD_RATE = 0.3
"""Not all: a replica is ready when it serves the newest, which a reader that is always
slow never does."""


def read(tensors: Sequence[torch.Tensor], orders: Orders) -> list[int]:
    """All values that occur."""
    values: set[int] = set()
    for tensor in tensors:
        orders.obey()
        values |= {int(tensor.min()), int(tensor.max())}
    return sorted(values)


def keep_open(update: replicas.Update, tensors: Sequence[torch.Tensor], orders: Orders, log: Log) -> None:
    until = time.monotonic() + random.uniform(0.0, HOLDS_S)
    while time.monotonic() < until:
        orders.obey()
        time.sleep(0.02)
    log.tell(kept=update.version, stamp=update.meta["stamp"], values=read(tensors, orders))
    for tensor in tensors:
        tensor.fill_(-1)


def serve(channel: replicas.Channel, log: Log, orders: Orders) -> None:
    """Until it is ordered to join again."""
    log.tell(joined=channel.latest)
    while not orders.rejoin():
        pending = channel.receive()
        try:
            update = pending.wait(0.05)
        except TimeoutError:
            orders.obey()
            continue
        took = now()
        with update:
            tensors = [tensor for _, tensor in update]
            values = read(tensors, orders)
            if HOLDS_S and random.random() < HOLD_RATE:
                keep_open(update, tensors, orders, log)
        del tensors
        log.tell(version=update.version, stamp=update.meta["stamp"], values=values, took=took)
        log.tell(own=update.version, works=agreed(update.version) == update.version)


def main() -> None:
    log = Log()
    with Orders() as orders:
        if WORLD > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        start_peer(orders)
        joined(lambda channel: serve(channel, log, orders), log)


if __name__ == "__main__":
    main()

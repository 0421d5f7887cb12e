"""A target: receives for ever, and writes down each version with all values that occur in it.

The ranks of a replica compare what they serve by a collective of their own process group. Ordered to rejoin, it leaves the
channel and joins it again, which makes a new epoch, a new lane and a catch-up without the start of any process.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

import replicas
from tests.chaos.member import Log, Orders, agreed, endpoint
from tests.chaos.peer import start_peer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    log = Log()
    with Orders() as orders:
        if WORLD > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        start_peer(orders)
        while True:
            with replicas.join("policy", endpoint=endpoint()) as channel:
                log.tell(joined=channel.latest)
                while not orders.rejoin():
                    pending = channel.receive()
                    try:
                        update = pending.wait(0.05)
                    except TimeoutError:
                        orders.obey()
                        continue
                    with update:
                        values: set[int] = set()
                        for _, tensor in update:
                            orders.obey()
                            values |= {int(tensor.min()), int(tensor.max())}
                    stamp = update.meta["stamp"]
                    log.tell(version=update.version, stamp=stamp, values=sorted(values))
                    log.tell(own=update.version, works=agreed(update.version) == update.version)


if __name__ == "__main__":
    main()

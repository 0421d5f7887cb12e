"""A rank of ``bench_sync.py`` in torchft's ProcessGroupBabyGloo: Gloo in a process of
its own, as ours is.

It moves the flat buffer into memory which that process maps, and broadcasts it there:
nothing is copied in between.
"""

from __future__ import annotations

import importlib
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bench.rank import Driver, Handler
from bench.sync_rank import WAIT_S
from bench.weights import Weights

__all__ = ["TorchftRank", "handlers"]

_c10d: Any = dist  # torch's own annotations leave out most of the names below


class TorchftRank:
    def __init__(self, driver: Driver) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells of its end in pages; errors of ours go to the driver
        self._driver = driver
        self._group: Any = importlib.import_module("torchft.process_group").ProcessGroupBabyGloo(
            timedelta(seconds=WAIT_S)
        )
        self._weights: Weights | None = None

    def fill(self, what: str, seed: int) -> dict[str, Any]:
        self._weights = Weights(what, seed)
        return {}

    def form(self, port: int, prefix: str, rank: int, size: int) -> dict[str, Any]:
        """Form a group over the store at that port, in place of the one before."""
        self._group.configure(f"127.0.0.1:{port}/{prefix}", f"rank-{rank}", rank, size)
        return {}

    def broadcast(self, source: bool) -> dict[str, Any]:
        """Broadcast the flat buffer in one piece from rank 0."""
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if source:
            self._mine.change()
        else:
            self._driver.say(waiting=True)
        began = time.monotonic()
        self._group.broadcast([self._mine.flat], options).wait()
        ended = time.monotonic()
        if (error := self._group.errored()) is not None:
            raise error
        return {"began": began, "ended": ended}

    def digest(self) -> dict[str, Any]:
        return {"digest": self._mine.digest()}

    def close(self) -> dict[str, Any]:
        """End the process of the group."""
        self._group.shutdown()
        return {}

    @property
    def _mine(self) -> Weights:
        assert self._weights is not None
        return self._weights


def handlers(driver: Driver) -> dict[str, Handler]:
    one = TorchftRank(driver)
    return {handler.__name__: handler for handler in (one.fill, one.form, one.broadcast, one.digest, one.close)}

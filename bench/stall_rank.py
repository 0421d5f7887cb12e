"""A rank of the stall benchmark: one that trains and publishes, one that serves, or one
that joins late."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from bench.rank import Driver, Handler
from bench.sync_rank import SyncRank

STEP_SIDE = 512
STEP_PRODUCTS = 8


class StallRank:
    def __init__(self, driver: Driver, sync: SyncRank) -> None:
        self._driver = driver
        self._sync = sync
        self._matrix = torch.randn(STEP_SIDE, STEP_SIDE)

    def pin(self, core: int) -> dict[str, Any]:
        """Run on this core only, and all threads that are started from now on."""
        os.sched_setaffinity(0, {core})
        return {}

    def train(self) -> dict[str, Any]:
        """Steps of fixed work until the next command; when each one began, and the end
        of the last."""
        self._step()
        self._driver.say(training=True)
        stamps = [time.monotonic()]
        while not self._driver.waiting():
            self._step()
            stamps.append(time.monotonic())
        return {"stamps": stamps}

    def _step(self) -> None:
        for _ in range(STEP_PRODUCTS):
            torch.mm(self._matrix, self._matrix)

    def trained(self) -> dict[str, Any]:
        """The command that ends :meth:`train`."""
        return {}

    def late(self, endpoint: str, token: str, replica: int) -> dict[str, Any]:
        """Join, and receive what the others have; when it began, and when the newest
        version was readable."""
        began = time.monotonic()
        self._sync.join(endpoint, token, "rollout", replica)
        got = self._sync.receive(announce=False)
        return {"began": began, "ended": got["readable"], "version": got["version"]}


def handlers(driver: Driver) -> dict[str, Handler]:
    sync = SyncRank(driver)
    one = StallRank(driver, sync)
    theirs = (sync.tensors, sync.join, sync.publish, sync.receive, sync.leave)
    plain = (sync.buffers, sync.host, sync.form, sync.broadcast)
    return {handler.__name__: handler for handler in (one.pin, one.train, one.trained, one.late, *theirs, *plain)}

"""A rank of ``bench_hold.py``: the trainer that publishes, or a target that reads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from bench.contest_rank import ContestRank
from bench.rank import Driver, Handler
from bench.shapes import SETS
from bench.sync_rank import WAIT_S, SyncRank
from bench.weights import placed
from replicas import Update

__all__ = ["HoldRank", "handlers"]

STEP_SIDE = 256
STEP_PRODUCTS = 2


class HoldRank:
    def __init__(self, driver: Driver, sync: SyncRank, contest: ContestRank) -> None:
        self._driver = driver
        self._sync = sync
        self._contest = contest
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._copies: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        self._matrix = torch.randn(STEP_SIDE, STEP_SIDE)
        self._update: Update | None = None
        self._open = ExitStack()

    # ------------------------------------------------------------ the trainer

    def spread(self, cores: Sequence[int]) -> dict[str, Any]:
        """Use these cores: the driver, from which a process has its own, keeps off
        some."""
        os.sched_setaffinity(0, cores)
        return {}

    def mirror(self, what: str) -> dict[str, Any]:
        """Warm memory to copy the weights to, with a tensor for each of theirs."""
        self._copy = self._sync.weights.flat.clone()
        self._copies = list(placed(self._copy, list(SETS[what]())).values())
        self._originals = list(self._sync.weights.tensors.values())
        return {}

    def copy(self, how: str) -> dict[str, Any]:
        """Copy all weights: in one piece, tensor by tensor, or by one call for all
        tensors."""
        self._sync.weights.change()
        began = time.monotonic()
        if how == "memcpy":
            self._copy.copy_(self._sync.weights.flat)
        elif how == "loop":
            for copy, original in zip(self._copies, self._originals, strict=True):
                copy.copy_(original)
        else:
            torch._foreach_copy_(self._copies, self._originals)
        return {"held": time.monotonic() - began}

    def train(self) -> dict[str, Any]:
        """Steps of fixed work until the next command: when the first began and each one
        ended."""
        self._step()
        self._driver.say(training=True)
        return {"stamps": self._steps()}

    def publish_and_train(self) -> dict[str, Any]:
        """Publish, and go on with such steps until the next command; when it had
        committed, seen between two of them."""
        self._sync.weights.change()
        self._step()
        pending = self._sync.channel.publish(self._sync.weights.tensors)
        held = time.monotonic()
        stamps = [held]
        while not pending.done():
            self._step()
            stamps.append(time.monotonic())
        committed = time.monotonic()
        pending.wait(WAIT_S)
        self._driver.say(committed=True)
        return {"held": held, "committed": committed, "stamps": [*stamps, *self._steps()]}

    def trained(self) -> dict[str, Any]:
        """The command that ends them."""
        return {}

    def _steps(self) -> list[float]:
        stamps = [time.monotonic()]
        while not self._driver.waiting():
            self._step()
            stamps.append(time.monotonic())
        return stamps

    def _step(self) -> None:
        for _ in range(STEP_PRODUCTS):
            torch.mm(self._matrix, self._matrix)

    # ------------------------------------------------------------ a target

    def open(self) -> dict[str, Any]:
        """Receive a version, say so, and keep it open."""
        pending = self._sync.channel.receive()
        self._driver.say(waiting=True)
        self._update = self._open.enter_context(pending.wait(WAIT_S))
        return {"version": self._update.version}

    def busy(self) -> dict[str, Any]:
        """Load it again and again until the next command."""
        assert self._update is not None
        loads = 0
        while not (loads and self._driver.waiting()):
            self._update.load_into(self._sync.weights.tensors)
            loads += 1
            if loads == 1:
                self._driver.say(busy=True)
        return {"loads": loads}

    def stop(self) -> dict[str, Any]:
        """The command that ends that."""
        return {}

    def close(self) -> dict[str, Any]:
        """Report it loaded."""
        self._open.close()
        return {}

    def traffic(self) -> dict[str, Any]:
        """Copy as many bytes out of shared memory; from when to when."""
        began = time.monotonic()
        self._contest.copy_shared()
        return {"began": began, "ended": time.monotonic()}

    def handlers(self) -> list[Handler]:
        trainer = (self.spread, self.mirror, self.copy, self.train, self.publish_and_train, self.trained)
        return [*trainer, self.open, self.busy, self.stop, self.close, self.traffic]


def handlers(driver: Driver) -> dict[str, Handler]:
    sync = SyncRank(driver)
    contest = ContestRank(driver, sync)
    mine = HoldRank(driver, sync, contest)
    return {one.__name__: one for one in (*sync.handlers(), *contest.handlers(), *mine.handlers())}

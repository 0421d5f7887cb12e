"""A rank of ``bench_sync.py``: what the library is compared with, beyond Gloo, on the
same weights in the same memory.

The limit is what any program must do that leaves the sender its weights and gives each
target parameters of its own: copy the bytes into shared memory once, wake the targets,
and let each copy them out. Nothing is described, checked or agreed on. Files are
written to a memory file system and read from there, and the targets are woken in the
same way, by one byte in a pipe.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import torch

from bench.rank import Driver, Handler
from bench.sync_rank import WAIT_S, SyncRank
from bench.weights import first_values

__all__ = ["ContestRank", "handlers"]

Tensors = Mapping[str, torch.Tensor]


class Format(Protocol):
    """A way to keep tensors in a file; see :func:`_format`."""

    def save(self, tensors: Tensors, path: str) -> None: ...
    def load(self, path: str) -> Tensors: ...


class TorchFormat:
    def save(self, tensors: Tensors, path: str) -> None:
        torch.save(dict(tensors), path)

    def load(self, path: str) -> Tensors:
        found: Tensors = torch.load(path, mmap=True, weights_only=True)
        return found


class SafetensorsFormat:
    """It maps the file when it loads."""

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("safetensors.torch")

    def save(self, tensors: Tensors, path: str) -> None:
        self._library.save_file(dict(tensors), path)

    def load(self, path: str) -> Tensors:
        found: Tensors = self._library.load_file(path)
        return found


@cache
def _format(kind: str) -> Format:
    return TorchFormat() if kind == "torch.save" else SafetensorsFormat()


class ContestRank:
    def __init__(self, driver: Driver, sync: SyncRank) -> None:
        self._driver = driver
        self._sync = sync
        self._shared = torch.empty(0, dtype=torch.uint8)
        self._wakes: list[int] = []
        self._wake = -1

    # -------------------------------------------------------- memory that all can reach

    def share(self, targets: int) -> dict[str, Any]:
        """Make as much shared memory as the weights take, warm, and a pipe to each
        target."""
        flat = self._sync.weights.flat
        memory = os.memfd_create("bench-limit", os.MFD_CLOEXEC)
        os.posix_fallocate(memory, 0, flat.nbytes)
        self._shared = torch.frombuffer(mmap.mmap(memory, flat.nbytes), dtype=torch.uint8)
        self._shared.copy_(flat)
        pipes = [os.pipe() for _ in range(targets)]
        self._wakes = [sending for _, sending in pipes]
        return {"pid": os.getpid(), "memory": memory, "wakes": [reading for reading, _ in pipes]}

    def reach(self, pid: int, memory: int, wake: int) -> dict[str, Any]:
        """Map that memory and open that pipe."""
        flat = self._sync.weights.flat
        opened = os.open(f"/proc/{pid}/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        self._shared = torch.frombuffer(mmap.mmap(opened, flat.nbytes), dtype=torch.uint8)
        os.close(opened)
        flat.copy_(self._shared)
        self._wake = os.open(f"/proc/{pid}/fd/{wake}", os.O_RDONLY | os.O_CLOEXEC)
        return {}

    def copy_in(self, targets: int) -> dict[str, Any]:
        """Copy the weights into the shared memory and wake ``targets`` of them."""
        self._sync.weights.change()
        began = time.monotonic()
        self._shared.copy_(self._sync.weights.flat)
        copied = time.monotonic()
        self._wake_up(targets)
        return {"began": began, "copied": copied}

    def copy_out(self) -> dict[str, Any]:
        """Wait to be woken and copy it into the own weights."""
        self._driver.say(waiting=True)
        self._wait()
        self.copy_shared()
        return {"loaded": time.monotonic()}

    def copy_shared(self) -> None:
        self._sync.weights.flat.copy_(self._shared)

    # ------------------------------------------------------------ files

    def save(self, kind: str, path: str, targets: int) -> dict[str, Any]:
        self._sync.weights.change()
        keeper = _format(kind)
        began = time.monotonic()
        keeper.save(self._sync.weights.tensors, path)
        self._wake_up(targets)
        return {"began": began}

    def load(self, kind: str, path: str) -> dict[str, Any]:
        """Wait to be woken, read the first value of each tensor, and copy all into the
        own weights."""
        keeper = _format(kind)
        self._driver.say(waiting=True)
        self._wait()
        found = keeper.load(path)
        first_values(found)
        readable = time.monotonic()
        for name, tensor in self._sync.weights.tensors.items():
            tensor.copy_(found[name])
        return {"readable": readable, "loaded": time.monotonic()}

    # ------------------------------------------------------------ pipes

    def _wake_up(self, targets: int) -> None:
        for wake in self._wakes[:targets]:
            os.write(wake, b"x")

    def _wait(self) -> None:
        ready, _, _ = select.select([self._wake], [], [], WAIT_S)
        if not ready or not os.read(self._wake, 1):
            raise RuntimeError(f"not woken within {WAIT_S:g} s")

    def handlers(self) -> list[Handler]:
        memory = (self.share, self.reach, self.copy_in, self.copy_out)
        return [*memory, self.save, self.load]


def handlers(driver: Driver) -> dict[str, Handler]:
    sync = SyncRank(driver)
    mine = ContestRank(driver, sync)
    return {handler.__name__: handler for handler in (*sync.handlers(), *mine.handlers())}

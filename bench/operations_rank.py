"""A rank of ``bench_operations.py``: it is in a group of every kind, and does
operations in the one that it is asked for."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

import replicas
from bench.rank import Driver, Handler
from bench.sync_rank import SyncRank

WAIT_S = 120.0
HOST = "127.0.0.1"
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class Group(Protocol):
    """What can be measured; both return when the result is there."""

    def all_reduce(self, tensor: torch.Tensor) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


class Library:
    """A channel of peers."""

    def __init__(self, endpoint: str, token: str, group: str, replica: int) -> None:
        self._channel = replicas.join(
            group, endpoint=endpoint, token=token, group=group, replica=replica, rank=0, world_size=1
        )

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._channel.all_reduce(tensor).wait(WAIT_S)

    def barrier(self) -> None:
        self._channel.barrier().wait(WAIT_S)

    def close(self) -> None:
        self._channel.close()


class Plain:
    """ProcessGroupGloo in the rank itself, as torch gives it."""

    def __init__(self, port: int, prefix: str, rank: int, size: int) -> None:
        timeout = timedelta(seconds=WAIT_S)
        client = _c10d.TCPStore(HOST, port, None, False, timeout, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timeout
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore(prefix, client), rank, size, options)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def barrier(self) -> None:
        self._group.barrier(_c10d.BarrierOptions()).wait()

    def close(self) -> None:
        self._group = None


class Torchft:
    """torchft's process group whose Gloo is in a process of its own."""

    def __init__(self, port: int, prefix: str, rank: int, size: int) -> None:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # it tells of its child's end in pages; errors of ours go to the driver
        kind = importlib.import_module("torchft.process_group").ProcessGroupBabyGloo
        self._group: Any = kind(timedelta(seconds=WAIT_S))
        self.renew(port, prefix, rank, size)

    def renew(self, port: int, prefix: str, rank: int, size: int) -> None:
        """Form the group, or form it anew."""
        self._group.configure(f"{HOST}:{port}/{prefix}", f"peer-{rank}", rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor], _c10d.AllreduceOptions()).wait()
        self._check()

    def barrier(self) -> None:
        self._group.barrier(_c10d.BarrierOptions()).wait()
        self._check()

    def _check(self) -> None:
        error = self._group.errored()
        if error is not None:
            raise error

    def close(self) -> None:
        self._group.shutdown()


class OperationsRank:
    def __init__(self, driver: Driver) -> None:
        self._groups: dict[str, Group] = {}

    def channel(self, name: str, endpoint: str, token: str, group: str, replica: int) -> dict[str, Any]:
        return self._add(name, lambda: Library(endpoint, token, group, replica))

    def plain(self, name: str, port: int, prefix: str, rank: int, size: int) -> dict[str, Any]:
        return self._add(name, lambda: Plain(port, prefix, rank, size))

    def torchft(self, name: str, port: int, prefix: str, rank: int, size: int) -> dict[str, Any]:
        return self._add(name, lambda: Torchft(port, prefix, rank, size))

    def _add(self, name: str, make: Callable[[], Group]) -> dict[str, Any]:
        self._groups[name] = make()
        return {}

    def measure(self, name: str, nbytes: int, times: int, size: int) -> dict[str, Any]:
        """``times`` operations, one after another: barriers (``nbytes`` 0) or
        all-reduces; mean seconds of one."""
        group = self._groups[name]
        if not nbytes:
            group.barrier()
            began = time.monotonic()
            for _ in range(times):
                group.barrier()
            return {"seconds": (time.monotonic() - began) / times}
        tensor = torch.ones(max(1, nbytes // 4))
        group.all_reduce(tensor)
        began = time.monotonic()
        for _ in range(times):
            group.all_reduce(tensor)
        seconds = (time.monotonic() - began) / times
        wanted = torch.tensor(1.0)
        for _ in range(times + 1):
            wanted *= size
        low, high = torch.aminmax(tensor)
        if low != wanted or high != wanted:
            raise RuntimeError(f"{name}: the sums are {low} to {high}, not {wanted}")
        return {"seconds": seconds}

    def close(self, name: str) -> dict[str, Any]:
        self._groups.pop(name).close()
        return {}


def handlers(driver: Driver) -> dict[str, Handler]:
    one = OperationsRank(driver)
    mine = (one.channel, one.plain, one.torchft, one.measure, one.close)
    return {handler.__name__: handler for handler in (*mine, SyncRank(driver).host)}

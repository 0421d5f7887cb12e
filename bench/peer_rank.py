"""A rank of the all-reduce benchmarks: a member of a channel, torchft's process groups,
or a plain Gloo group.

Everyone contributes ones, so that each sum tells how many took part.
"""

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
from replicas import errors

WAIT_S = 30.0
TRIES = 50
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class Group(Protocol):
    """What can sum a tensor over all, in place, and be made anew over those that are
    left.

    ``reduce`` raises an error of ``failed`` when it did not work; ``renew`` gets a new
    place in a smaller group.
    """

    failed: tuple[type[Exception], ...]

    def reduce(self, tensor: torch.Tensor) -> None: ...
    def renew(self, port: int, prefix: str, rank: int, size: int) -> None: ...


class Library:
    """A channel of peers; it needs no word from outside to go on over those that are
    left."""

    failed: tuple[type[Exception], ...] = (errors.SyncError,)

    def __init__(self, endpoint: str, token: str, replica: int) -> None:
        self._channel = replicas.join(
            "outer", endpoint=endpoint, token=token, group="peer", replica=replica, rank=0, world_size=1
        )

    def reduce(self, tensor: torch.Tensor) -> None:
        self._channel.all_reduce(tensor).wait(WAIT_S)

    def renew(self, port: int, prefix: str, rank: int, size: int) -> None:
        """Nothing: the channel has done it."""


class Torchft:
    """One of torchft's reconfigurable process groups, told at once who is left; its
    quorum takes longer."""

    failed: tuple[type[Exception], ...] = (Exception,)  # whatever Gloo, the pipe to its process, or torchft raises

    def __init__(self, kind: str) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells of the kill in pages; errors of ours go to the driver
        self._group: Any = getattr(importlib.import_module("torchft.process_group"), kind)(timedelta(seconds=WAIT_S))

    def reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor], _c10d.AllreduceOptions()).wait()
        error = self._group.errored()
        if error is not None:
            raise error

    def renew(self, port: int, prefix: str, rank: int, size: int) -> None:
        self._group.configure(f"127.0.0.1:{port}/{prefix}", f"peer-{rank}", rank, size)


class Plain:
    """ProcessGroupGloo, which a failure makes useless."""

    failed: tuple[type[Exception], ...] = (RuntimeError,)

    def __init__(self) -> None:
        self._group: Any = None

    def reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def renew(self, port: int, prefix: str, rank: int, size: int) -> None:
        timeout = timedelta(seconds=WAIT_S)
        client = _c10d.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self._group = _c10d.ProcessGroupGloo(_c10d.PrefixStore(prefix, client), rank, size, options)


class PeerRank:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._group: Group = Plain()
        self._tensor = torch.empty(0)

    def channels(self, nbytes: int, endpoint: str, token: str, replica: int) -> dict[str, Any]:
        """Take part by a channel."""
        return self._take(nbytes, lambda: Library(endpoint, token, replica))

    def torchft(self, nbytes: int, kind: str) -> dict[str, Any]:
        """Take part by torchft's process group of that name."""
        return self._take(nbytes, lambda: Torchft(kind))

    def plain(self, nbytes: int) -> dict[str, Any]:
        return self._take(nbytes, Plain)

    def _take(self, nbytes: int, make: Callable[[], Group]) -> dict[str, Any]:
        self._group = make()
        self._tensor = torch.empty(nbytes // 4)
        return {}

    def renew(self, port: int, prefix: str, rank: int, size: int) -> dict[str, Any]:
        self._group.renew(port, prefix, rank, size)
        return {}

    def reduce(self, times: int, size: int) -> dict[str, Any]:
        """All-reduces of all ``size``: one, when it was over, and ``times`` more, with
        seconds for each."""
        self._sum(size)
        first = time.monotonic()
        for _ in range(times):
            self._sum(size)
        return {"first": first, "seconds": (time.monotonic() - first) / times}

    def _sum(self, *sizes: int) -> int:
        self._tensor.fill_(1)
        self._group.reduce(self._tensor)
        low, high = (int(value) for value in torch.aminmax(self._tensor))
        if low != high or low not in sizes:
            raise RuntimeError(f"the sum is {low} to {high}, not one of {sizes}")
        return low

    def outlive(self, size: int, renew: dict[str, Any] | None) -> dict[str, Any]:
        """All-reduces without end until one has worked with one peer less than
        ``size``.

        :param renew: what :meth:`renew` gets after a failure; None: give up after the
            first one.
        """
        self._driver.say(waiting=True)
        failures: list[str] = []
        failed_at = 0.0
        while len(failures) < TRIES:
            try:
                if self._sum(size, size - 1) < size:
                    return {"at": time.monotonic(), "failed_at": failed_at, "failures": failures}
            except self._group.failed as error:
                failed_at = failed_at or time.monotonic()
                failures.append(str(error).splitlines()[0])
                if renew is None:
                    return {"at": 0.0, "failed_at": failed_at, "failures": failures}
                self._group.renew(**renew)
        raise RuntimeError(f"still without the others after {TRIES} tries: {failures[-1]}")


def handlers(driver: Driver) -> dict[str, Handler]:
    one = PeerRank(driver)
    mine = (one.channels, one.torchft, one.plain, one.renew, one.reduce, one.outlive)
    return {handler.__name__: handler for handler in (*mine, SyncRank(driver).host)}

"""What the programs of a chaos run share: who they are, what they write down, and the
orders to fail that they obey.

A fault that a process does to itself is ordered by a signal. Its handler only notes the
order; the program carries it out at its next :meth:`Orders.obey`: in the iterable that
it publishes, in its loading code, or while it waits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist

import replicas
from tests.chaos.programs.signals import EXIT, RAISE, REJOIN, REJOIN_OUTER

__all__ = ["NAME", "OUT", "RANK", "REJOINS", "Log", "Ordered", "Orders", "agreed", "endpoint", "joined", "now", "wait"]

OUT = Path(os.environ.get("CHAOS_OUT", "."))
"""Where the programs write."""

RANK = int(os.environ.get("RANK", "0"))
NODE = os.environ.get("CHAOS_NODE", "")
SPACE = Path("/proc/self/ns/pid").stat().st_ino
NAME = f"{os.environ.get('REPLICAS_GROUP', 'none')}-{os.environ.get('REPLICA_ID', '0')}"

REJOINS = "CHAOS_REJOINS" in os.environ
"""Who is fenced, or finds no coordinator, joins again, in place of dying of it."""

T = TypeVar("T")


class Ordered(Exception):
    """The exception that a program was ordered to die of."""


class Orders:
    """Signals that order this program to fail. Made in the main thread; obeyed wherever
    the program says so."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self.ending = False
        """The main thread is on its way out; what other threads meet then is no
        news."""
        for signum in (RAISE, EXIT, REJOIN, REJOIN_OUTER):
            signal.signal(signum, self._note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending = True

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._given.add(signum)

    def obey(self) -> None:
        """Fail, if that was ordered."""
        if RAISE in self._given:
            raise Ordered("ordered to raise")
        if EXIT in self._given:
            sys.exit(0)

    def rejoin(self, order: int = REJOIN) -> bool:
        """Whether to leave the channel and join it again; true once for each order."""
        if order not in self._given:
            return False
        self._given.discard(order)
        return True


def now() -> float:
    """The time by a clock that all processes of the machine share: on a node of a run
    ``CLOCK_MONOTONIC`` is the node's own."""
    return time.clock_gettime(time.CLOCK_REALTIME) if NODE else time.monotonic()


class Log:
    """JSON lines with the time of a clock that all processes share."""

    def __init__(self, suffix: str = "") -> None:
        self._file = (OUT / f"{NAME}.{RANK}{suffix}.jsonl").open("a", buffering=1)
        pid = f"{NODE}.{SPACE}.{os.getpid()}" if NODE else os.getpid()
        self._head = {"pid": pid, "generation": int(os.environ.get("REPLICAS_GENERATION", "1"))}

    def tell(self, **what: Any) -> None:
        self._file.write(json.dumps({**self._head, "at": now(), **what}) + "\n")


def endpoint() -> str | None:
    """The proxy through which this replica's sessions pass; None: there is none."""
    path = OUT / "proxies.json"
    return str(json.loads(path.read_text())[NAME]) if path.exists() else None


def joined(work: Callable[[replicas.Channel], None], log: Log) -> NoReturn:
    """Join ``policy`` and work there, again and again."""
    while True:
        try:
            with replicas.join("policy", endpoint=endpoint()) as channel:
                work(channel)
        except (replicas.errors.Fenced, replicas.errors.Disconnected) as error:
            if not REJOINS:
                raise
            log.tell(apart=type(error).__name__, text=str(error))


def wait(pending: replicas.Pending[T], orders: Orders) -> T:
    """Its result. The wait is given up and begun again many times, which must harm
    nothing."""
    while True:
        orders.obey()
        try:
            return pending.wait(0.05)
        except TimeoutError:
            continue


def agreed(value: int) -> int:
    """Rank 0's value, by a collective of the program's own group, which no fault of
    ours may ever break."""
    if not dist.is_initialized():
        return value
    own = torch.tensor([value if RANK == 0 else 0])
    dist.all_reduce(own)
    return int(own.item())

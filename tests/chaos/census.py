"""Who lived when: a process of each rank tells the census that it lives, and the kernel
tells when it has ended.

Theory of operation
===================

A rank connects to a Unix socket in a folder, whatever its namespaces, so that its pid
is known here, and with it a pidfd, which becomes readable at its end. All times are of
one clock, the machine's, as are the ranks': so two lives of one replica that overlap
show, on whichever hosts they were. Other processes can be watched, too
(:meth:`Census.watch`).
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

__all__ = ["Census", "Life", "now"]


def now() -> float:
    """The true time."""
    return time.clock_gettime(time.CLOCK_REALTIME)


@dataclass
class Life:
    """One process; ``name``: its ``group-replica``; empty: it is no rank."""

    pid: int
    began: float
    name: str = ""
    generation: int = 0
    node: str = ""
    gpus: str = ""
    ended: float | None = None

    @property
    def alive(self) -> bool:
        return self.ended is None

    def overlaps(self, other: Life) -> bool:
        mine = float("inf") if self.ended is None else self.ended
        return self.began < (float("inf") if other.ended is None else other.ended) and other.began < mine

    def __str__(self) -> str:
        until = "now" if self.ended is None else f"{self.ended:.2f}"
        return f"{self.name} generation {self.generation} on {self.node} ({self.pid}): {self.began:.2f} to {until}"


class Census:
    """Takes the census in a thread, within a ``with`` block. ``lives``: of ranks, in
    the order in which they began."""

    def __init__(self, folder: Path) -> None:
        self.lives: list[Life] = []
        self._selector = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(str(folder / "census"))
        self._door.listen(64)
        self._ours, self._theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._door, selectors.EVENT_READ, self._come)
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        self._thread.join()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                cast("socket.socket", key.fileobj).close()
        self._selector.close()

    def watch(self, pids: Iterable[int]) -> list[Life]:
        """The lives of these processes from now on, as far as they are alive."""
        found = []
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            life = Life(pid, now())
            self._follow(life, pidfd)
            found.append(life)
        return found

    def alive(self) -> dict[str, Life]:
        """The newest living process of each replica."""
        return {life.name: life for life in self.lives if life.alive}

    def _follow(self, life: Life, pidfd: int) -> None:
        def end() -> None:
            life.ended = now()
            self._selector.unregister(pidfd)
            os.close(pidfd)

        self._selector.register(pidfd, selectors.EVENT_READ, end)  # epoll: another thread may wait meanwhile

    def _come(self) -> None:
        peer, _ = self._door.accept()
        pid, _, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        began = now()
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            peer.close()
            return

        def read() -> None:
            data = peer.recv(4096)
            if data:
                told: dict[str, Any] = json.loads(data)
                self.lives.append(Life(pid, began, **told))
                self._follow(self.lives[-1], pidfd)
            else:
                os.close(pidfd)
            self._selector.unregister(peer)
            peer.close()

        self._selector.register(peer, selectors.EVENT_READ, read)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data()

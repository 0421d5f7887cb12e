"""Arenas under test, and readers of their memory in processes of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.weights.memory.arena import Arena, Slot

__all__ = ["MANIFEST", "ArenaStatistics", "Child", "fill", "memory_left", "statistics"]

MANIFEST = Manifest((TensorSpec("x", "float32", (8,)),))
PATIENCE_S = 30


class ArenaStatistics(NamedTuple):
    """A snapshot of an arena's slots, buffers and memory.

    ``held``: own slots that hold a version. ``foreign``: mapped slots. ``retired``:
    buffers left to their readers. ``spare``: buffers without a slot. ``nbytes``: own
    memory, retired and spare included. ``kept``: kept mappings.
    """

    slots: int
    held: int
    foreign: int
    retired: int
    spare: int
    nbytes: int
    kept: int


def statistics(arena: Arena) -> ArenaStatistics:
    own = [slot._buffer for slot in arena.slots if slot._buffer is not None]
    held = sum(slot.state in ("held", "leaving") for slot in arena.slots)
    retired, spare = arena.pool.retired, [buffer for buffer, _ in arena.pool._spare]
    nbytes = sum(buffer.nbytes for buffer in (*own, *retired, *spare))
    return ArenaStatistics(
        len(arena.slots), held, len(arena.foreign), len(retired), len(spare), nbytes, len(arena._kept)
    )


def fill(arena: Arena, version: int, manifest: Manifest = MANIFEST) -> Slot:
    """A slot that holds ``version``: every element of it is its number."""
    slot = arena.acquire(version, manifest)
    assert slot is not None, arena.in_use()
    slot.data.view(torch.float32).fill_(version)
    arena.hold(slot, f"digest {version}")
    return slot


def memory_left() -> bool:
    """Whether this process still has any buffer called "test", as a descriptor or as a
    mapping."""
    gc.collect(0)
    maps = Path("/proc/self/maps").read_bytes()
    return any("memfd:test" in name for name in _open_files()) or b"memfd:test" in maps


def _open_files() -> Iterator[str]:
    """What each descriptor of this process is open on (other threads close some)."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(path.readlink())


class Child:
    """A forked process that calls ``answer(word)`` for each word that it is sent, and
    sends back what comes of it."""

    def __init__(self, answer: Callable[[str], object]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: there are other threads; the child needs none
            self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _serve(theirs, answer)
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)

    def ask(self, word: str) -> str:
        """What comes of ``word``, as text."""
        self._socket.send(word.encode())
        return self._socket.recv(4096).decode()

    def kill(self, *, reap: bool = True) -> None:
        """Kill it with -9, and wait for its end; without ``reap`` it stays a zombie
        until the next call."""
        if self._pidfd < 0:
            return
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        assert select.select([self._pidfd], [], [], PATIENCE_S)[0]
        if not reap:
            return
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._pidfd = -1
        self._socket.close()


def _serve(channel: socket.socket, answer: Callable[[str], object]) -> None:
    try:
        while word := channel.recv(4096).decode():
            try:
                channel.send(str(answer(word)).encode())
            except Exception as error:  # noqa: BLE001  # the answer is the error
                channel.send(f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)

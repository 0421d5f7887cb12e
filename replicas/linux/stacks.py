"""How a process shows its stacks when it is asked to: what a rank sets up, and what its
shim finds. Standard library only.

:func:`register`, called by ``join``, opens a file of this process's own in the folder
``stacks`` beside its logs, and has faulthandler write the stacks of all threads into it
whenever :data:`SIGNUM` comes. That runs in the signal handler, in C, without the GIL: a
rank that hangs in a collective, or in a loop that never comes back to the interpreter,
answers too. A handler that the program had set for the signal still gets it.

The file's name says whose it is (:func:`parse`): a signal is sent only to the process
that made it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

from replicas.common.waits import locked
from replicas.linux import private

__all__ = ["SIGNUM", "Asked", "folder", "parse", "register"]

SIGNUM = signal.SIGRTMIN + 13
"""Far from SIGUSR1 and SIGUSR2, which programs and batch systems use."""

_open: dict[int, BinaryIO] = {}
_lock = threading.Lock()


def _unlock_in_a_child() -> None:
    """Another thread of the parent may have had it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_a_child)


class Asked(NamedTuple):
    """A process that can be asked. ``start``: clock ticks from boot to its start."""

    rank: int
    pid: int
    start: int
    path: Path


def folder(log_dir: Path) -> Path:
    """Where the processes that log to ``log_dir`` keep their files."""
    return log_dir / "stacks"


def register(log_dir: Path, rank: int, start: int) -> None:
    """Have this process write its stacks when asked to; a second call, from any thread,
    changes nothing.

    :param start: clock ticks from boot to the start of this process.

    :raises OSError: the file cannot be made.
    """
    locked(_lock, _register, log_dir, rank, start)


def _register(log_dir: Path, rank: int, start: int) -> None:
    pid = os.getpid()
    if pid in _open:
        return
    where = folder(log_dir)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    file = os.fdopen(private.open_file(where / f"{rank}.{pid}.{start}", flags, make_folder=True), "ab", buffering=0)
    chained = signal.getsignal(SIGNUM) not in (signal.SIG_DFL, signal.SIG_IGN)
    faulthandler.register(SIGNUM, file=file, all_threads=True, chain=chained)
    for inherited in _open.values():  # by a fork; the parent's file is the parent's
        inherited.close()
    _open.clear()
    _open[pid] = file


def parse(path: Path) -> Asked | None:
    """Whose file it is; None if it is none of :func:`register`."""
    words = path.name.split(".")
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    rank, pid, start = map(int, words)
    return Asked(rank, pid, start, path)

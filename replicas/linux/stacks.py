"""Stack dumps on a signal: a rank registers with faulthandler, its shim finds the file.

Standard library only. When :data:`SIGNUM` arrives, faulthandler writes the stacks of
all threads into a file in the folder ``stacks`` beside the logs. It runs in the signal
handler, in C, without the GIL, so even a rank that hangs in a collective or in a loop
in C answers. A handler that the program had set for the signal is still called. The
file's name identifies the process: a signal is sent only to the process that made the
file.
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

SIGNUM = signal.SIGRTMIN + 13
"""Not SIGUSR1 or SIGUSR2, which programs and batch systems use."""

_open: dict[int, BinaryIO] = {}
_lock = threading.Lock()


def _unlock_in_a_child() -> None:  # another thread of the parent may have held it at the fork
    """Replace this module's lock in a forked child: no thread there can release it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_a_child)


class Asked(NamedTuple):
    """A registered process. ``start`` is in clock ticks from boot."""

    rank: int
    pid: int
    start: int
    path: Path


def folder(log_dir: Path) -> Path:
    """Return the path of the folder for stack dumps of ranks; create nothing.

    :param log_dir: folder of the log files; it is ``stacks`` in there.
    """
    return log_dir / "stacks"


def register(log_dir: Path, rank: int, start: int) -> None:
    """Have this process write its stacks to a file whenever :data:`SIGNUM` arrives.

    Installs a signal handler, and creates the file, which stays open. Later calls in
    the same process do nothing; a forked child must call it again.

    :param log_dir: folder of the log files.
    :param rank: of this process, for the file's name.
    :param start: start of this process, in clock ticks from boot, for the file's name.
    :raises OSError: the file cannot be created.
    """
    locked(_lock, _register, log_dir, rank, start)


def _register(log_dir: Path, rank: int, start: int) -> None:
    """Create the file of :func:`register`, and have SIGNUM write all stacks to it.

    Do nothing if this process has done so already. In a forked child, close the
    parent's file. The caller holds ``_lock``. The parameters are those of
    :func:`register`.
    """
    pid = os.getpid()
    if pid in _open:
        return
    where = folder(log_dir)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND  # the shim empties it between two dumps
    file = os.fdopen(private.open_file(where / f"{rank}.{pid}.{start}", flags, make_folder=True), "ab", buffering=0)
    chained = signal.getsignal(SIGNUM) not in (signal.SIG_DFL, signal.SIG_IGN)
    faulthandler.register(SIGNUM, file=file, all_threads=True, chain=chained)
    for inherited in _open.values():  # files of the parent, after a fork
        inherited.close()
    _open.clear()
    _open[pid] = file


def parse(path: Path) -> Asked | None:
    """Return the process that made a file of stack dumps, by the file's name.

    Return None if the name is not one that :func:`register` makes.
    """
    words = path.name.split(".")
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    rank, pid, start = map(int, words)
    return Asked(rank, pid, start, path)

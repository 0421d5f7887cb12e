"""Locks on shared memory: who holds a version, and who may still look at it.

Theory of operation
===================

All locks belong to an *open file description* of the memfd, so that the kernel drops
them when the last process that has it ends, however it ends. Forked children and
sidecars share the description that they were given, and so its locks.

``flock``, shared: "I hold what is in it". Exclusive: "I am filling it". The owner takes
it before it writes; a reader that comes later is refused, and a reader that was there
first makes the owner look for other memory.

*Marks* are read locks on single bytes (``F_OFD_SETLK``; the byte is a number, nothing
is stored at it). Byte 0: a mapping that was handed to a user may still be alive, though
nobody holds the memory officially any more. Byte ``N``, larger than 0: the memory has
been filled ``N`` times, and what came of the last time is complete. Whoever holds it
has that mark, and only while there is no writer; so a reader that has the shared lock
and finds the mark of another one knows that the memory was not refilled before it came.
Byte :data:`OPENED`: memory elsewhere, to which the file leads, is in use. Nobody ever
takes a write lock: it is only asked whether one could be had.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

__all__ = ["MAPPED", "OPENED", "hold_exclusive", "hold_shared", "holders", "let_go", "mark", "marked", "unmark"]

MAPPED = 0
"""The byte that is marked while a user's mapping may be alive; the larger ones count
fillings."""
OPENED = 1 << 62
"""The byte that is marked while somebody has the memory open to which the file leads (a
GPU's)."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def hold_shared(fd: int) -> bool:
    """Hold what is in the file; False while somebody fills it."""
    return _flock(fd, fcntl.LOCK_SH)


def hold_exclusive(fd: int) -> bool:
    """Fill the file; False while somebody holds what is in it."""
    return _flock(fd, fcntl.LOCK_EX)


def let_go(fd: int) -> None:
    """Undo either, for all who share the description."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def mark(fd: int, byte: int) -> None:
    """Mark ``byte``. Any number of descriptions may."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel without such locks: nobody can map from here (`marked` fails in
        # them), which leaves the process group.


def unmark(fd: int, byte: int) -> None:
    """Take this description's mark of ``byte`` away."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:  # see mark()
            raise


def marked(fd: int, byte: int) -> bool:
    """Whether another description has marked ``byte``.

    :raises OSError: EINVAL on a kernel without such locks.
    """
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    kind: int = _FLOCK.unpack(found)[0]
    return kind != fcntl.F_UNLCK


def holders(inode: int) -> tuple[int, ...]:
    """Processes that hold what is in a memfd, for error texts: those that this process
    may see, and no promise.

    Costs 10 to 30 ms, in which nobody on the machine gets a lock: the kernel waits for
    all processors.
    """
    pids: set[int] = set()
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:  # hidden in some containers: the text says less
        return ()
    for line in lines:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "READ" and fields[5].endswith(f":{inode}"):
            pids.add(int(fields[4]))
    return tuple(sorted(pid for pid in pids if pid > 0))


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

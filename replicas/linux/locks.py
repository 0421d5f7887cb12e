"""Locks on shared memory: which processes hold a version or may still have it mapped.

All locks belong to an *open file description* of the memfd, so the kernel drops them
when the last process that has it ends, however it ends. Forked children and sidecars
share the description that they were given, and so its locks.

``flock``, shared: "I hold the content". Exclusive: "I am filling it". The owner takes
the exclusive lock before it writes. A later reader is refused; if a reader was first,
the owner chooses other memory.

*Flags* are read locks on single bytes (``F_OFD_SETLK``; the byte is only a number, its
content is not used). No process ever takes a write lock: it only tests whether a write
lock would succeed. Byte 0: a mapping given to a user may still be alive, though no
process holds the memory officially. Byte ``N`` > 0: the memory has been filled ``N``
times, and the last fill is complete. Each holder has that flag, and only while there is
no writer; so a reader that has the shared lock and finds another holder's flag knows
that the memory was not refilled since.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from replicas.linux.files import kernel_lines

MAPPED = 0
"""Byte flagged while a user's mapping may be alive; larger bytes count fills."""
OPENED = 1 << 62
"""Byte flagged while a process has the file's GPU memory open."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def hold_shared(fd: int) -> bool:
    """Try to take the shared ``flock`` of a file: "I hold the content".

    Return True if it is taken, False during a fill (another has the exclusive lock).
    Never waits. The lock belongs to the open file description of ``fd``.
    """
    return _flock(fd, fcntl.LOCK_SH)


def hold_exclusive(fd: int) -> bool:
    """Try to take the exclusive ``flock`` of a file: "I am filling it". Never waits.

    Return True if it is taken, False if another file description has either lock.
    """
    return _flock(fd, fcntl.LOCK_EX)


def unlock(fd: int) -> None:
    """Release the ``flock`` of a file, shared or exclusive.

    It ends for all processes that share the open file description of ``fd``.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)


def flag(fd: int, byte: int) -> None:
    """Put a read lock on byte number ``byte``, as a sign for other processes.

    The number says what it means: :data:`MAPPED`, :data:`OPENED`, or a count of fills.
    The lock belongs to the open file description of ``fd`` (``F_OFD_SETLK``), and any
    number of descriptions can hold it. It ends with :func:`unflag`, or when the last
    descriptor of the description is closed. Do nothing on a kernel without such locks.
    """
    _set_flag(fd, byte, fcntl.F_RDLCK)


def unflag(fd: int, byte: int) -> None:
    """Remove this file description's flag from ``byte``; do nothing without one."""
    _set_flag(fd, byte, fcntl.F_UNLCK)


def _set_flag(fd: int, byte: int, kind: int) -> None:
    """Lock or unlock one byte; do nothing on a kernel without locks of descriptions.

    :param kind: ``F_RDLCK`` adds the flag, ``F_UNLCK`` removes it.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel without such locks: `flagged` fails in readers, so none maps this
        # memory; they use the process group instead.


def flagged(fd: int, byte: int) -> bool:
    """Return True if another file description has flagged ``byte`` by :func:`flag`.

    :raises OSError: EINVAL on a kernel without locks of open file descriptions.
    """
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    kind: int = _FLOCK.unpack(found)[0]
    return kind != fcntl.F_UNLCK


def holders(inode: int) -> tuple[int, ...]:
    """Return the pids of visible processes with a shared ``flock`` on a file, sorted.

    For error texts only: costs 10 to 30 ms, during which no process of the machine gets
    a lock, as the kernel waits for all processors. Empty if ``/proc/locks`` is hidden.

    :param inode: the file's inode.
    """
    pids: set[int] = set()
    try:
        held = kernel_lines(Path("/proc/locks"))
    except OSError:  # hidden in some containers: the error text then names no process
        return ()
    for line in held:
        fields = line.split()
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[3] == "READ" and fields[5].endswith(f":{inode}"):
            pids.add(int(fields[4]))
    return tuple(sorted(pid for pid in pids if pid > 0))


def _flock(fd: int, kind: int) -> bool:
    """Try to take a ``flock`` without waiting; return True if it is taken.

    Return False if another lock prevents it.

    :param kind: ``LOCK_SH`` or ``LOCK_EX``.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Files by descriptor, of this process or another of this user; texts of the kernel."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def reopen(fd: int, flags: int = os.O_RDONLY) -> int:
    """Open the file of descriptor ``fd`` again; return the new descriptor.

    The two share no position and no locks.

    :param flags: as for :func:`os.open`; O_CLOEXEC is added.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def kernel_lines(path: Path) -> list[str]:
    """Return the lines of a text of the kernel, such as ``/proc/self/mountinfo``.

    Names in it may be any bytes. They are decoded as file names are: bytes that are not
    UTF-8 become lone surrogates. Only a newline ends a line.

    :raises OSError: it cannot be read.
    """
    return os.fsdecode(path.read_bytes().removesuffix(b"\n")).split("\n")


def open_plain(pid: int, fd: int, *, inode: int | None = None, nbytes: int | None = None) -> int:
    """Open a regular file that process ``pid`` has open as ``fd``; return a descriptor.

    It is open for reading, at the start of the file, and the caller owns it. Other
    kinds of files are refused, as opening them may block.

    :param inode: the inode that the file must have; None allows any. Likewise
        ``nbytes``, its size.
    :raises FileNotFoundError, ProcessLookupError: the process is gone, or has no such
        descriptor, or that is of another file, or not of a regular one.
    """
    path = os.open(f"/proc/{pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(path)
        if not stat.S_ISREG(found.st_mode) or inode not in (None, found.st_ino) or nbytes not in (None, found.st_size):
            raise FileNotFoundError
        return reopen(path)
    finally:
        os.close(path)

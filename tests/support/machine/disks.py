"""A small disk of a test's own, which can be filled up.

It is mounted in a mount namespace that the calling thread (the main one) makes for
itself: nobody else sees it, processes that the test starts do, and it is gone with the
last of them, however the test ends. That takes the right to mount.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["fill", "small_disk"]

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
_FILLER = "filler"


@contextmanager
def small_disk(folder: Path, nbytes: int, inodes: int = 0) -> Iterator[bool]:
    """Mount a disk of so many bytes, and files (0: any number), at ``folder``, which is
    made; False: not allowed here, it is just a folder."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = (
        libc.unshare(_CLONE_NEWNS) == 0
        and libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes},nr_inodes={inodes}".encode()) == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            libc.umount2(os.fsencode(folder), _MNT_DETACH)


@contextmanager
def fill(folder: Path) -> Iterator[None]:
    """Nothing more can be written to the disk at ``folder``, to the end of the
    block."""
    filler = folder / _FILLER
    try:
        with filler.open("wb") as file, suppress(OSError):
            free = os.statvfs(folder)
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:  # others wrote, and freed, meanwhile
                file.write(bytes(4096))
        yield
    finally:
        filler.unlink(missing_ok=True)

"""Unix sockets by their path: names that are short enough for the kernel, and who listens. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["is_own", "listens", "reachable"]

_PATH_NBYTES = 107


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name for the socket ``path`` that is short enough for the kernel, valid inside the block.

    :raises OSError: its folder is not there.
    """
    if len(os.fsencode(path)) <= _PATH_NBYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def is_own(path: Path) -> bool:
    """Whether there is a socket of this user.

    :raises OSError: there is nothing.
    """
    found = path.lstat()
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def listens(path: Path) -> bool:
    """Whether a process listens on the socket ``path``; also one that is frozen. Never blocks.

    :raises OSError: it cannot be told, such as for the socket of another user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            with reachable(path) as name:
                probe.connect(name)
        except BlockingIOError:  # more wait there than it lets wait
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True

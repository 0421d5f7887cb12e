"""Names of Unix sockets that are short enough for the kernel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["reachable"]

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

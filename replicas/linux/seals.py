"""Seals on shared memory: restrict later writers. A seal is never removed.

``F_SEAL_FUTURE_WRITE`` refuses ``write`` and every new writable mapping, to root and
the owner, too; existing writable mappings keep working: the memory is *closed to
writers*. ``F_SEAL_SEAL`` does not concern writing. It serves as a mark that no death of
a process removes: the memory is *final*, and its owner never fills it again. Sealed
files keep their size, as truncation would kill readers with SIGBUS.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from replicas.linux.files import reopen

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, Linux 5.1; the fcntl module has no name for it
_CLOSED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE
_FINAL = _CLOSED | fcntl.F_SEAL_SEAL


def is_closed_to_writers(fd: int) -> bool:
    """Return True if no process can write to the memfd or map it writable from now on.

    Writable mappings that exist keep working.
    """
    return _has(fd, _FUTURE_WRITE)


def is_final(fd: int) -> bool:
    """Return True if the memfd is sealed by :func:`make_final`, in any process.

    It has no new writers then, and is never filled again.
    """
    return _has(fd, fcntl.F_SEAL_SEAL)


def close_to_writers(fd: int) -> None:
    """Seal a memfd against new writers, for ever; do nothing where that fails.

    Writable mappings that exist keep working.
    """
    if not is_closed_to_writers(fd):
        with contextlib.suppress(OSError):  # then it is sealed before it is shared, or not shared
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _CLOSED)


def make_final(fd: int) -> None:
    """Seal the memfd against new writers, and mark it as never filled again, for ever.

    ``fd`` may be open for reading only. Do nothing if it is final already.

    :raises OSError: it belongs to another user, or the kernel cannot do it.
    """
    if is_final(fd):
        return
    writable = reopen(fd, os.O_RDWR)
    try:
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _FINAL)
    except PermissionError:  # another reader was faster
        if not is_final(fd):
            raise
    finally:
        os.close(writable)


def _has(fd: int, seal: int) -> bool:
    """Return True if the memfd has this seal (an ``F_SEAL_`` bit)."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seal)

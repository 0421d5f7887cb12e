"""Ending with another process, and having a name."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent", "name_process"]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; at once when ``parent`` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``/proc/PID/comm`` show, up to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)

"""Ending with another process: parent-death signals and pidfds."""

from __future__ import annotations

import ctypes
import os
import select
import signal

__all__ = ["die_with_parent", "name_process", "watch_and_exit"]

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_POLL_END = select.POLLHUP | select.POLLRDHUP | select.POLLERR


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


def watch_and_exit(pidfd: int, channel: int) -> None:
    """Wait until the process of ``pidfd`` is dead or the peer of socket ``channel`` closed it; then exit at once."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(channel, _POLL_END)
    poller.poll()
    os._exit(0)

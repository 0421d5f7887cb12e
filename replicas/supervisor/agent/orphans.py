"""End what a dead agent of this node has left, and the socket of a dead supervisor.

A shim whose agent is dead ends its processes by itself, within :data:`SHIMS_S`; if it
is dead too, or does not, its processes are killed by its control group or its mark.
Blocking, for a thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from replicas.linux.processes import send_signal, start_time
from replicas.linux.sockets import is_own, listens
from replicas.supervisor.agent.messages import ShimLeft
from replicas.supervisor.cleanup.sweeping import Sweep

SHIMS_S = 3.5
"""How long shims may take to end after their agent (they need up to 3 s)."""
_SWEEP_S = 5.0


def clean_up(left: Sequence[ShimLeft], shims_s: float = SHIMS_S) -> tuple[str, ...]:
    """End all processes under these shims, which have ``shims_s`` to end by themselves.

    :return: the marks under which nothing is left.
    """
    alive = {pidfd: shim for shim in left if (pidfd := _open(shim)) is not None}
    deadline, killed = time.monotonic() + shims_s, False
    try:
        while alive:
            poll = select.poll()
            for pidfd in alive:
                poll.register(pidfd, select.POLLIN)
            for pidfd, _ in poll.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                del alive[pidfd]
                os.close(pidfd)
            if time.monotonic() >= deadline:
                if killed:
                    break  # they do not die of SIGKILL: what they have left is reported
                for pidfd in alive:
                    send_signal(pidfd, signal.SIGKILL)
                deadline, killed = time.monotonic() + shims_s, True
        held = {shim.nonce for shim in alive.values()}
    finally:
        for pidfd in alive:
            os.close(pidfd)
    ended = [shim for shim in left if shim.nonce not in held]
    if Sweep((one.nonce for one in ended), groups=[Path(one.cgroup) for one in ended if one.cgroup]).run(_SWEEP_S):
        return tuple(one.nonce for one in ended if not _sweep_one(one))
    return tuple(one.nonce for one in ended)


def _sweep_one(shim: ShimLeft) -> list[int]:
    return Sweep([shim.nonce], groups=[Path(shim.cgroup)] if shim.cgroup else ()).run(0.0)


def _open(shim: ShimLeft) -> int | None:
    """A pidfd of the shim; None: it is gone."""
    if shim.pid < 1:
        return None
    try:
        pidfd = os.pidfd_open(shim.pid)
    except ProcessLookupError:
        return None
    if start_time(shim.pid) != shim.start_time:
        os.close(pidfd)
        return None
    return pidfd


def remove_socket(path: Path) -> None:
    """Remove the dead supervisor's socket; a file, or a socket in use, stays."""
    with contextlib.suppress(OSError):  # it is in a folder that is gone, or is not ours: then it stays
        if is_own(path) and not listens(path):
            path.unlink(missing_ok=True)

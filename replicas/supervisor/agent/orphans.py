"""End the processes of a dead agent, and remove the socket of a dead supervisor.

A shim whose agent is dead ends its own processes within :data:`SHIMS_S`. If the shim is
dead or stuck, it is killed with all of its processes. Blocking, for a thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from replicas.linux.processes import start_time
from replicas.linux.sockets import is_own, listens
from replicas.supervisor.agent.messages import ShimLeft
from replicas.supervisor.cleanup.sweeping import Sweep, by_mark

SHIMS_S = 3.5
"""How long shims may take to end after their agent (they need up to 3 s)."""
_SWEEP_S = 5.0
_LOOK_INTERVAL_S = 0.02


def clean_up(left: Sequence[ShimLeft], shims_s: float = SHIMS_S) -> tuple[str, ...]:
    """Wait for the shims of a dead agent to end; then kill all processes of theirs.

    Blocks, up to about ``shims_s`` plus 5 s.

    :param left: the shims, with pids, control groups and marks of their processes.
    :param shims_s: seconds in which the shims may end on their own.
    :return: the marks under which no process is left.
    """
    deadline = time.monotonic() + shims_s
    while any(start_time(one.pid) == one.start_time for one in left) and time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL_S)
    if not _sweep(left, _SWEEP_S):
        return tuple(one.nonce for one in left)
    return tuple(one.nonce for one in left if not _sweep([one], 0.0))


def _sweep(shims: Sequence[ShimLeft], timeout_s: float) -> list[int]:
    """Kill all processes of these shims, found by mark, control group and pid.

    Blocks until none is left, or for ``timeout_s`` (0: one look).

    :return: the pids that are left.
    """
    groups = [Path(one.cgroup) for one in shims if one.cgroup]
    known = {one.pid: one.start_time for one in shims if one.pid > 0}
    return Sweep(by_mark(one.nonce for one in shims), groups=groups, known=known).run(timeout_s)


def remove_socket(path: Path) -> None:
    """Remove a Unix socket of this user on which no process listens; ignore errors.

    A file, or a socket in use, stays.
    """
    with contextlib.suppress(OSError):  # the folder is gone or not ours: leave the socket
        if is_own(path) and not listens(path):
            path.unlink(missing_ok=True)

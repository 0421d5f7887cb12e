"""Move a forked sidecar into its rank's environment, output and control group.

A forkserver serves all ranks of its node. A sidecar that it forks gets the environment
and the output of its rank, enters the rank's control group, so that it counts within
the replica's limits, and gets the rank's mark, which identifies it even if its parents
are dead or frozen. Variables that a process reads only while it starts
(``LD_LIBRARY_PATH``) cannot be changed later: a node has a forkserver for each set of
such variables (:func:`lasting`). Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from replicas.linux import cgroups
from replicas.linux.processes import MARK, pid_of, set_mark

_LASTING = ("GLIBC_", "LD_", "MALLOC_", "PYTHON", "TORCH_")
_MAX_NBYTES = 16 << 20  # larger than any environment that the kernel accepts


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the loader, Python or torch read only at start."""
    return {name: value for name, value in environment.items() if name.startswith(_LASTING)}


def describe_own_place() -> list[int]:
    """Return descriptors of this process's stderr and of a file of its environment."""
    try:
        output = os.dup(2)
    except OSError:  # it is closed
        output = os.open(os.devnull, os.O_WRONLY)
    try:
        environment = os.memfd_create("environment")
    except OSError:
        os.close(output)
        raise
    with open(environment, "wb", closefd=False) as file:  # a descriptor
        file.write(b"\0".join(name + b"=" + value for name, value in os.environb.items()))
    return [output, environment]


def join_place(pidfd: int, output: int, environment: int) -> None:
    """Take over the control group, output and environment of a rank.

    :param pidfd: the rank's process; the others are from :func:`describe_own_place`.
    :raises ValueError: the rank has a mark, and this process has no room for it.
    """
    _enter_group_of(pidfd)
    os.dup2(output, 1)
    os.dup2(output, 2)
    entries = (entry.partition(b"=") for entry in os.pread(environment, _MAX_NBYTES, 0).split(b"\0"))
    variables = {name: value for name, equals, value in entries if name and equals}
    if MARK.encode() in variables:
        set_mark(variables[MARK.encode()].decode())  # the room for it is found by its name
    os.environb.clear()
    os.environb.update(variables)


def _enter_group_of(pidfd: int) -> None:
    """Enter the control group of a process, if there is one and the kernel permits."""
    with contextlib.suppress(OSError):  # the mark identifies it, too; and without its rank it ends anyway
        cgroups.enter(cgroups.own_group(Path(f"/proc/{pid_of(pidfd)}")), os.getpid())

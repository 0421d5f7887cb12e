"""Move a forked sidecar into its rank's environment, output and control group.

A forkserver serves all ranks of its node, or the one that keeps it. A sidecar that it
forks gets the environment and the output of its rank, enters the rank's control group,
so that it counts within the replica's limits, and gets the rank's mark, which
identifies it even if its parents are dead or frozen. Variables that a process reads
only while it starts (``LD_LIBRARY_PATH``) cannot be changed later: a node has a
forkserver for each set of such variables (:func:`lasting`). Standard library only.
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
    """Return those variables of ``environment`` that a process reads only at its start.

    They are those of the loader, of Python and of torch (``LD_``, ``PYTHON``, ...).
    """
    return {name: value for name, value in environment.items() if name.startswith(_LASTING)}


def describe_own_place(output: int = 2, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return three new descriptors of this process, to be sent to a forked helper.

    They are its pidfd, a duplicate of ``output``, and a memfd with a copy of the
    environment. The caller owns them; the helper process, such as a sidecar of this
    rank, passes them to :func:`join_place`.
    """
    fds = [os.pidfd_open(os.getpid())]
    try:
        try:
            fds.append(os.dup(output))
        except OSError:  # it is closed
            fds.append(os.open(os.devnull, os.O_WRONLY))
        fds.append(os.memfd_create("environment"))
        with open(fds[-1], "wb", closefd=False) as file:  # a descriptor
            file.write(b"\0".join(os.fsencode(f"{name}={value}") for name, value in environment.items()))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def join_place(pidfd: int, output: int, environment: int) -> None:
    """Enter a rank's control group, and take over its output and environment.

    Replaces stdout, stderr and the environment of this process, a helper (sidecar) that
    was forked for the rank. The arguments are those that :func:`describe_own_place`
    returned in the rank; they stay open. The rank's mark (a variable by which its shim
    finds all its processes) is also put where other processes see it; see
    :func:`replicas.linux.processes.set_mark`. A group that cannot be entered is
    ignored.

    :raises ValueError: the rank has a mark, and this process was started without the
        variable that the mark overwrites. By then its output is replaced, and its
        environment is not.
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
    """Enter the control group of a process, given by pidfd; ignore a failure."""
    with contextlib.suppress(OSError):  # the mark identifies it, too; and without its rank it ends anyway
        cgroups.enter(cgroups.own_group(Path(f"/proc/{pid_of(pidfd)}")), os.getpid())

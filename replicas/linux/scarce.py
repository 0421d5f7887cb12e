"""Errors of the kernel that mean a lack of a resource, and the limit behind them."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Transient errors: they do not say whether two processes can share memory."""


@contextmanager
def naming_limits() -> Iterator[None]:
    """Context manager, or decorator: name the limit if no process or thread can start.

    It is put around forks and starts of threads. Other errors pass.

    :raises OSError: EAGAIN, with the limits that may have been reached and the remedy
        (:func:`no_process`), in place of Python's own error.
    """
    try:
        yield
    except (BlockingIOError, RuntimeError) as error:
        if isinstance(error, BlockingIOError) or lacks_threads(error):
            raise OSError(errno.EAGAIN, no_process()) from error
        raise


def lacks_threads(error: BaseException) -> bool:
    """Return True if no thread could be started, for which Python has no error type."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def no_process() -> str:
    """Return the text of an error for a process or thread that could not be started.

    It lists the limits that may be the cause, with the present value of this user's
    (``ulimit -u``), and the remedy. It does not examine which limit was reached, nor
    whether a process could be started now.
    """
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    user = "" if most == resource.RLIM_INFINITY else f"user {os.getuid()} may have {most} (ulimit -u), or "
    return (
        f"no further process or thread: {user}the control group has its pids.max, or the machine its kernel.threads-max: "
        "raise that limit (in a unit of systemd LimitNPROC= and TasksMax=), or start fewer replicas"
    )


def describe_limit(error: OSError) -> tuple[str, str]:
    """Return two texts for people on an error: its meaning, and the remedy.

    The first has the limit that was reached, as read from this process and ``/proc``
    now: call it soon after the error.

    :param error: one whose ``errno`` is in :data:`SCARCE`.
    """
    why, remedy = _limit(error)
    return f"{os.strerror(error.errno or 0)}: {why}", remedy


def _limit(error: OSError) -> tuple[str, str]:
    """Return (the limit behind an error of :data:`SCARCE`, the remedy), as texts."""
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process may have {most} files open", "raise the limit of open files (ulimit -n)"
    if error.errno == errno.ENFILE:
        return f"this machine may have {_sysctl('fs/file-max')} files open", "raise fs.file-max"
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        return f"this process may have {most} bytes of address space", "raise that limit (ulimit -v)"
    maps = _sysctl("vm/max_map_count")
    have = _mappings()
    if maps.isdecimal() and have + 2 >= int(maps):
        return f"this process may have {maps} mappings, and has {have}", "raise vm.max_map_count"
    if _sysctl("vm/overcommit_memory") == "2":
        return "this machine does not overcommit memory (vm.overcommit_memory = 2)", "allow overcommitment"
    return "the kernel has no memory left for it", "free memory, or raise the container's limit"


def _mappings() -> int:
    """Return how many mappings this process has, or 0 if ``/proc`` cannot be read."""
    try:
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:  # no descriptor is left for it
        return 0


def _sysctl(name: str) -> str:
    """Return a setting of the kernel as text, or "a limited number of" if it is hidden.

    :param name: its path below ``/proc/sys``.
    """
    try:
        return Path(f"/proc/sys/{name}").read_bytes().decode(errors="replace").strip()
    except OSError:  # hidden in some containers
        return "a limited number of"

"""Check, at the start, that the process and the kernel have the required features.

A container or a unit of systemd may hide ``/proc/sys`` or deny single calls of the
kernel; a library may have replaced threads and selectors. Each would cause an obscure
error later. Standard library only.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import signal
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType
from typing import NamedTuple

from replicas import errors
from replicas.linux import inherited
from replicas.linux.processes import boot_id

_DENIED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


class Missing(NamedTuple):
    """A missing feature, and the options that provide it."""

    what: str
    remedy: str


def _signal() -> int:
    """Send signal 0 to this process by a pidfd, to try the call; return the pidfd.

    :raises OSError: the call is denied.
    """
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd


CALLS: dict[str, Callable[[], int]] = {
    "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    "pidfd_send_signal": _signal,
    "memfd_create": lambda: os.memfd_create("replicas-probe"),
}
"""Required system calls, each as a function that opens a descriptor with it."""
_SECCOMP = (
    "the kernel is older than 5.3, or a seccomp filter denies it: with docker leave out --security-opt seccomp=..., or "
    "allow it in that profile; in Kubernetes set securityContext.seccompProfile.type: RuntimeDefault; in a unit of "
    "systemd set SystemCallFilter=@system-service"
)
_PROC = "/proc/sys is hidden: in a unit of systemd set ProcSubset=all; in a container mount the whole of /proc"
_REPLACED = (
    "gevent and eventlet do so: leave them out (monkey.patch_all(thread=False, select=False)), or use this library in "
    "another process"
)


def missing() -> Iterator[Missing]:
    """Try each feature of the system that this library needs.

    Yield those that are missing.
    """
    if not hasattr(select, "epoll") or not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        yield Missing("Python's own threads and selectors were replaced in this process", _REPLACED)
    for name, call in CALLS.items():
        try:
            os.close(call())
        except OSError as error:
            if error.errno in _DENIED:
                yield Missing(f"{name} is refused: {error.strerror}", _SECCOMP)
    try:
        boot_id()
    except OSError as error:
        yield Missing(f"the id of this boot cannot be read: {error.strerror}: {error.filename}", _PROC)


def check() -> None:
    """Check that this process has all required features.

    :raises replicas.errors.UsageError: features are missing; the text names them, and
        the options that provide them.
    """
    inherited.check_proc()
    if found := list(missing()):
        remedies = dict.fromkeys(one.remedy for one in found)
        raise errors.UsageError("; ".join(one.what for one in found), hint=". ".join(remedies))

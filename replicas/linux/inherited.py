"""Repair inherited process state: closed standard streams, blocked or ignored signals.

Also checks that ``/proc`` belongs to this pid namespace. Each program of this library
calls :func:`put_in_order` first. Standard library only.
"""

from __future__ import annotations

import os
import signal
import sys

from replicas import errors


def put_in_order() -> None:
    """Repair what this process has inherited from a starter that left it odd.

    Open ``/dev/null`` for each closed standard stream, give an ignored SIGCHLD its
    default action back, and unblock all signals in the calling thread. Each program of
    the library calls this first, in its main thread.
    """
    open_streams()
    # With SIGCHLD ignored every exit code would be read as 0; a blocked signal would
    # never be delivered, neither here nor in child processes.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def open_streams() -> None:
    """Open ``/dev/null`` in this process for each standard stream that is closed.

    Also set ``sys.stdin``, ``sys.stdout`` or ``sys.stderr`` where it is None. Otherwise
    the next file or socket would get the number, and children would use that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it is the lowest free number
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115  # stays open


def check_proc() -> None:
    """Check that ``/proc`` belongs to this process's pid namespace.

    :raises replicas.errors.UsageError: it does not, or it cannot be read.
    """
    try:
        shown = os.readlink("/proc/self")  # noqa: PTH115  # pathlib is slow to import for this alone
    except OSError as error:
        raise errors.UsageError(
            f"/proc cannot be read ({error.strerror}), and processes are watched through it",
            hint="mount it: mount -t proc proc /proc",
        ) from error
    if shown != str(os.getpid()):
        raise errors.UsageError(
            f"/proc is of another pid namespace: there this process is {shown}, here it is {os.getpid()}",
            hint="mount the one of this namespace (mount -t proc proc /proc, or unshare --mount-proc)",
        )

"""What a process was born with and did not choose: closed standard streams, ignored and
blocked signals, a foreign ``/proc``.

Each program of ours puts these in order before it does anything else. Standard library
only.
"""

from __future__ import annotations

import os
import signal
import sys

from replicas import errors

__all__ = ["check_proc", "open_streams", "put_in_order", "reset_signals"]


def put_in_order() -> None:
    """For the main thread of a program of ours, at its start."""
    open_streams()
    reset_signals()


def open_streams() -> None:
    """Open ``/dev/null`` for each standard stream that is closed.

    The next file or socket would get its number, and be taken for it by whatever is
    started.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115  # for good


def reset_signals() -> None:
    """Hear of every signal, and of the end of children.

    With SIGCHLD ignored the kernel tells nobody how a child ended: every exit code
    would be read as 0. A blocked signal never comes, neither here nor in what is
    started from here.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def check_proc() -> None:
    """:raises replicas.errors.UsageError: ``/proc`` is not that of this process's pid
    namespace."""
    try:
        shown = os.readlink("/proc/self")  # noqa: PTH115  # pathlib takes long to load where this is all
    except OSError as error:
        raise errors.UsageError(
            f"/proc cannot be read ({error.strerror}), and processes are watched through it",
            hint="mount it: mount -t proc proc /proc",
        ) from error
    if shown != str(os.getpid()):
        raise errors.UsageError(
            f"/proc is that of another pid namespace: there this process is {shown}, here it is {os.getpid()}",
            hint="mount the one of this namespace (mount -t proc proc /proc, or unshare --mount-proc)",
        )

"""Fork children that run as new processes do.

A loaded process forks children that become other programs of a part: its shim, its
launcher, its ranks. A child must not run on inside the functions of its parent. So
:func:`fork` raises :class:`Become` in the child, which leaves them all, up to
:func:`run` at the bottom of the stack; that frees the parent's objects, and calls the
child's task. There, :func:`start_anew` replaces what a new process does not inherit.
Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from replicas.linux.processes import ForkedProcess, name_process, stat_fields
from replicas.linux.scarce import naming_limits

Task = Callable[[], object]
_ARGUMENTS = 45
"""Index in :func:`stat_fields` of the address of the command line, before its end."""


class Become(BaseException):
    """Raised in a forked child, to unwind it to :func:`run`, which calls ``task``."""

    def __init__(self, task: Task) -> None:
        """Make the exception; :func:`fork` raises it."""
        super().__init__(task)
        self.task = task


def run(task: Task) -> None:
    """Call ``task``, and return. In a child that :func:`fork` makes, call its task.

    To be called by a main module, with as few functions around it as possible.
    """
    while True:
        try:
            task()
        except Become as become:
            task = become.task
        else:
            return
        gc.collect()  # an object in a cycle that closed its descriptor later would close another's


@naming_limits()
def fork(task: Task) -> ForkedProcess:
    """Fork a child that leads a session, and return it once that is so.

    In the child, this call raises :class:`Become`, which must reach :func:`run`: that
    calls ``task`` there. To be called by a process of one thread.

    :raises OSError: the system allows no process.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            raise Become(task)
        os.close(writer)
        writer = -1
        os.read(reader, 1)  # the end of the file: the child is past setsid, or dead
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    return ForkedProcess(pid)


def start_anew(
    command: list[str], environment: Mapping[str, str] | None, streams: tuple[int, int], keep: Collection[int] = ()
) -> None:
    """Give this forked process what exec would: its name, environment and streams.

    Signals with a handler get Python's defaults, stdin is empty, and all descriptors
    but the standard streams are closed.

    :param command: what ``ps`` shows as its command line, cut to the room there is.
    :param environment: all its variables; None: the parent's. ``/proc/PID/environ``
        stays the parent's.
    :param streams: descriptors that become stdout and stderr.
    :param keep: descriptors that stay open.
    """
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((null, 0), (streams[0], 1), (streams[1], 2)):
        os.dup2(descriptor, number)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor not in keep:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    name_process(Path(command[0]).name)
    _show_command(command)


def _show_command(command: list[str]) -> None:
    """Overwrite the command line of this process, as others see it."""
    import ctypes  # loads slowly

    first, end = map(int, stat_fields("self")[_ARGUMENTS : _ARGUMENTS + 2])
    room = max(0, end - first - 1)  # its last byte stays 0: else the kernel shows the environment, too
    ctypes.memmove(first, b"\0".join(map(os.fsencode, command))[:room].ljust(room, b"\0"), room)

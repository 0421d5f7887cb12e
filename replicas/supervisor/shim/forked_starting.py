"""Start a part's processes by forks of its shim.

What :mod:`replicas.supervisor.shim.starting` does by exec. The shim was forked from a
template, and so has torchrun and the group's modules loaded.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from replicas.linux.helpers import interpreter, popen_arguments, python_module
from replicas.linux.processes import LAUNCHER, Child, ForkedProcess
from replicas.supervisor.shim import forking, program, starting
from replicas.supervisor.shim.log_pipes import LogPipes
from replicas.supervisor.wire import guard, orders
from replicas.supervisor.wire.orders import PartSpec


def start_program(spec: PartSpec, pipes: LogPipes) -> Child:
    """Fork the user's program from this process, the shim, and return its process.

    It leads a session, and writes into the pipes of rank 0. In the child, this call
    raises :class:`~replicas.supervisor.shim.forking.Become`.

    :raises OSError: the system refuses.
    """
    words, streams, shim = starting.guard_words(spec, direct=True), pipes.streams("rank 0"), os.getpid()
    return Child(forking.fork(lambda: _become_rank(spec.env, words, streams, shim)))


def fork_rank(spec: PartSpec, env: Mapping[str, str], pipes: LogPipes) -> ForkedProcess:
    """Fork a rank from this process, the shim, as torchrun's launcher has asked.

    The shim reaps it and tells the launcher its end. In the child, this call raises
    :class:`~replicas.supervisor.shim.forking.Become`.

    :param env: all its variables, from torchrun.
    :raises OSError: the system refuses.
    """
    ours = spec._replace(shim=os.getpid(), pipes=pipes.of_ranks())
    words, streams, shim = starting.guard_words(ours, direct=False), pipes.streams("torchrun"), os.getpid()
    words[2] = spec.cgroup  # this process is not in it
    own = {name: value for name, value in env.items() if name != guard.GUARD}
    return forking.fork(lambda: _become_rank(own, words, streams, shim))


def start_launcher(spec: PartSpec, pipes: LogPipes, scratch: Path) -> tuple[Child, socket.socket]:
    """Fork torchrun's launcher from this process, the shim, and send it the spec.

    In the child, this call raises :class:`~replicas.supervisor.shim.forking.Become`.

    :param pipes: the launcher writes into that of ``torchrun``.
    :param scratch: folder in which torchrun may write.
    :return: its process, and this end of its control socket.
    :raises OSError: the system refuses.
    """
    ours, theirs = orders.pair()
    fd, shim, streams = theirs.fileno(), os.getpid(), pipes.streams("torchrun")
    command = python_module(LAUNCHER, "--control", str(fd), "--parent", str(shim))
    env = popen_arguments(spec.env, spec.cwd)["env"]
    try:
        child = Child(forking.fork(lambda: _become_launcher(command, env, streams, theirs)))
    except OSError:
        ours.close()
        raise
    finally:
        if os.getpid() == shim:  # the child needs it
            theirs.close()
    return child, starting.brief_launcher(spec, pipes, scratch, child, ours)


def _become_launcher(
    command: list[str], env: Mapping[str, str], streams: tuple[int, int], theirs: socket.socket
) -> None:
    """In the forked child: run torchrun's launcher; never return.

    :param command: its command line, also for ``ps``. :param env: all its variables.
    :param streams: descriptors of its stdout and stderr.
    :param theirs: the launcher's end of the control socket to the shim.
    """
    code = 1
    try:
        forking.start_anew(command, env, streams, keep={theirs.fileno()})
        code = importlib.import_module(LAUNCHER).main(command[-4:], theirs)
    except Exception:  # noqa: BLE001  # into torchrun's log
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(code)


def _become_rank(env: Mapping[str, str], words: list[str], streams: tuple[int, int], shim: int) -> None:
    """In the forked child: set it up as ordered, and run the user's program there.

    A program that is not Python of this interpreter is exec'ed.

    :param env: all its variables.
    :param words: control group, folder, command etc., from ``starting.guard_words``.
    :param streams: descriptors of its stdout and stderr.
    :param shim: pid of the shim, with which the kernel kills the child.
    """
    encoded = [os.fsencode(word) for word in words]
    command = [os.fsdecode(word) for word in encoded[4:]]
    forking.start_anew(command, env, streams)
    guard.die_with(shim)
    guard.set_up(encoded)
    if not program.is_python(command, interpreter()):
        guard.execute(*encoded[3:])
    program.run_program(command)

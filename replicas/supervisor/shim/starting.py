"""Start a node's processes: torchrun's launcher, or the program.

The launcher builds its workers' commands with this module. Standard library only.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicas.linux import cgroups, private
from replicas.linux.helpers import interpreter, popen_arguments, python_module
from replicas.linux.processes import LAUNCHER, Child
from replicas.linux.scarce import naming_limits
from replicas.supervisor.shim.log_pipes import LogPipes
from replicas.supervisor.wire import guard, orders
from replicas.supervisor.wire.guard import GUARD, pack
from replicas.supervisor.wire.orders import PartSpec, plain


def start_program(spec: PartSpec, pipes: LogPipes) -> Child:
    """Start the user's program, and return its process.

    A guard runs first in the process: code of ours that sets it up and execs the
    program. The process leads a session, and writes into the pipes of rank 0.

    :raises OSError: the system refuses.
    """
    env = {**spec.env, GUARD: where(guard_orders(spec, direct=True))}
    streams = pipes.streams("rank 0")
    return _spawn(guard_command(), streams, stdin=subprocess.DEVNULL, start_new_session=True, env=env)


def start_launcher(spec: PartSpec, pipes: LogPipes, scratch: Path) -> tuple[Child, socket.socket]:
    """Start torchrun's launcher in the part's control group, and send it the spec.

    :param pipes: the launcher writes into that of ``torchrun``.
    :param scratch: folder in which torchrun may write (:func:`make_scratch_folder`).
    :return: its process, and this end of its control socket.
    :raises OSError: the system refuses.
    """
    ours, theirs = orders.pair()
    fd = theirs.fileno()
    command = python_module(LAUNCHER, "--control", str(fd), "--parent", str(os.getpid()))
    with theirs:
        child = _spawn(command, pipes.streams("torchrun"), pass_fds=(fd,), **popen_arguments(spec.env, spec.cwd))
    return child, brief_launcher(spec, pipes, scratch, child, ours)


def brief_launcher(
    spec: PartSpec, pipes: LogPipes, scratch: Path, launcher: Child, ours: socket.socket
) -> socket.socket:
    """Put the launcher into the part's control group, and send it the spec.

    Return this end of its control socket.
    """
    if spec.cgroup:
        cgroups.enter(Path(spec.cgroup), launcher.pid)  # before it starts other processes
    told = spec._replace(shim=os.getpid(), pipes=pipes.of_ranks(), scratch=str(scratch))
    orders.send(ours, {"type": "start", "spec": plain(told)})
    return ours


@naming_limits()
def _spawn(command: list[str], streams: tuple[int, int], **options: Any) -> Child:
    """Start a process, and return it.

    :param streams: descriptors for it to write to, as stdout and stderr.
    :param options: further arguments of Popen.
    :raises OSError: the system refuses.
    """
    return Child(subprocess.Popen(command, stdout=streams[0], stderr=streams[1], **options))


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return the command to exec for a command of the config.

    This Python runs ``x.py`` and ``-m module``, with unbuffered output.
    """
    if command[0] == "-m" or command[0].endswith(".py"):
        return [interpreter(), "-u", *command]
    return list(command)


def guard_orders(spec: PartSpec, *, direct: bool) -> int:
    """Write the orders for guards into a new memfd, and return its descriptor.

    A guard sets up a rank's process (log, control group) before its program is exec'ed.

    :param direct: True if this process is the shim, False if it is torchrun.
    """
    file = os.memfd_create("replicas-guard")
    with open(file, "wb", closefd=False) as orders_file:
        orders_file.write(pack(guard_words(spec, direct=direct)))
    return file


def guard_words(spec: PartSpec, *, direct: bool) -> list[str]:
    """Return the orders for guards, as in :func:`guard_orders`."""
    pipes = () if direct else spec.pipes
    return [
        str(spec.shim),
        " ".join(f"{out} {err}" for out, err in pipes),
        spec.cgroup if direct else "",  # torchrun's children inherit its control group
        spec.cwd,
        *resolve_command(spec.command),
    ]


def where(guard_orders: int) -> str:
    """Return the value of the variable ``REPLICAS_GUARD``: this pid and a descriptor.

    By it, a guard finds the orders for its process.

    :param guard_orders: descriptor of this process, from :func:`guard_orders`.
    """
    return f"{os.getpid()} {guard_orders}"


def make_scratch_folder(spec: PartSpec) -> Path:
    """Make and return a folder for torchrun's files: by the logs, or in /tmp."""
    folder = Path(spec.log_dir) / f"torchrun-{spec.node}"
    try:
        private.make_folder(folder)
        private.create(folder / "probe", bytes(4096))  # a full disk would accept an empty file
        private.remove(folder / "probe")
    except OSError:
        import tempfile  # loads slowly, and is rarely needed

        private.remove_tree(folder)
        folder = Path(tempfile.mkdtemp(prefix="replicas-"))
    return folder


def guard_command() -> list[str]:
    """Return the guard's command line. It runs as a file, which starts faster."""
    return [interpreter(), "-I", "-S", guard.__file__]

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
from replicas.linux.helpers import apart, interpreter, python_module
from replicas.linux.processes import Child
from replicas.linux.scarce import naming_limits
from replicas.supervisor.shim.log_pipes import LogPipes
from replicas.supervisor.wire import guard, orders
from replicas.supervisor.wire.guard import GUARD, pack
from replicas.supervisor.wire.orders import PartSpec, plain


class Starter:
    """Starts processes in new sessions, in the part's control group, with its logs.

    Each start raises OSError if the system refuses.

    :ivar scratch: folder made for torchrun; empty if there is none.
    """

    def __init__(self, spec: PartSpec, pipes: LogPipes) -> None:
        self.scratch = ""
        self._orders = -1
        self._spec = spec
        self._pipes = pipes

    def program(self) -> Child:
        self._orders = guard_orders(self._spec, direct=True)
        env = {**self._spec.env, GUARD: where(self._orders)}
        return self._spawn(guard_command(), "rank 0", stdin=subprocess.DEVNULL, start_new_session=True, env=env)

    def launcher(self) -> tuple[Child, socket.socket]:
        """Start torchrun's launcher; return it and this end of its control socket."""
        ours, theirs = orders.pair()
        fd = theirs.fileno()
        command = python_module("replicas.supervisor.shim.launcher", "--control", str(fd), "--parent", str(os.getpid()))
        with theirs:
            child = self._spawn(command, "torchrun", pass_fds=(fd,), **apart(self._spec.env, self._spec.cwd))
        self._enclose(child)
        self.scratch = str(_scratch_folder(self._spec))
        spec = self._spec._replace(shim=os.getpid(), pipes=self._pipes.of_ranks(), scratch=self.scratch)
        orders.send(ours, {"type": "start", "spec": plain(spec)})
        return child, ours

    def _enclose(self, child: Child) -> None:
        """Move the child into the control group, before it starts other processes."""
        if self._spec.cgroup:
            cgroups.enter(Path(self._spec.cgroup), child.pid)

    @naming_limits()
    def _spawn(self, command: list[str], log: str, **options: Any) -> Child:
        out, err = self._pipes.streams(log)
        return Child(subprocess.Popen(command, stdout=out, stderr=err, **options))


def resolve_command(command: Sequence[str]) -> list[str]:
    """Return a command to exec; ``x.py`` and ``-m module`` use this Python."""
    if command[0] == "-m" or command[0].endswith(".py"):
        return [interpreter(), "-u", *command]
    return list(command)


def guard_orders(spec: PartSpec, *, direct: bool) -> int:
    """Return a memfd with the orders for guards that this process starts.

    :param direct: True if this process is the shim, False if it is torchrun.
    """
    pipes = () if direct else spec.pipes
    words = [
        str(spec.shim),
        " ".join(f"{out} {err}" for out, err in pipes),
        spec.cgroup if direct else "",  # torchrun's children inherit its control group
        spec.cwd,
        *resolve_command(spec.command),
    ]
    file = os.memfd_create("replicas-guard")
    with open(file, "wb", closefd=False) as orders_file:
        orders_file.write(pack(words))
    return file


def where(guard_orders: int) -> str:
    """Return the value of the variable :data:`GUARD` for these orders."""
    return f"{os.getpid()} {guard_orders}"


def _scratch_folder(spec: PartSpec) -> Path:
    """Make a folder for torchrun's error files: beside the logs, or in /tmp."""
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

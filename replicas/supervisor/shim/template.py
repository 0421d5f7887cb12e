"""Template: a process with a group's modules loaded, from which its processes fork.

``python -u template.py --listener N --parent PID --modules torch,transformers ...``

Theory of operation
===================

A replica that starts loads torch twice: in torchrun's launcher and in its rank. With
``groups.NAME.preload`` an agent keeps a template for the group: a process that was
started with the environment of its ranks, has loaded these modules once, has one
thread, and has not opened a GPU. It forks a shim for each part, on the agent's order
(:class:`replicas.sidecar.wire.ForkShim`); the shim, which has one thread, too, forks
the launcher and the ranks (:mod:`replicas.linux.forking`). So the parts of the process
tree, their death signals, marks and control groups are those of a cold start; only who
has loaded the modules differs. The memory of the modules is shared.

It runs as a file, as a rank's program does, so that flags and import path are alike. A
module that cannot be loaded so (it starts threads, or opens a GPU or a socket) is
refused by name: the template then forks nothing, and the agent starts shims cold. If a
loaded file has changed since, the template ends, and its keeper
(:mod:`replicas.sidecar.kept_forkserver`) starts another.
"""

# ruff: noqa: E402  # the import path is put in order first

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # this file's folder: no module is to be found there

import argparse
import gc
import importlib
import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

_path = [*sys.path]
sys.path.insert(0, str(Path(__file__).parents[3]))  # this copy of the package, from which this file is

from replicas import environ
from replicas.linux import inherited, rank_environment
from replicas.linux.helpers import python_module
from replicas.linux.processes import SHIM, descriptors, die_with_parent, name_process
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress
from replicas.sidecar.forkserver import ForkServer
from replicas.supervisor.shim import forked_starting, forking, shim

sys.path[:] = _path

_GPU = "/dev/nvidia"
Stamps = dict[str, tuple[int, int, int]]


def preload(names: list[str]) -> str:
    """Import modules in this order, up to the first that forks cannot share.

    Return why: it cannot be imported, starts threads, or opens a GPU or a socket.
    Return "" if all can be shared.
    """
    for name in names:
        before = _sockets()
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # any code runs in an import
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
        if _threads() > 1:
            return f"{name} starts threads when it is imported, which a fork would lose"
        if any(path.startswith(_GPU) for path in descriptors(os.getpid())):
            return f"{name} opens the GPU when it is imported, which cannot be shared by forked processes"
        if _sockets() - before:
            return f"{name} opens a socket when it is imported, which forked processes would share"
    return ""


def _threads() -> int:
    """Return the number of threads that a fork leaves in this process.

    OpenBLAS ends its threads before a fork, and starts them again when it needs them.
    """
    with naming_limits():
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(Path("/proc/self/task").iterdir()))


def _sockets() -> set[str]:
    """Return the names of this process's open sockets."""
    return {path for path in descriptors(os.getpid()) if path.startswith("socket:")}


def loaded_files() -> Stamps:
    """Return time of change, size and inode of each loaded module's file."""
    paths = {str(getattr(module, "__file__", None) or "") for module in [*sys.modules.values()]} - {""}
    return {path: found for path in paths if (found := _stamp(path)) is not None}


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return a file's time of change, size and inode; None if it is gone."""
    try:
        found = os.stat(path)  # noqa: PTH116  # thousands of them
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Shims:
    """Forks a group's shims (parents of its parts' ranks) from this template process.

    :param refused: why none can be forked; empty if they can.
    """

    def __init__(self, refused: str) -> None:
        """Note which files are loaded; fork nothing."""
        self._refused = refused
        self._files = loaded_files()

    def problem(self) -> tuple[str, bool]:
        """Return why no shim can be forked, or "", and True if a new template could."""
        if self._refused:
            return self._refused, False
        changed = next((path for path, stamp in self._files.items() if _stamp(path) != stamp), "")
        return (f"{changed} has changed since it was loaded", True) if changed else ("", False)

    def fork(self, control: int, place: list[int], others: dict[str, int]) -> int:
        """Fork a shim, and return its pid; the child runs :meth:`_become`.

        The descriptors stay open here. In the child, this call raises
        :class:`~replicas.supervisor.shim.forking.Become`.

        :param control: descriptor of its socket to the agent.
        :param place: the agent's pidfd, the shim's log, and a memfd with its
            environment.
        :param others: descriptors by name: the run's lock, the supervisor's stderr.
        :raises OSError: the system allows no process.
        """
        return forking.fork(partial(self._become, control, place, others)).pid

    def _become(self, control: int, place: list[int], others: dict[str, int]) -> None:
        """In the forked child: run a shim, and end with it.

        :param control: descriptor of its socket to the agent.
        :param place: the agent's pidfd, the shim's log, and a memfd with its
            environment.
        :param others: descriptors of the run's lock and of the supervisor's stderr, if
            it gets them.
        """
        pidfd, log, _ = place
        command = python_module(SHIM, "--control", str(control))
        forking.start_anew(command, None, (log, log), keep={control, *place, *others.values()})
        rank_environment.join_place(*place)
        for descriptor in place[1:]:
            os.close(descriptor)
        code = 1
        try:
            code = shim.serve(
                socket.socket(fileno=control), pidfd, others.get("lock"), others.get("tee"), forked_starting
            )
        except Exception:  # noqa: BLE001  # into its log
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def main(arguments: list[str]) -> Any:
    """Load the modules; return a function that serves fork orders until it is killed.

    This process ignores SIGINT, dies with its parent, and moves to the folder ``/``.

    :param arguments: of the command line.
    """
    parser = argparse.ArgumentParser(prog="replicas template")
    parser.add_argument("--listener", type=int, required=True, help="inherited socket that listens")
    parser.add_argument("--parent", type=int, required=True, help="pid whose death ends this process")
    parser.add_argument("--launcher", default="", help="module of torchrun's launcher, if it starts the ranks")
    parser.add_argument("--modules", required=True, help="names of modules, with commas between them")
    parser.add_argument("--cwd", required=True, help="working folder of the ranks")
    parser.add_argument("--path", default="", help="folder that is first on the ranks' import path")
    parser.add_argument("--room", default="", help="makes room for the command lines of forked processes")
    options = parser.parse_args(arguments)
    inherited.put_in_order()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, lambda *_: None)  # on Ctrl-C the supervisor stops its processes in order
    name_process("replica-template")
    os.chdir(options.cwd)
    sys.path.insert(0, options.path or options.cwd)
    refused = preload(options.modules.split(","))
    if options.launcher:
        importlib.import_module(options.launcher)
    del sys.path[0]
    os.chdir("/")
    listener = socket.socket(fileno=options.listener)
    listener.set_inheritable(False)
    secret = SocketAddress.parse(environ.read().forkserver or "").secret
    server = ForkServer(None, listener, secret, Shims(refused))
    gc.collect()
    gc.freeze()
    return server.run


if __name__ == "__main__":
    forking.run(main(sys.argv[1:]))

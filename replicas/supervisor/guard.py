"""The guard: what stands between a launcher and a rank for some milliseconds, then becomes the rank by exec.

It runs as a plain file (``python -I -S guard.py``), so it imports nothing but the standard library, and takes its
orders from one environment variable, ``REPLICAS_GUARD``, a JSON object that it removes again:

``parent``   pid of the process that must be its parent; if it is another one, the parent died and so does this
``shim``     pid of the shim, and
``pipes``    by local rank, its descriptors of two pipes to the log pump: they become stdout and stderr, and the rank, which
             torchrun has put into the environment, is the first line in both; empty: stdout and stderr stay as they are
``cgroup``   path of a control group to enter first; empty: none
``command``  what to exec

The parent-death signal SIGKILL survives the exec: a rank cannot outlive its launcher. Whatever the guard cannot do is
written to the rank's log, and it ends with the shell's codes: 126 (cannot be run), 127 (not found).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import NoReturn

__all__ = ["GUARD", "RANK_MARK", "main"]

GUARD = "REPLICAS_GUARD"
RANK_MARK = b"\0replicas rank "
"""How the first line in the pipe of a worker begins; its rank in decimal follows."""
_PR_SET_PDEATHSIG = 1


def _open_log(shim: int, pipes: list[list[int]]) -> None:
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    mark = RANK_MARK + os.environ["RANK"].encode() + b"\n"
    for stream, pipe in enumerate(pipes[int(os.environ["LOCAL_RANK"])], start=1):
        try:
            log = os.open(f"/proc/{shim}/fd/{pipe}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            _fail(f"cannot reach the log: {error.strerror}", 126)
        os.write(log, mark)
        os.dup2(log, stream)


def _enter(cgroup: str) -> None:
    try:
        group = os.open(os.path.join(cgroup, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC)  # noqa: PTH118  # pathlib would double this short-lived process's start
        os.write(group, b"0")
    except OSError as error:
        _fail(f"cannot enter the control group {cgroup}: {error.strerror}", 126)
    os.close(group)


def _fail(message: str, code: int) -> NoReturn:
    os.write(2, f"replicas: {message}\n".encode())
    os._exit(code)


def main() -> NoReturn:
    orders = json.loads(os.environ.pop(GUARD))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _fail(f"cannot set the parent-death signal: {os.strerror(ctypes.get_errno())}", 126)
    if os.getppid() != orders["parent"]:
        _fail(f"parent process {orders['parent']} is gone", 126)
    if orders["pipes"]:
        _open_log(orders["shim"], orders["pipes"])
    if orders.get("cgroup"):
        _enter(orders["cgroup"])
    command: list[str] = orders["command"]
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec would pass that on
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        _fail(f"command not found: {command[0]!r} (cwd {os.getcwd()})", 127)  # noqa: PTH109  # as above
    except OSError as error:
        _fail(f"cannot run {command[0]!r}: {error.strerror}", 126)


if __name__ == "__main__":
    sys.exit(main())

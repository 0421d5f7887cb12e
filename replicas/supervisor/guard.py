"""The guard: what stands between a launcher and a rank for some milliseconds, then becomes the rank by exec.

It runs as a plain file (``python -I -S guard.py``), so it imports nothing but the standard library, and takes its
orders from one environment variable, ``REPLICAS_GUARD``, a JSON object that it removes again:

``parent``   pid of the process that must be its parent; if it is another one, the parent died and so does this
``log_dir``  folder of the log files; stdout and stderr are appended to ``rank-<RANK>.log`` in it
``rank``     rank to name the log by; -1: take ``RANK`` from the environment (torchrun sets it)
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

__all__ = ["GUARD", "main"]

GUARD = "REPLICAS_GUARD"
_PR_SET_PDEATHSIG = 1


def _open_log(folder: str, rank: str) -> None:
    path = os.path.join(folder, f"rank-{rank}.log")  # noqa: PTH118  # pathlib would double this short-lived process's start
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _fail(message: str, code: int) -> NoReturn:
    os.write(2, f"replicas: {message}\n".encode())
    os._exit(code)


def main() -> NoReturn:
    orders = json.loads(os.environ.pop(GUARD))
    rank = os.environ.get("RANK", "0") if orders["rank"] < 0 else str(orders["rank"])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _fail(f"cannot set the parent-death signal: {os.strerror(ctypes.get_errno())}", 126)
    if os.getppid() != orders["parent"]:
        _fail(f"parent process {orders['parent']} is gone", 126)
    _open_log(orders["log_dir"], rank)
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

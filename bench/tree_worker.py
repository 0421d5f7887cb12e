"""``tree_worker.py KIND FILE``: a program that supervisors are compared with. Standard
library, no site packages.

It appends a line of JSON to FILE when it runs: the time (CLOCK_MONOTONIC), its pid,
those of its daemons. ``plain`` waits; ``stubborn`` ignores SIGTERM, and has three
daemons that do too: a child in a session of its own, one that was forked twice, and one
that was forked twice and has nothing of ours in its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

__all__ = ["main"]

_SLEEP = ("/bin/sleep", "900")


def _daemon(*, twice: bool, bare: bool) -> int:
    """Its pid."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        pid = int(os.read(reader, 32) or b"0")
        os.close(reader)
        if twice:
            os.waitpid(child, 0)
        return pid
    try:
        os.setsid()
        if twice:
            if os.fork():
                os._exit(0)
            os.setsid()
        os.write(writer, str(os.getpid()).encode())
        os.execve(_SLEEP[0], _SLEEP, {} if bare else dict(os.environ))
    finally:
        os._exit(1)


def main(kind: str, path: str) -> None:
    at, daemons = time.monotonic(), []
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an exec keeps that
        daemons = [_daemon(twice=twice, bare=bare) for twice, bare in ((False, False), (True, False), (True, True))]
    line = json.dumps({"at": at, "pid": os.getpid(), "daemons": daemons}).encode() + b"\n"
    told = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(told, line)
    os.close(told)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

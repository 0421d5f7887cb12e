"""``crew.py KIND OUT``: a program without torch, for chaos of processes only. Standard
library, no site packages.

``plain`` waits. ``deaf`` ignores SIGTERM. ``breeds`` has three daemons, all deaf: a
child in a session of its own, one that was forked twice and keeps our output open, and
one that was forked twice with nothing of ours: no environment, no open file.

It tells by JSON lines in ``OUT/GROUP-REPLICA.RANK.jsonl`` when it is up, with the pids
of its daemons, and obeys two signals: ``USR1`` writes ``FLOOD`` numbered lines to its
standard output at once, and tells when the last one is written; ``USR2`` exits with
code 3.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

__all__ = ["FLOOD", "main"]

FLOOD = 20_480
"""Lines of one flood."""
_AT_ONCE = 80
_SLEEP = ("/bin/sleep", "600")


def _daemon(*, twice: bool, bare: bool) -> int:
    """Its pid. ``bare``: with no environment, and no open file of ours."""
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
        if bare:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
        os.execve(_SLEEP[0], _SLEEP, {} if bare else dict(os.environ))
    finally:
        os._exit(1)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def main(kind: str, out: str) -> None:
    orders = {signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, orders)
    generation = int(os.environ.get("REPLICAS_GENERATION", "1"))
    name = f"{os.environ['REPLICAS_GROUP']}-{os.environ['REPLICA_ID']}.{os.environ.get('RANK', '0')}"
    told = os.open(f"{out}/{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def tell(**what: object) -> None:
        line = {"pid": os.getpid(), "generation": generation, "at": time.monotonic(), **what}
        os.write(told, json.dumps(line).encode() + b"\n")

    daemons: list[int] = []
    if kind != "plain":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an exec keeps that
    if kind == "breeds":
        daemons = [_daemon(twice=twice, bare=bare) for twice, bare in ((False, False), (True, False), (True, True))]
    tell(up=True, daemons=daemons)
    written = 0
    while True:
        if signal.sigwait(orders) == signal.SIGUSR2:
            sys.exit(3)
        for _ in range(FLOOD // _AT_ONCE):
            lines = [f"{name} {generation} {written + n} {'x' * (n % 80)}\n" for n in range(_AT_ONCE)]
            _write("".join(lines).encode())
            written += _AT_ONCE
        tell(written=written)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

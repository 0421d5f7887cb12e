"""A flood of connections, in a process of its own: ``python -m
tests.support.machine.flood HOST PORT KIND``.

Standard library only, and alone in its process, as it has to be fast. Kinds:

* ``touch``: connect, say nothing, hang up
* ``hold``: connect, say nothing, keep the newest thousand
* ``page`` and ``live``: ask for /status or /livez, do not wait for the answer
* ``idle``: ask for /status on two hundred connections, again and again, and read the
  answers
* ``drip``: a thousand requests, a byte at a time

It prints how many connections it has made when its input ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["KINDS", "flood"]

_MANY = 5000
_HOLDS = 1000
_TALKS = 200
_REQUESTS = {
    "page": b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "live": b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
KINDS = ("touch", "hold", "page", "live", "idle", "drip")
_ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def flood(host: str, port: int, kind: str, *, prefix: Sequence[str] = ()) -> Iterator[list[int]]:
    """It goes on inside the block; the list then has one number: its connections in a
    second. ``prefix``: as setpriv."""
    command = [*prefix, sys.executable, "-S", "-P", __file__, host, str(port), kind]
    rate: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "flooding\n"
        began = time.monotonic()
        try:
            yield rate
        finally:
            process.stdin.close()
            try:
                made = int(process.stdout.readline() or 0)
                rate.append(round(made / (time.monotonic() - began)))
            finally:
                process.kill()


def _over() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def _fast(address: tuple[str, int], kind: str) -> int:
    """``touch``, ``hold``, ``page``, ``live``: as many connections as this process can
    make."""
    made, keep = 0, {"touch": 0, "hold": _HOLDS, "page": 16, "live": 16}[kind]
    held: deque[socket.socket] = deque()
    request = _REQUESTS.get(kind, b"")
    while made % 256 or not _over():
        made += 1
        if made == _MANY:
            print("flooding", flush=True)
        one = socket.socket()
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(address)
        if request:
            with contextlib.suppress(OSError):
                one.send(request)
        held.append(one)
        while len(held) > keep:
            held.popleft().close()
    return made


def _slow(address: tuple[str, int], kind: str) -> int:
    """``idle``, ``drip``: connections that are kept, and made anew when they are
    cut."""
    made, said, poll = 0, False, select.epoll()
    there: dict[int, socket.socket] = {}
    request = _REQUESTS["page"] if kind == "idle" else b"G"
    while not _over():
        while len(there) < (_TALKS if kind == "idle" else _HOLDS):
            made += 1
            one = socket.create_connection(address)
            there[one.fileno()] = one
            poll.register(one, select.EPOLLIN | select.EPOLLRDHUP)
            with contextlib.suppress(OSError):
                one.send(request)
        if not said:
            said = True
            print("flooding", flush=True)
        if kind == "drip":
            for one in there.values():
                with contextlib.suppress(OSError):
                    one.send(b"x")
        for fd, _ in poll.poll(0.01):
            try:
                lives = bool(there[fd].recv(1 << 20)) and bool(there[fd].send(request))
            except OSError:
                lives = False
            if not lives:
                there.pop(fd).close()
    return made


def main() -> None:
    host, port, kind = sys.argv[1:]
    print((_slow if kind in ("idle", "drip") else _fast)((host, int(port)), kind), flush=True)


if __name__ == "__main__":
    main()

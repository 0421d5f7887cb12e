"""Engines of one host that start at once, while another program takes every port that
it can get: ``python -m tests.support.machine.port_rush held|closed ROUNDS``, in a
network namespace of its own, whose ports are few.

In each round eight engines choose a port, another program takes all that are left, also
by connections, and then each engine's server binds its own. ``held``: as ``serve``
does; ``closed``: as most programs do, which bind port 0, look, and close. One line is
printed for each round: how many servers are up.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from replicas.integrations.shared.serving import reserve_port

ENGINES = 8
FIRST, LAST = 20_000, 20_063
SERVER = """
import socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn and vLLM do
server.bind(("127.0.0.1", int(sys.argv[1])))
server.listen()
print("up", flush=True)
asking, _ = server.accept()
asking.sendall(sys.argv[2].encode())
asking.recv(1)  # its end: who closes first keeps a port for a minute
"""
HERE = "127.0.0.1"


def held() -> AbstractContextManager[int]:
    return reserve_port(HERE, 0)


@contextlib.contextmanager
def closed() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as found:
        port: int = found.getsockname()[1]
    yield port


def take_all(stack: ExitStack) -> int:
    """Every port that is left, in three ways; the number of them."""
    target = stack.enter_context(socket.create_server((HERE, FIRST - 1), backlog=1024))

    def listen(one: socket.socket) -> None:
        one.bind((HERE, 0))
        one.listen()

    def connect(one: socket.socket) -> None:
        one.connect(target.getsockname())

    found = 0
    for reuse in (False, True):
        while take(stack, listen, reuse, errno.EADDRINUSE):
            found += 1
    while take(stack, connect, False, errno.EADDRNOTAVAIL):
        found += 1
    return found


def take(stack: ExitStack, how: Callable[[socket.socket], None], reuse: bool, none_left: int) -> bool:
    """Whether one more port is taken, until the stack ends."""
    one = stack.enter_context(socket.socket())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # nothing of it stays for a minute
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        how(one)
    except OSError as error:
        if error.errno == none_left:
            return False
        raise
    return True


def play(way: Callable[[], AbstractContextManager[int]]) -> int:
    """One round; the number of servers that are up, and are the right ones."""
    with ExitStack() as stack:
        ports = [stack.enter_context(way()) for _ in range(ENGINES)]
        found = take_all(stack)
        assert found >= LAST - FIRST + 1 - ENGINES, found
        command = [sys.executable, "-I", "-S", "-c", SERVER]
        servers = [
            subprocess.Popen(
                [*command, str(port), str(number)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            for number, port in enumerate(ports)
        ]
        try:
            return sum(map(answers, servers, ports, range(ENGINES)))
        finally:
            for server in servers:
                server.kill()
                server.communicate()


def answers(server: subprocess.Popen[str], port: int, number: int) -> bool:
    assert server.stdout is not None
    if server.stdout.readline() != "up\n":
        return False
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{LAST + 1} {LAST + 1000}")  # for this look
    with socket.create_connection((HERE, port), 20) as looking:
        return looking.recv(10) == str(number).encode()


def main() -> None:
    way = {"held": held, "closed": closed}[sys.argv[1]]
    for _ in range(int(sys.argv[2])):
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{FIRST} {LAST}")
        print(play(way), flush=True)


if __name__ == "__main__":
    main()

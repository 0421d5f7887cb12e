"""Servers and pulls of carriers in the test's own process, in plain or in TLS."""

from __future__ import annotations

import mmap
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import xxhash

from replicas.carry import greeting, tls
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.differences import Deltas
from replicas.carry.holders import Holder
from replicas.carry.image import Image
from replicas.carry.pull import Failed, Pull
from replicas.carry.serve import Server
from replicas.trust.certificate import certificate_hash, context_of, make_pem

SECRET = b"s" * greeting.SECRET_NBYTES
NUMBER = 7
OFFSET = 4096


class Threads:
    """Starts threads, and knows whether all have ended. ``encrypt``: what they do is in
    TLS."""

    def __init__(self, *, encrypt: bool = False) -> None:
        self.encrypt = encrypt
        self.all: list[threading.Thread] = []

    def start(self, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, daemon=True)
        self.all.append(thread)
        thread.start()

    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self.all)

    def end(self) -> None:
        for thread in self.all:
            thread.join(30)
        assert not self.alive()


class Certificate:
    """The key and certificate of one carrier."""

    def __init__(self) -> None:
        self.pem = make_pem()
        self.hash = certificate_hash(self.pem)

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """The server's side of a connection that was accepted."""
        sealed = tls.wrap(sock, context_of(self.pem), server_side=True)
        sealed.do_handshake()
        return sealed


def slot(data: bytes | int) -> tuple[int, mmap.mmap]:
    """A memfd with a header of :data:`OFFSET` bytes, and its mapping."""
    fd = os.memfd_create("a slot")
    nbytes = data if isinstance(data, int) else len(data)
    os.ftruncate(fd, OFFSET + nbytes)
    memory = mmap.mmap(fd, OFFSET + nbytes)
    if isinstance(data, bytes):
        memory[OFFSET:] = data
    return fd, memory


class Host:
    """A server that accepts on a thread of its own."""

    def __init__(self, threads: Threads, name: str = "rollout/0/0", address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.server = Server(self.listener, threads.start)
        self.certificate = Certificate() if threads.encrypt else None
        if self.certificate is not None:
            self.server.certify(context_of(self.certificate.pem), self.certificate.hash)
        self.holder = Holder(name, address, self.listener.getsockname()[1], self._hash)
        self._end, self._ended = os.pipe()
        self._encrypt = threads.encrypt
        threads.start(self._accept)

    @property
    def _hash(self) -> str:
        return self.certificate.hash if self.certificate is not None else ""

    def _accept(self) -> None:
        with self.listener:
            while self.listener.fileno() in select.select([self.listener.fileno(), self._end], [], [])[0]:
                self.server.accept()

    def close(self) -> None:
        os.write(self._ended, b"x")
        self.server.withdraw(NUMBER, "the host has gone")

    def serves(self, data: bytes, *, filled: int | None = None, base: bytes | None = None) -> Image:
        fd, memory = slot(data)
        image = Image(
            fd, OFFSET, len(data), full=filled is None, data=memoryview(memory)[OFFSET:] if self._encrypt else None
        )
        if filled:
            image.mark_present(0, filled)
        deltas = None if base is None else Deltas(len(data), memoryview(base), memoryview(memory)[OFFSET:])
        self.server.offer(NUMBER, image, SECRET, deltas, encrypt=self._encrypt)
        return image

    def dial(self) -> socket.socket:
        """A connection that has proven itself, as a puller's."""
        sock = socket.create_connection(self.listener.getsockname()[:2])
        binding = b""
        if self.certificate is not None:
            sock = tls.wrap(sock, tls.client_context())
            tls.do_handshake(sock, self.certificate.hash)
            binding = bytes.fromhex(self.certificate.hash)
        greeting.prove_as_puller(sock, NUMBER, SECRET, binding, time.monotonic() + 30.0)
        sock.settimeout(None)
        return sock


class FalseHost:
    """A listener that speaks the greeting, as a holder does, and then what it likes."""

    def __init__(self, threads: Threads, *, known: bool = True) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(1.0)
        self.certificate = Certificate() if threads.encrypt else None
        told = self.certificate if known else Certificate()
        port: int = self.listener.getsockname()[1]
        self.holder = Holder("trainer/0/0", "127.0.0.1", port, told.hash if told is not None else "")

    def accept(self) -> socket.socket:
        """A puller that has proven itself."""
        sock, _ = self.listener.accept()
        binding = b""
        if self.certificate is not None:
            sock, binding = self.certificate.wrap(sock), bytes.fromhex(self.certificate.hash)
        greeting.prove_as_server(sock, lambda transfer: SECRET, binding, time.monotonic() + 30.0)
        sock.settimeout(None)
        return sock


@contextmanager
def hosts(threads: Threads, *names: str) -> Iterator[list[Host]]:
    found = [Host(threads, name) for name in names]
    try:
        yield found
    finally:
        for host in found:
            host.close()


def a_pull(
    threads: Threads,
    nbytes: int,
    secret: bytes = SECRET,
    source: str = "",
    base: bytes | None = None,
    trips: dict[str, float] | None = None,
) -> tuple[Pull, mmap.mmap]:
    fd, memory = slot(nbytes)
    image = Image(fd, OFFSET, nbytes, data=memoryview(memory)[OFFSET:] if threads.encrypt else None)
    old = None if base is None else memoryview(base)
    return Pull(image, memory, NUMBER, secret, source, old, trips, encrypt=threads.encrypt), memory


def run(one: Pull, threads: Threads, *holders: Holder, timeout_s: float = 30.0, digest: str = "") -> str:
    return one.run(holders, time.monotonic() + timeout_s, threads.start, digest)


def begin(one: Pull, threads: Threads, *holders: Holder) -> Future[str]:
    """The same on a thread; its digest, or why it has failed."""
    found = Future[str]()

    def attempt() -> None:
        try:
            found.set_result(run(one, threads, *holders))
        except Failed as error:
            found.set_exception(error)

    threads.start(attempt)
    return found


def digests(data: bytes) -> list[bytes]:
    return [xxhash.xxh3_128_digest(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)]

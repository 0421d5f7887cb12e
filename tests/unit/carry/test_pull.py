"""Pulls from servers in this process, over TCP on loopback.

Covers: carry/greeting.py, carry/holders.py, carry/serve.py, carry/pull.py.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest
import xxhash

from replicas.carry import greeting, pull, serve
from replicas.carry import holders as holders_module
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.holders import Holder
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.pull import Failed, Pull
from replicas.carry.serve import ASK, HEAD, OVER, Server

SECRET = b"s" * greeting.SECRET_NBYTES
NUMBER = 7
OFFSET = 4096
Start = Callable[[Callable[[], None]], object]


class Threads:
    """Starts threads, and knows whether all have ended."""

    def __init__(self) -> None:
        self.all: list[threading.Thread] = []

    def start(self, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        self.all.append(thread)

    def end(self) -> None:
        for thread in self.all:
            thread.join(30)
        assert not [thread for thread in self.all if thread.is_alive()]


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads()
    yield found
    found.end()


def slot(data: bytes | int) -> tuple[int, mmap.mmap]:
    """A memfd with a header of :data:`OFFSET` bytes, and its mapping."""
    fd = os.memfd_create("test-slot")
    nbytes = data if isinstance(data, int) else len(data)
    os.ftruncate(fd, OFFSET + nbytes)
    memory = mmap.mmap(fd, OFFSET + nbytes)
    if isinstance(data, bytes):
        memory[OFFSET:] = data
    return fd, memory


class Host:
    """A server that accepts on a thread of its own."""

    def __init__(self, threads: Threads, name: str = "rollout/0/0") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server(self.listener, threads.start)
        self.holder = Holder(name, *self.listener.getsockname())
        self._end, self._ended = os.pipe()
        threads.start(self._accept)

    def _accept(self) -> None:
        with self.listener:
            while self.listener.fileno() in select.select([self.listener.fileno(), self._end], [], [])[0]:
                self.server.accept()

    def close(self) -> None:
        os.write(self._ended, b"x")
        self.server.withdraw(NUMBER, "the host has gone")

    def serves(self, data: bytes, *, filled: int | None = None) -> Image:
        fd, _ = slot(data)
        image = Image(fd, OFFSET, len(data), full=filled is None)
        if filled:
            image.fill(0, filled)
        self.server.offer(NUMBER, image, SECRET)
        return image


@contextmanager
def hosts(threads: Threads, *names: str) -> Iterator[list[Host]]:
    found = [Host(threads, name) for name in names]
    try:
        yield found
    finally:
        for host in found:
            host.close()


def a_pull(nbytes: int, secret: bytes = SECRET) -> tuple[Pull, mmap.mmap]:
    fd, memory = slot(nbytes)
    return Pull(Image(fd, OFFSET, nbytes), memory, NUMBER, secret), memory


def run(one: Pull, threads: Threads, *holders: Holder, timeout_s: float = 30.0) -> str:
    return one.run(holders, time.monotonic() + timeout_s, threads.start)


def digests(data: bytes) -> list[bytes]:
    return [xxhash.xxh3_128_digest(data[at : at + BLOCK_NBYTES]) for at in range(0, len(data), BLOCK_NBYTES)]


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3 * BLOCK_NBYTES + 12345)


def test_all_bytes_come_and_the_digest_with_them(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(len(data))
        assert run(one, threads, host.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received == {"trainer/0/0": len(data)}
        assert host.server.withdraw(NUMBER, "over") == len(data)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, BLOCK_NBYTES])
def test_images_of_any_size(threads: Threads, data: bytes, nbytes: int) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data[:nbytes])
        one, memory = a_pull(nbytes)
        assert run(one, threads, host.holder) == combined(digests(data[:nbytes]))
        assert memory[OFFSET:] == data[:nbytes]


def test_bytes_are_sent_while_they_are_packed(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=10)
        one, memory = a_pull(len(data))
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(run(one, threads, host.holder)))
        thread.start()
        assert one.image.here(0, 1, 0.1) == 0  # a chunk is whole, or not here
        for filled in (CHUNK_NBYTES, 5 * CHUNK_NBYTES + 1, BLOCK_NBYTES + 3, len(data)):
            image.fill(0, filled)
            whole = filled // CHUNK_NBYTES * CHUNK_NBYTES
            assert one.image.here(whole - 1, whole, 30.0) == 1
        thread.join(30)
        assert found == [combined(digests(data))]
        assert memory[OFFSET:] == data


def test_a_host_serves_what_it_is_still_receiving(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, between):
        image = source.serves(data, filled=0)
        first, _ = a_pull(len(data))
        between.server.offer(NUMBER, first.image, SECRET)
        last, memory = a_pull(len(data))
        found: list[str] = []
        ways = ((first, source.holder), (last, between.holder))
        pulls = [
            threading.Thread(target=lambda one=one, holder=holder: found.append(run(one, threads, holder)))
            for one, holder in ways
        ]
        for thread in pulls:
            thread.start()
        image.fill(0, BLOCK_NBYTES)
        assert last.image.here(0, BLOCK_NBYTES, 30.0) > 0  # before the source has all of it
        image.fill(0, len(data))
        for thread in pulls:
            thread.join(30)
        assert found == 2 * [combined(digests(data))]
        assert memory[OFFSET:] == data


def test_another_holder_goes_on_where_one_has_stopped(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, other):
        image = source.serves(data, filled=BLOCK_NBYTES)
        other.serves(data)
        one, memory = a_pull(len(data))
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(run(one, threads, source.holder, other.holder)))
        thread.start()
        assert one.image.here(BLOCK_NBYTES - 1, BLOCK_NBYTES, 30.0) == 1
        assert source.server.withdraw(NUMBER, "its rank has died") >= BLOCK_NBYTES
        thread.join(30)
        assert found == [combined(digests(data))]
        assert memory[OFFSET:] == data
        assert list(one.why) == ["trainer/0/0"]
        assert one.received["trainer/0/0"] >= BLOCK_NBYTES > 0
        assert one.received["rollout/0/0"] <= len(data) - BLOCK_NBYTES
        assert image.nbytes == len(data)


def test_a_pull_that_failed_goes_on_when_it_is_run_again(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, other):
        source.serves(data, filled=2 * BLOCK_NBYTES)
        one, memory = a_pull(len(data))
        found: list[object] = []

        def attempt() -> None:
            try:
                run(one, threads, source.holder)
            except Failed as error:
                found.append(error.why)

        thread = threading.Thread(target=attempt)
        thread.start()
        assert one.image.here(2 * BLOCK_NBYTES - 1, 2 * BLOCK_NBYTES, 30.0) == 1
        source.server.withdraw(NUMBER, "over")
        thread.join(30)
        assert [list(why) for why in found if isinstance(why, dict)] == [["trainer/0/0"]]
        other.serves(data)
        assert run(one, threads, other.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received["rollout/0/0"] <= len(data) - 2 * BLOCK_NBYTES + BLOCK_NBYTES


@pytest.mark.parametrize("known", ["before", "afterwards"])
def test_a_wrong_block_is_asked_for_elsewhere_and_its_holder_named(threads: Threads, data: bytes, known: str) -> None:
    forged = bytearray(data)
    forged[BLOCK_NBYTES + 17] ^= 1
    with hosts(threads, "rollout/3/0", "trainer/0/0") as (liar, source):
        liar.serves(bytes(forged))
        source.serves(data)
        one, memory = a_pull(len(data))
        if known == "before":
            one.expect(digests(data))
        else:
            assert run(one, threads, liar.holder) == combined(digests(bytes(forged)))
            one.expect(digests(data))
            assert one.image.here(BLOCK_NBYTES, BLOCK_NBYTES + 1, 0.0) == 0
            assert one.why == {"rollout/3/0": "block 1 is not what was published"}
        assert run(one, threads, *([liar.holder] if known == "before" else []), source.holder) == combined(
            digests(data)
        )
        assert memory[OFFSET:] == data
        assert one.again == 1
        if known == "before":
            assert one.why == {"rollout/3/0": "block 1 is not what was published"}


def test_nobody_reads_the_slot_once_it_is_withdrawn(threads: Threads, data: bytes) -> None:
    """Not even for a puller that reads nothing."""
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        with closing(socket.create_connection(host.listener.getsockname())) as sock:
            greeting.greet(sock, NUMBER, SECRET)
            sock.sendall(ASK.pack(0, len(data)))
            assert sock.recv(4) == HEAD.pack(min(len(data), serve.PIECE_NBYTES))
            began = time.monotonic()
            host.server.withdraw(NUMBER, "over")
            assert time.monotonic() - began < 5.0


def test_a_frozen_holder_is_given_up(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """It accepts, proves itself, and then says nothing."""
    monkeypatch.setattr(pull, "SILENT_S", 0.3)
    monkeypatch.setattr(pull, "LAST_SILENT_S", 30.0)
    with hosts(threads, "rollout/0/0") as (other,), closing(socket.create_server(("127.0.0.1", 0))) as listener:
        kept: list[socket.socket] = []

        def freeze() -> None:
            for _ in range(2):
                sock, _ = listener.accept()
                kept.append(sock)
                greeting.answer(sock, lambda transfer: SECRET)

        threads.start(freeze)
        other.serves(data)
        one, memory = a_pull(len(data))
        assert run(one, threads, Holder("trainer/0/0", *listener.getsockname()), other.holder) == combined(
            digests(data)
        )
        assert one.why == {"trainer/0/0": "it was silent for too long"}
        assert one.cut == {"trainer/0/0"}
        assert memory[OFFSET:] == data
        for sock in kept:
            sock.close()


def test_a_holder_that_waits_for_bytes_is_not_given_up(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(pull, "LAST_SILENT_S", 0.3)
    monkeypatch.setattr(serve, "SIGN_S", 0.05)
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=0)
        one, memory = a_pull(len(data))
        thread = threading.Thread(target=lambda: run(one, threads, host.holder))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        image.fill(0, len(data))
        thread.join(30)
        assert memory[OFFSET:] == data
        assert not one.why


def dripping(threads: Threads, data: bytes, rate: float) -> Holder:
    """A holder that gives so many bytes a second; each connection, until it ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def give(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            greeting.answer(sock, lambda transfer: SECRET)
            at, end = ASK.unpack(greeting.read_exactly(sock, ASK.size))
            sock.sendall(HEAD.pack(end - at))
            while at < end:
                part = data[at : min(end, at + int(rate * 0.02))]
                sock.sendall(part)
                at += len(part)
                time.sleep(0.02)

    def accept() -> None:
        with listener:
            listener.settimeout(2.0)
            with contextlib.suppress(TimeoutError):
                while True:
                    sock = listener.accept()[0]
                    threads.start(partial(give, sock))

    threads.start(accept)
    return Holder(f"rollout/{rate:g}/0", *listener.getsockname())


@pytest.mark.slow
def test_a_holder_that_has_nothing_makes_room_for_one_that_has(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """The first host of a chain is behind a slow link: those after it need not be."""
    monkeypatch.setattr(holders_module, "TRY_S", 0.2)
    with hosts(threads, "rollout/0/0", "trainer/0/0") as (between, source):
        between.serves(data, filled=CHUNK_NBYTES)
        source.serves(data)
        one, memory = a_pull(len(data))
        began = time.monotonic()
        assert run(one, threads, between.holder, source.holder) == combined(digests(data))
        assert time.monotonic() - began < 5.0
        assert memory[OFFSET:] == data
        assert list(one.why) == list(one.cut) == ["rollout/0/0"]


@pytest.mark.slow
def test_of_slow_holders_the_best_goes_on(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(holders_module, "TRY_S", 0.2)
    monkeypatch.setattr(holders_module, "LEFT_S", 0.3)
    small = data[: 3 * CHUNK_NBYTES]
    holders = [dripping(threads, small, rate) for rate in (1e5, 3e6, 5e5)]
    one, memory = a_pull(len(small))
    assert run(one, threads, *holders) == combined(digests(small))
    assert memory[OFFSET:] == small
    assert max(one.received, key=lambda name: one.received[name]) == "rollout/3e+06/0"
    assert "rollout/3e+06/0" not in one.why


def test_the_time_is_up(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(len(data))
        with pytest.raises(Failed, match="the time was up"):
            run(one, threads, host.holder, timeout_s=0.2)


def test_a_pull_that_is_stopped_ends_at_once(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(len(data))
        found: list[str] = []

        def attempt() -> None:
            with pytest.raises(Failed) as failed:
                run(one, threads, host.holder)
            found.append(str(failed.value))

        thread = threading.Thread(target=attempt)
        thread.start()
        assert one.image.here(0, 1, 0.1) == 0
        one.stop("the version is not needed any more")
        thread.join(30)
        assert found == [": the version is not needed any more"]


def test_neither_end_speaks_with_a_stranger(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(len(data), secret=secrets.token_bytes(greeting.SECRET_NBYTES))
        with pytest.raises(Failed, match="trainer/0/0: whoever listens there does not know the secret"):
            run(one, threads, host.holder)
        assert memory[OFFSET:] == bytes(len(data))
        with closing(socket.create_connection(host.listener.getsockname())) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64))
            sock.settimeout(10)
            assert len(b"".join(iter(lambda: sock.recv(100), b""))) == 48  # a nonce and a proof of nothing
        host.server.withdraw(NUMBER, "over")
        with pytest.raises(Failed, match="does not know the secret"):
            run(a_pull(len(data))[0], threads, host.holder)


def test_what_does_not_prove_itself_is_closed(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(serve, "PROOF_S", 0.2)
    monkeypatch.setattr(serve, "UNPROVEN", 3)
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        address = host.listener.getsockname()
        silent = [socket.create_connection(address) for _ in range(6)]
        for sock in silent:
            sock.settimeout(10)
            assert sock.recv(1) == b""
            sock.close()
        assert run(a_pull(len(data))[0], threads, host.holder) == combined(digests(data))


@pytest.mark.parametrize("asked", [(0, 0), (5, 4), (0, 1 << 40)])
def test_a_range_that_the_version_has_not_ends_the_connection(
    threads: Threads, data: bytes, asked: tuple[int, int]
) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        with closing(socket.create_connection(host.listener.getsockname())) as sock:
            greeting.greet(sock, NUMBER, SECRET)
            sock.sendall(ASK.pack(*asked))
            sock.settimeout(10)
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("heads", "why"),
    [([HEAD.pack(OVER)], "does not serve the version any more"), ([HEAD.pack(1 << 30)], "sends more than was asked")],
)
def test_a_holder_that_talks_nonsense_is_given_up(threads: Threads, data: bytes, heads: list[bytes], why: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            listener.settimeout(1.0)
            for _ in range(2):  # or one, if it is given up before the other one dials
                with contextlib.suppress(OSError):
                    sock, _ = listener.accept()
                    with sock:
                        greeting.answer(sock, lambda transfer: SECRET)
                        sock.sendall(b"".join(heads))

        threads.start(answer)
        one, _ = a_pull(len(data))
        with pytest.raises(Failed, match=why):
            run(one, threads, Holder("trainer/0/0", *listener.getsockname()))


def listening(**options: int) -> socket.socket:
    """Somebody who accepts nothing by itself."""
    return socket.create_server(("127.0.0.1", 0), **options)  # type: ignore[arg-type]  # backlog


@contextmanager
def unreachable() -> Iterator[Holder]:
    """A holder that never accepts: the queue of those that wait for it is full."""
    with closing(listening(backlog=0)) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(closing(socket.socket()))
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield Holder("rollout/9/0", *listener.getsockname())


def test_who_still_dials_is_not_waited_for(threads: Threads, data: bytes) -> None:
    """By a pull that is stopped: its slot is wanted."""
    with unreachable() as nobody:
        one, _ = a_pull(len(data))
        failed: list[Failed] = []

        def attempt() -> None:
            try:
                run(one, threads, nobody)
            except Failed as error:
                failed.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        assert one.image.here(0, 1, 0.2) == 0
        began = time.monotonic()
        one.stop("a newer version is there")
        thread.join(30)
        assert time.monotonic() - began < 1.0
        assert [str(error) for error in failed] == [": a newer version is there"]


def test_a_holder_that_takes_no_further_connection_is_not_given_up(threads: Threads, data: bytes) -> None:
    """Nor asked for more of them: the one that it has taken gets all."""
    with hosts(threads, "trainer/0/0") as (host,), closing(listening()) as door:
        host.serves(data)

        def open_once() -> None:
            """Pass the first connection on, and close all others."""
            first, _ = door.accept()
            with first, socket.create_connection(host.listener.getsockname()) as behind:
                ways = [(first, behind), (behind, first)]
                passing = [threading.Thread(target=pass_on, args=way) for way in ways]
                for one in passing:
                    one.start()
                door.settimeout(0.1)
                while any(one.is_alive() for one in passing):
                    with contextlib.suppress(OSError):  # nobody dials, or the test is over
                        door.accept()[0].close()
                for one in passing:
                    one.join()

        threads.start(open_once)
        one, memory = a_pull(len(data))
        assert run(one, threads, Holder("trainer/0/0", *door.getsockname())) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.why == {}


def pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := one.recv(1 << 20):
            other.sendall(part)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("left", [0, 1])
def test_a_lack_of_descriptors_here_is_no_failure_of_a_holder(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes, left: int
) -> None:
    """With one connection the pull does; without any it says what is missing."""
    made = [socket.socket] * left

    class Lacking:
        """The module, as a pull sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(socket, name)

        @staticmethod
        def socket(*arguments: int) -> socket.socket:
            if not made:
                raise OSError(errno.EMFILE, "Too many open files")
            return made.pop()(*arguments)

    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(len(data))
        monkeypatch.setattr(pull, "socket", Lacking())
        if left:
            assert run(one, threads, host.holder) == combined(digests(data))
            assert (one.why, memory[OFFSET:]) == ({}, data)
        else:
            with pytest.raises(Failed) as failed:
                run(one, threads, host.holder)
            assert (failed.value.why, one.cut) == ({"": "Too many open files"}, set())


def test_a_lack_of_threads_is_no_failure_of_a_holder(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(len(data))
        left = [1]

        def start(function: Callable[[], None]) -> None:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            threads.start(function)

        assert one.run([host.holder], time.monotonic() + 30.0, start) == combined(digests(data))
        assert (one.why, memory[OFFSET:]) == ({}, data)
        other, _ = a_pull(len(data))
        with pytest.raises(Failed) as failed:
            other.run([host.holder], time.monotonic() + 30.0, start)
        assert failed.value.why == {"": "can't start new thread"}

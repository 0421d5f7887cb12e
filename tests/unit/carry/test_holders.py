"""Which holder a pull takes bytes from, and what of it is no failure of a holder.

Covers: carry/holders.py, carry/dialler.py.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import pytest

from replicas.carry import endpoint, greeting
from replicas.carry import holders as holders_module
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.holders import Holder
from replicas.carry.image import CHUNK_NBYTES
from replicas.carry.pull import Failed
from replicas.carry.serve import ASK, HEAD
from tests.support.carrying import OFFSET, SECRET, Threads, a_pull, digests, hosts, run


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads()
    yield found
    found.end()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3 * BLOCK_NBYTES + 12345)


def dripping(threads: Threads, data: bytes, rate: float) -> Holder:
    """A holder that gives so many bytes a second; each connection, until it ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def give(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            greeting.prove_as_server(sock, lambda transfer: SECRET)
            _, at, end = ASK.unpack(greeting.read_exactly(sock, ASK.size))
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
        one, memory = a_pull(threads, len(data))
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
    holders = [dripping(threads, small, rate) for rate in (1e5, 3e6, 2e5)]
    one, memory = a_pull(threads, len(small))
    assert run(one, threads, *holders) == combined(digests(small))
    assert memory[OFFSET:] == small
    assert max(one.received, key=lambda name: one.received[name]) == "rollout/3e+06/0"
    assert "rollout/3e+06/0" not in one.why


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
        one, _ = a_pull(threads, len(data))
        failed: list[Failed] = []

        def attempt() -> None:
            try:
                run(one, threads, nobody)
            except Failed as error:
                failed.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        assert one.image.wait_for_bytes(0, 1, 0.2) == 0
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
        one, memory = a_pull(threads, len(data))
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
        one, memory = a_pull(threads, len(data))
        monkeypatch.setattr(endpoint, "socket", Lacking())
        if left:
            assert run(one, threads, host.holder) == combined(digests(data))
            assert (one.why, memory[OFFSET:]) == ({}, data)
        else:
            with pytest.raises(Failed) as failed:
                run(one, threads, host.holder)
            assert (list(failed.value.why), one.cut) == ([""], set())
            assert "Too many open files" in failed.value.why[""]


def test_a_lack_of_threads_is_no_failure_of_a_holder(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(threads, len(data))
        left = [1]

        def start(function: Callable[[], None]) -> None:
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
            threads.start(function)

        assert one.run([host.holder], time.monotonic() + 30.0, start) == combined(digests(data))
        assert (one.why, memory[OFFSET:]) == ({}, data)
        other, _ = a_pull(threads, len(data))
        with pytest.raises(Failed) as failed:
            other.run([host.holder], time.monotonic() + 30.0, start)
        assert failed.value.why == {"": "can't start new thread"}

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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from replicas.carry import endpoint
from replicas.carry import holders as holders_module
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.holders import Holder, Holders
from replicas.carry.image import CHUNK_NBYTES
from replicas.carry.pull import Failed
from tests.support.carrying import OFFSET, Threads, a_pull, begin, digests, hosts, run

LEFT_NBYTES = 30_000_000
"""What is left of a version whose holders are measured."""


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads()
    yield found
    found.end()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3 * BLOCK_NBYTES + 12345)


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
        assert list(one.holders.why) == list(one.holders.cut) == ["rollout/0/0"]


class Clock:
    """The time that the measurements see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(holders_module, "time", SimpleNamespace(monotonic=lambda: self.now))


def receive(clock: Clock, holders: Holders, received: Counter[str], rate: float, seconds: float) -> Holder | None:
    """Let the first holder be measured while it sends ``rate`` bytes a second.

    :returns: the holder that lost the first place, if any.
    """
    first = holders.first
    assert first is not None
    holders.mark_connected(first)
    assert holders.replace_slow(received, LEFT_NBYTES) is None
    clock.now += seconds
    received[first.name] += int(rate * seconds)
    return holders.replace_slow(received, LEFT_NBYTES)


def test_of_slow_holders_the_best_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    bad, best, poor = (Holder(name, "127.0.0.1", 1) for name in ("rollout/0/0", "rollout/1/0", "rollout/2/0"))
    holders, received = Holders([bad, best, poor]), Counter[str]()
    assert receive(clock, holders, received, 1e5, holders_module.TRY_S) is bad
    assert receive(clock, holders, received, 3e6, holders_module.TRY_S) is best
    assert receive(clock, holders, received, 2e5, holders_module.TRY_S) is poor
    assert holders.first is best
    assert set(holders.why) == holders.cut == {"rollout/0/0", "rollout/2/0"}
    assert holders.why["rollout/2/0"] == "it gave 195 KiB/s"
    assert receive(clock, holders, received, 1e3, 10 * holders_module.TRY_S) is None, "it was measured once"


def test_a_holder_keeps_its_place_while_it_is_fast_or_little_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    one, other = Holder("rollout/0/0", "127.0.0.1", 1), Holder("rollout/1/0", "127.0.0.1", 1)
    holders, received = Holders([one, other]), Counter[str]()
    assert receive(clock, holders, received, 1e3, holders_module.TRY_S / 2) is None, (
        "it was not measured for long enough"
    )
    assert receive(clock, holders, received, holders_module.SLOW_NBYTES_S * 2, holders_module.TRY_S) is None
    assert receive(clock, holders, received, LEFT_NBYTES / holders_module.LEFT_S * 1.1, holders_module.TRY_S) is None
    assert holders.first is one
    assert not holders.why


def test_a_holder_that_slows_down_makes_room_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before does not count: its link may have changed."""
    clock = Clock(monkeypatch)
    one, other = Holder("rollout/0/0", "127.0.0.1", 1), Holder("rollout/1/0", "127.0.0.1", 1)
    holders, received = Holders([one, other]), Counter[str]()
    assert receive(clock, holders, received, LEFT_NBYTES, holders_module.TRY_S) is None
    assert receive(clock, holders, received, 1e5, holders_module.TRY_S) is one
    assert holders.first is other


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
        pulling = begin(one, threads, nobody)
        assert one.received.image.wait_for_bytes(0, 1, 0.2) == 0
        began = time.monotonic()
        one.stop("a newer version is there")
        with pytest.raises(Failed, match=r"^: a newer version is there$"):
            pulling.result(30)
        assert time.monotonic() - began < 1.0


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
        assert one.holders.why == {}


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
            assert (one.holders.why, memory[OFFSET:]) == ({}, data)
        else:
            with pytest.raises(Failed) as failed:
                run(one, threads, host.holder)
            assert (list(failed.value.why), one.holders.cut) == ([""], set())
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
        assert (one.holders.why, memory[OFFSET:]) == ({}, data)
        other, _ = a_pull(threads, len(data))
        with pytest.raises(Failed) as failed:
            other.run([host.holder], time.monotonic() + 30.0, start)
        assert failed.value.why == {"": "can't start new thread"}

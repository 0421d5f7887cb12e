"""Pulls from servers in this process, over TCP on loopback, in plain and in TLS.

Covers: carry/greeting.py, carry/serve.py, carry/pull.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from replicas.carry import pull, serve
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.image import CHUNK_NBYTES
from replicas.carry.pull import Failed
from replicas.carry.serve import ASK, HEAD, OVER
from tests.support.carrying import NUMBER, OFFSET, SECRET, FalseHost, Threads, a_pull, digests, hosts, run

pytestmark = pytest.mark.slow


@pytest.fixture(params=["plain", "tls"])
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    found = Threads(encrypt=request.param == "tls")
    yield found
    found.end()


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3 * BLOCK_NBYTES + 12345)


def test_all_bytes_come_and_the_digest_with_them(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(threads, len(data))
        assert run(one, threads, host.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received == {"trainer/0/0": len(data)}
        assert host.server.withdraw(NUMBER, "over") == len(data)


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, BLOCK_NBYTES])
def test_images_of_any_size(threads: Threads, data: bytes, nbytes: int) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data[:nbytes])
        one, memory = a_pull(threads, nbytes)
        assert run(one, threads, host.holder) == combined(digests(data[:nbytes]))
        assert memory[OFFSET:] == data[:nbytes]


def test_bytes_are_sent_while_they_are_packed(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=10)
        one, memory = a_pull(threads, len(data))
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
        first, _ = a_pull(threads, len(data))
        between.server.offer(NUMBER, first.image, SECRET, encrypt=threads.encrypt)
        last, memory = a_pull(threads, len(data))
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
        one, memory = a_pull(threads, len(data))
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
        one, memory = a_pull(threads, len(data))
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
        one, memory = a_pull(threads, len(data))
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
        with closing(host.dial()) as sock:
            sock.sendall(ASK.pack(0, len(data)))
            assert sock.recv(4) == HEAD.pack(min(len(data), serve.PIECE_NBYTES))
            began = time.monotonic()
            host.server.withdraw(NUMBER, "over")
            assert time.monotonic() - began < 5.0


def test_a_frozen_holder_is_given_up(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """It accepts, proves itself, and then says nothing."""
    monkeypatch.setattr(pull, "SILENT_S", 0.3)
    frozen = FalseHost(threads)
    with hosts(threads, "rollout/0/0") as (other,), closing(frozen.listener):
        kept: list[socket.socket] = []

        def freeze() -> None:
            for _ in range(2):
                kept.append(frozen.accept())

        threads.start(freeze)
        other.serves(data)
        one, memory = a_pull(threads, len(data))
        assert run(one, threads, frozen.holder, other.holder) == combined(digests(data))
        assert one.why == {"trainer/0/0": f"{frozen.holder.address} was silent for 0.3 s"}
        assert memory[OFFSET:] == data
        for sock in kept:
            sock.close()


def test_a_holder_that_waits_for_bytes_is_not_given_up(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(pull, "SILENT_S", 0.3)
    monkeypatch.setattr(serve, "SIGN_S", 0.05)
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=0)
        one, memory = a_pull(threads, len(data))
        thread = threading.Thread(target=lambda: run(one, threads, host.holder))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        image.fill(0, len(data))
        thread.join(30)
        assert memory[OFFSET:] == data
        assert not one.why


def test_the_time_is_up(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(threads, len(data))
        with pytest.raises(Failed, match="the time was up"):
            run(one, threads, host.holder, timeout_s=0.2)


def test_a_pull_that_is_stopped_ends_at_once(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(threads, len(data))
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


@pytest.mark.parametrize("asked", [(0, 0), (5, 4), (0, 1 << 40)])
def test_a_range_that_the_version_has_not_ends_the_connection(
    threads: Threads, data: bytes, asked: tuple[int, int]
) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        with closing(host.dial()) as sock:
            sock.sendall(ASK.pack(*asked))
            sock.settimeout(10)
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("heads", "why"),
    [([HEAD.pack(OVER)], "does not serve the version any more"), ([HEAD.pack(1 << 30)], "sends more than was asked")],
)
def test_a_holder_that_talks_nonsense_is_given_up(threads: Threads, data: bytes, heads: list[bytes], why: str) -> None:
    false = FalseHost(threads)
    with closing(false.listener):

        def answer() -> None:
            for _ in range(2):  # or one, if it is given up before the other one dials
                with contextlib.suppress(OSError), false.accept() as sock:
                    sock.sendall(b"".join(heads))

        threads.start(answer)
        one, _ = a_pull(threads, len(data))
        with pytest.raises(Failed, match=why):
            run(one, threads, false.holder)

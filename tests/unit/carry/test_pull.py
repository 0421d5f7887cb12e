"""Pulls from servers in this process, over TCP on loopback, in plain and in TLS.

Covers: carry/greeting.py, carry/holders.py, carry/serve.py, carry/pull.py,
carry/received.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from replicas.carry import dialler, greeting, serve
from replicas.carry.blocks import BLOCK_NBYTES, combined
from replicas.carry.differences import Deltas
from replicas.carry.image import CHUNK_NBYTES, Image
from replicas.carry.pull import FIRST, FIRST_FAR, Failed
from replicas.carry.serve import ASK, CHANGES, DELTA_FOLLOWS, HEAD, OVER, RANGE
from tests.support.carrying import NUMBER, OFFSET, SECRET, FalseHost, Threads, a_pull, begin, digests, hosts, run, slot
from tests.support.waits import eventually

pytestmark = pytest.mark.slow


def flipped(data: bytes, at: int) -> bytes:
    """``data`` with one bit that is wrong."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(3 * BLOCK_NBYTES + 12345)


def test_all_bytes_come_and_the_digest_with_them(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        one, memory = a_pull(threads, len(data))
        assert run(one, threads, host.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received.nbytes == {"trainer/0/0": len(data)}
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
        pulling = begin(one, threads, host.holder)
        assert one.received.image.wait_for_bytes(0, 1, 0.1) == 0  # a chunk is whole, or not here
        for filled in (CHUNK_NBYTES, 5 * CHUNK_NBYTES + 1, BLOCK_NBYTES + 3, len(data)):
            image.mark_present(0, filled)
            whole = filled // CHUNK_NBYTES * CHUNK_NBYTES
            assert one.received.image.wait_for_bytes(whole - 1, whole, 30.0) == 1
        assert pulling.result(30) == combined(digests(data))
        assert memory[OFFSET:] == data


def test_signs_of_life_are_seldom_while_a_block_is_half_here(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """Asked for as a delta, it is sent when all of it is here."""
    monkeypatch.setattr(serve, "SIGN_S", 0.1)
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=3 * CHUNK_NBYTES, base=flipped(data, 5))
        with closing(host.dial()) as sock:
            began = time.monotonic()
            sock.sendall(ASK.pack(CHANGES, 0, BLOCK_NBYTES))
            signs = [greeting.read_exactly(sock, HEAD.size) for _ in range(3)]
            assert time.monotonic() - began > 0.15
            image.mark_present(0, BLOCK_NBYTES)
            while signs[-1] == HEAD.pack(0):
                signs.append(greeting.read_exactly(sock, HEAD.size))
            assert signs[-1] == HEAD.pack(DELTA_FOLLOWS)


def test_what_a_holder_receives_as_bytes_it_sends_on_at_once(threads: Threads, data: bytes) -> None:
    """Asked for as a delta that it does not have: nobody waits for whole blocks."""
    with hosts(threads, "rollout/0/0") as (between,):
        image = between.serves(data, filled=CHUNK_NBYTES)
        with closing(between.dial()) as sock:
            sock.sendall(ASK.pack(CHANGES, 0, BLOCK_NBYTES))
            heads = [greeting.read_exactly(sock, HEAD.size) for _ in range(3)]
            assert heads == [HEAD.pack(DELTA_FOLLOWS), HEAD.pack(0), HEAD.pack(CHUNK_NBYTES)]
        image.mark_present(0, len(data))


def test_a_far_holder_gets_more_connections_at_once_and_makes_its_deltas_ahead(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """From the second version on: that it is far is known then."""
    monkeypatch.setattr(serve, "FAR_S", 0.0)
    monkeypatch.setattr(dialler, "FAR_S", 0.0)
    made: list[Image] = []
    ahead = threading.Event()

    def make_ahead(_: Deltas, image: Image) -> None:
        made.append(image)
        ahead.set()

    monkeypatch.setattr(Deltas, "make_ahead", make_ahead)
    base, trips = flipped(data, 5), dict[str, float]()
    with hosts(threads, "trainer/0/0") as (host,):
        connections: list[int] = []
        for many in (FIRST, FIRST_FAR):
            image = host.serves(data, filled=0, base=base)
            one, memory = a_pull(threads, len(data), base=base, trips=trips)
            pulling = begin(one, threads, host.holder)
            eventually(partial(lambda one, many: one._running == many, one, many), f"{many} connections")
            connections.append(one._running)
            image.mark_present(0, len(data))
            pulling.result(30)
            assert memory[OFFSET:] == data
            host.server.withdraw(NUMBER, "over")
        assert connections == [FIRST, FIRST_FAR]
        assert ahead.wait(10)
        assert made == [image], "of the second version alone"


def test_a_host_serves_what_it_is_still_receiving(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, between):
        image = source.serves(data, filled=0)
        first, _ = a_pull(threads, len(data))
        between.server.offer(NUMBER, first.received.image, SECRET, encrypt=threads.encrypt)
        last, memory = a_pull(threads, len(data))
        pulls = [begin(first, threads, source.holder), begin(last, threads, between.holder)]
        image.mark_present(0, BLOCK_NBYTES)
        assert last.received.image.wait_for_bytes(0, BLOCK_NBYTES, 30.0) > 0  # before the source has all of it
        image.mark_present(0, len(data))
        assert [one.result(30) for one in pulls] == 2 * [combined(digests(data))]
        assert memory[OFFSET:] == data


def test_another_holder_goes_on_where_one_has_stopped(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, other):
        image = source.serves(data, filled=BLOCK_NBYTES)
        other.serves(data)
        one, memory = a_pull(threads, len(data))
        pulling = begin(one, threads, source.holder, other.holder)
        assert one.received.image.wait_for_bytes(BLOCK_NBYTES - 1, BLOCK_NBYTES, 30.0) == 1
        assert source.server.withdraw(NUMBER, "its rank has died") >= BLOCK_NBYTES
        assert pulling.result(30) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert list(one.holders.why) == ["trainer/0/0"]
        assert one.received.nbytes["trainer/0/0"] >= BLOCK_NBYTES > 0
        assert one.received.nbytes["rollout/0/0"] <= len(data) - BLOCK_NBYTES
        assert image.nbytes == len(data)


def test_a_pull_that_failed_goes_on_when_it_is_run_again(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, other):
        source.serves(data, filled=2 * BLOCK_NBYTES)
        one, memory = a_pull(threads, len(data))
        pulling = begin(one, threads, source.holder)
        assert one.received.image.wait_for_bytes(2 * BLOCK_NBYTES - 1, 2 * BLOCK_NBYTES, 30.0) == 1
        source.server.withdraw(NUMBER, "over")
        with pytest.raises(Failed) as failed:
            pulling.result(30)
        assert list(failed.value.why) == ["trainer/0/0"]
        other.serves(data)
        assert run(one, threads, other.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received.nbytes["rollout/0/0"] <= len(data) - 2 * BLOCK_NBYTES + BLOCK_NBYTES


@pytest.mark.parametrize("known", ["before", "afterwards"])
def test_a_wrong_block_is_asked_for_elsewhere_and_its_holder_named(threads: Threads, data: bytes, known: str) -> None:
    digest = combined(digests(data))
    with hosts(threads, "rollout/3/0", "trainer/0/0") as (liar, source):
        liar.serves(flipped(data, BLOCK_NBYTES + 17))
        source.serves(data)
        one, memory = a_pull(threads, len(data))
        if known == "afterwards":
            assert run(one, threads, liar.holder) != digest
        assert run(one, threads, liar.holder, source.holder, digest=digest) == digest
        assert memory[OFFSET:] == data
        assert one.received.again == 1
        assert one.holders.why == one.received.wrong == {"rollout/3/0": "block 1 is not what was published"}
        assert one.received.nbytes["trainer/0/0"] == BLOCK_NBYTES


def test_the_only_holder_is_asked_again_once(threads: Threads, data: bytes) -> None:
    """The bytes may have changed on their way."""
    data = data[: BLOCK_NBYTES + 99]
    digest = combined(digests(data))
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data)
        one, memory = a_pull(threads, len(data))
        assert run(one, threads, host.holder) == digest
        memory[OFFSET + 5] ^= 1
        one.received.blocks.digests[0] = digests(memory[OFFSET:])[0]
        assert run(one, threads, host.holder, digest=digest) == digest
        assert memory[OFFSET:] == data
        one.received.blocks.digests[1] = b"?" * 16
        with pytest.raises(Failed, match="block 0 is not what was published"):
            run(one, threads, host.holder, digest=digest)
        assert image.nbytes == len(data)


def test_bytes_that_no_holder_can_judge_fail_the_pull(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(flipped(data, 5))
        with pytest.raises(Failed, match="the bytes are not what was published"):
            run(a_pull(threads, len(data))[0], threads, host.holder, digest=combined(digests(data)))


def test_nobody_reads_the_slot_once_it_is_withdrawn(threads: Threads, data: bytes) -> None:
    """Not even for a puller that reads nothing."""
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        with closing(host.dial()) as sock:
            sock.sendall(ASK.pack(RANGE, 0, len(data)))
            assert sock.recv(4) == HEAD.pack(min(len(data), serve.PIECE_NBYTES))
            began = time.monotonic()
            host.server.withdraw(NUMBER, "over")
            assert time.monotonic() - began < 5.0


def test_a_frozen_holder_is_given_up(threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """It accepts, proves itself, and then says nothing."""
    monkeypatch.setattr(dialler, "SILENT_S", 0.3)
    monkeypatch.setattr(dialler, "LAST_SILENT_S", 30.0)
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
        assert one.holders.why == {"trainer/0/0": f"{frozen.holder.address} was silent for too long"}
        assert one.holders.cut == {"trainer/0/0"}
        assert memory[OFFSET:] == data
        for sock in kept:
            sock.close()


def test_a_holder_that_freezes_before_the_handshake_is_given_up(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """Its kernel accepts the connections, and nobody answers. Six tries took longer
    than a publish has."""
    monkeypatch.setattr(dialler, "GREET_S", 0.5)
    frozen = FalseHost(threads)
    with hosts(threads, "rollout/0/0") as (other,), closing(frozen.listener):
        other.serves(data)
        one, memory = a_pull(threads, len(data))
        assert run(one, threads, frozen.holder, other.holder) == combined(digests(data))
        assert one.holders.why == {"trainer/0/0": f"{frozen.holder.address} did not answer within 0.5 s"}
        assert one.holders.cut == {"trainer/0/0"}
        assert memory[OFFSET:] == data
        frozen.listener.setblocking(False)
        tries = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                frozen.listener.accept()[0].close()
                tries += 1
        assert tries == FIRST


def test_a_holder_that_waits_for_bytes_is_not_given_up(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(dialler, "LAST_SILENT_S", 0.3)
    monkeypatch.setattr(serve, "SIGN_S", 0.05)
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=0)
        one, memory = a_pull(threads, len(data))
        pulling = begin(one, threads, host.holder)
        with pytest.raises(TimeoutError):
            pulling.result(1.0)
        image.mark_present(0, len(data))
        pulling.result(30)
        assert memory[OFFSET:] == data
        assert not one.holders.why


def test_the_time_is_up(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(threads, len(data))
        with pytest.raises(Failed, match="the deadline passed"):
            run(one, threads, host.holder, timeout_s=0.2)


def test_a_pull_that_is_stopped_ends_at_once(threads: Threads, data: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, filled=0)
        one, _ = a_pull(threads, len(data))
        pulling = begin(one, threads, host.holder)
        assert one.received.image.wait_for_bytes(0, 1, 0.1) == 0
        one.stop("the version is not needed any more")
        with pytest.raises(Failed, match=r"^: the version is not needed any more$"):
            pulling.result(30)


@pytest.mark.parametrize("asked", [(RANGE, 0, 0), (RANGE, 5, 4), (RANGE, 0, 1 << 40), (b"?", 0, 1)])
def test_a_range_that_the_version_has_not_ends_the_connection(
    threads: Threads, data: bytes, asked: tuple[bytes, int, int]
) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data)
        with closing(host.dial()) as sock:
            sock.sendall(ASK.pack(*asked))
            sock.settimeout(10)
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    ("heads", "why"),
    [([HEAD.pack(OVER)], "no longer serves the version"), ([HEAD.pack(1 << 30)], "sends more than was asked")],
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


@pytest.fixture(scope="module")
def base(data: bytes) -> bytes:
    """The version before: two elements a block were others, and the last block."""
    old = bytearray(data)
    for at in range(0, 3 * BLOCK_NBYTES, BLOCK_NBYTES):
        old[at + 4000] ^= 1
        old[at + BLOCK_NBYTES - 2] ^= 7
    return bytes(old[: 3 * BLOCK_NBYTES]) + random.Random(2).randbytes(len(data) - 3 * BLOCK_NBYTES)


def test_what_has_changed_is_sent_and_served_on(threads: Threads, data: bytes, base: bytes) -> None:
    with hosts(threads, "trainer/0/0", "rollout/0/0") as (source, between):
        source.serves(data, base=base)
        first, _ = a_pull(threads, len(data), base=base)
        between.server.offer(NUMBER, first.received.image, SECRET, first.received.deltas, encrypt=threads.encrypt)
        assert run(first, threads, source.holder) == combined(digests(data))
        last, memory = a_pull(threads, len(data), base=base)
        assert run(last, threads, between.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        for one in (first, last):
            assert 12345 < one.received.nbytes.total() < 12345 + 500, "the last block, and three deltas"
            assert one.received.landed_nbytes == len(data)
            assert one.received.again == 0


@pytest.mark.parametrize(
    ("start", "end"), [(0, CHUNK_NBYTES), (CHUNK_NBYTES, 2 * CHUNK_NBYTES), (0, 1), (0, 2 * BLOCK_NBYTES)]
)
def test_changes_of_less_or_more_than_a_block_are_not_made(
    threads: Threads, data: bytes, base: bytes, start: int, end: int
) -> None:
    """They would be made of a block that is half packed, and kept for all."""
    with hosts(threads, "trainer/0/0") as (host,):
        image = host.serves(data, filled=2 * CHUNK_NBYTES, base=base)
        half = 2 * CHUNK_NBYTES
        os.pwrite(image.fd, base[half:BLOCK_NBYTES], OFFSET + half)
        with closing(host.dial()) as sock:
            sock.sendall(ASK.pack(CHANGES, start, end))
            assert sock.recv(1) == b"", "the connection is over, at once"
        os.pwrite(image.fd, data[half:BLOCK_NBYTES], OFFSET + half)
        image.mark_present(0, len(data))
        one, memory = a_pull(threads, len(data), base=base)
        assert run(one, threads, host.holder, digest=combined(digests(data))) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert (one.received.wrong, one.received.again) == ({}, 0)
        assert one.received.nbytes.total() < 12345 + 500


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True)])
def test_without_a_common_base_the_bytes_come(
    threads: Threads, data: bytes, base: bytes, here: bool, there: bool
) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, base=base if there else None)
        one, memory = a_pull(threads, len(data), base=base if here else None)
        assert run(one, threads, host.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received.nbytes.total() == len(data)


def test_deltas_to_another_base_are_found_and_the_bytes_asked_for(threads: Threads, data: bytes, base: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, base=base)
        one, memory = a_pull(threads, len(data), base=flipped(base, 5))
        digest = combined(digests(data))
        assert run(one, threads, host.holder, digest=digest) == digest
        assert memory[OFFSET:] == data
        assert one.received.again == 1
        assert one.received.wrong == {"trainer/0/0": "block 0 is not what was published"}


@pytest.mark.parametrize("forged", [b"?", b"\x01\x02" + bytes(60)])
def test_a_forged_delta_is_refused_and_the_bytes_asked_for(
    threads: Threads, data: bytes, base: bytes, forged: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Deltas.get_delta
    monkeypatch.setattr(Deltas, "get_delta", lambda self, number: forged if number == 1 else real(self, number))
    with hosts(threads, "trainer/0/0") as (host,):
        host.serves(data, base=base)
        one, memory = a_pull(threads, len(data), base=base)
        assert run(one, threads, host.holder) == combined(digests(data))
        assert memory[OFFSET:] == data
        assert one.received.again == 1
        assert one.received.wrong["trainer/0/0"].startswith("block 1: ")
        assert BLOCK_NBYTES < one.received.nbytes.total() < BLOCK_NBYTES + 13000


def test_a_base_is_let_go_in_the_middle_of_pulls(threads: Threads, data: bytes, base: bytes) -> None:
    with hosts(threads, "trainer/0/0") as (host,):
        fd, memory = slot(data)
        image = Image(fd, OFFSET, len(data), data=memoryview(memory)[OFFSET:])
        deltas = Deltas(len(data), memoryview(base), memoryview(memory)[OFFSET:])
        host.server.offer(NUMBER, image, SECRET, deltas, encrypt=threads.encrypt)
        image.mark_present(0, BLOCK_NBYTES)
        one, came = a_pull(threads, len(data), base=base)
        pulling = begin(one, threads, host.holder)
        assert one.received.image.wait_for_bytes(0, BLOCK_NBYTES, 30.0) == BLOCK_NBYTES
        deltas.release_base()
        image.mark_present(0, len(data))
        assert pulling.result(30) == combined(digests(data))
        assert came[OFFSET:] == data
        assert one.received.nbytes.total() > 2 * BLOCK_NBYTES

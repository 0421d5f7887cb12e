"""Deltas as they are asked for, and which way versions come.

Covers: carry/differences.py.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import pytest

from replicas.carry import delta
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import apply_block
from replicas.carry.differences import AGAIN, DeltaChoice, Deltas
from replicas.carry.image import Image

NBYTES = BLOCK_NBYTES + 1000


@pytest.fixture(scope="module")
def pair() -> tuple[bytes, bytes]:
    """A version, and the one before: the second block has changed a little."""
    old = random.Random(1).randbytes(NBYTES)
    new = bytearray(old)
    new[BLOCK_NBYTES + 500] ^= 3
    return old, bytes(new)


def test_a_delta_is_made_when_it_is_asked_for(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    deltas = Deltas(NBYTES, memoryview(old), memoryview(new))
    found = deltas.get_delta(1)
    assert found is not None
    out = bytearray(1000)
    apply_block(memoryview(old)[BLOCK_NBYTES:], found, memoryview(out))
    assert bytes(out) == new[BLOCK_NBYTES:]
    assert deltas.get_delta(1) is found
    assert len(deltas.get_delta(0) or b"") < 10, "nothing has changed there"


def test_without_a_base_there_are_those_that_are_known(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    deltas = Deltas(NBYTES, memoryview(old), memoryview(new))
    known = deltas.get_delta(1)
    deltas.release_base()
    deltas.release_base()
    assert [deltas.get_delta(0), deltas.get_delta(1)] == [None, known]
    other = Deltas(NBYTES)
    assert other.get_delta(1) is None
    other.keep(1, known or b"")
    assert other.get_delta(1) == known
    other.drop(1)
    assert other.get_delta(1) is None


def test_blocks_are_encoded_side_by_side_and_the_base_is_kept_meanwhile(
    pair: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = pair
    deltas = Deltas(NBYTES, memoryview(old), memoryview(new))
    both, go_on, encode = threading.Barrier(3), threading.Event(), delta.encode_block

    def slow(*args: Any, **more: Any) -> bytes:
        both.wait(30)
        assert go_on.wait(30)
        return encode(*args, **more)

    monkeypatch.setattr(delta, "encode_block", slow)
    found: list[bytes | None] = []
    askers = [
        threading.Thread(target=lambda number=number: found.append(deltas.get_delta(number))) for number in (0, 1, 1)
    ]
    for asker in askers:
        asker.start()
    both.wait(30)
    ending = threading.Thread(target=deltas.release_base)
    ending.start()
    ending.join(0.05)
    assert ending.is_alive()
    go_on.set()
    for thread in (*askers, ending):
        thread.join(30)
        assert not thread.is_alive()
    assert None not in found
    assert len(set(found)) == 2, "one block is encoded once"


def test_what_has_changed_throughout_is_sent_as_bytes() -> None:
    old, new = (random.Random(seed).randbytes(4096) for seed in (1, 2))
    assert Deltas(4096, memoryview(old), memoryview(new)).get_delta(0) is None


def test_deltas_are_made_ahead_once_their_blocks_are_here(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    deltas, image = Deltas(NBYTES, memoryview(old), memoryview(new)), Image(os.memfd_create("an image"), 0, NBYTES)
    thread = threading.Thread(target=lambda: deltas.make_ahead(image))
    thread.start()
    image.mark_present(0, BLOCK_NBYTES)
    image.mark_present(0, NBYTES)
    thread.join(30)
    deltas.release_base()
    assert deltas.get_delta(0) is not None
    assert deltas.get_delta(1) is not None
    gone = Deltas(NBYTES, memoryview(old), memoryview(new))
    other = Image(os.memfd_create("an image"), 0, NBYTES)
    other.withdraw("it is not needed any more")
    gone.make_ahead(other)
    gone.release_base()
    assert gone.get_delta(1) is None


@pytest.mark.slow
def test_no_delta_is_looked_for_where_everything_has_changed() -> None:
    old, new = (random.Random(seed).randbytes(2 * BLOCK_NBYTES + 4096) for seed in (1, 2))
    deltas = Deltas(len(old), memoryview(old), memoryview(new))
    assert [deltas.may_have(2), deltas.get_delta(0), deltas.get_delta(1), deltas.may_have(2)] == [
        True,
        None,
        None,
        False,
    ]


def test_the_faster_way_is_taken_and_the_other_one_tried_now_and_then() -> None:
    def took(by_delta: bool, seconds: float, nbytes: int = 100) -> None:
        choice.record_pull("b", by_delta=by_delta, nbytes=nbytes, seconds=seconds)

    choice = DeltaChoice()
    assert choice.choose_delta("b"), "nothing is known"
    took(False, 1.0)
    took(True, 10.0)
    assert choice.choose_delta("b"), "one delta may have been slow by chance"
    took(True, 2.0)
    assert [choice.choose_delta("b") for _ in range(8 * AGAIN)].count(True) == 4, "twice as slow: every 32nd"
    assert choice.choose_delta("c"), "another host"
    took(True, 0.09, nbytes=10**6)
    assert not choice.choose_delta("b"), "too short to tell"
    took(True, 1.05)
    assert choice.choose_delta("b"), "about as fast: the link is left to others"
    took(True, 0.1)
    took(True, 0.1)
    assert [choice.choose_delta("b") for _ in range(20 * AGAIN)].count(False) == 2, "ten times as fast: every 160th"

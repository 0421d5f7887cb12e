"""Blocks of an image, and what of it is here.

Covers: carry/blocks.py, carry/image.py.
"""

from __future__ import annotations

import os
import threading

import pytest
import xxhash

from replicas.carry.blocks import BLOCK_NBYTES, Blocks, combined
from replicas.carry.image import CHUNK_NBYTES, Image, Withdrawn


def image(nbytes: int, *, full: bool = False) -> Image:
    return Image(os.memfd_create("an image"), 0, nbytes, full=full)


def test_the_lowest_block_is_asked_for_first_and_one_that_failed_again() -> None:
    asking = Blocks(3 * BLOCK_NBYTES + 5)
    assert [asking.next_block() for _ in range(5)] == [0, 1, 2, 3, None]
    assert [asking.waiting, asking.done] == [0, False]
    asking.mark_received(3, b"", "")
    asking.mark_received(0, b"", "")
    asking.requeue(2)
    asking.requeue(1)
    assert [asking.next_block(), asking.next_block(), asking.next_block()] == [1, 2, None]
    asking.mark_received(1, b"", "")
    asking.mark_received(2, b"", "")
    assert asking.done
    asking.requeue(1)  # of a connection that was late
    assert asking.next_block() is None


def test_a_block_that_was_wrong_is_not_here_any_more() -> None:
    asking = Blocks(2 * BLOCK_NBYTES)
    for _ in range(2):
        asking.mark_received(asking.next_block() or 0, b"", "")
    assert asking.done
    asking.request_again(1)
    assert [asking.done, asking.next_block()] == [False, 1]


def test_a_block_that_two_give_back_is_asked_for_once() -> None:
    """Else two connections would write it side by side."""
    asking = Blocks(2 * BLOCK_NBYTES)
    assert [asking.next_block(), asking.next_block()] == [0, 1]
    for _ in range(2):
        asking.requeue(1)
    assert [asking.next_block(), asking.next_block()] == [1, None]


def test_what_is_left_counts_the_bytes_of_blocks_under_way() -> None:
    asking = Blocks(BLOCK_NBYTES + 7)
    assert [asking.next_block(), asking.left_nbytes] == [0, BLOCK_NBYTES + 7]
    asking.halves[0] = 100
    assert asking.left_nbytes == BLOCK_NBYTES - 93
    asking.requeue(0)
    assert asking.left_nbytes == BLOCK_NBYTES + 7
    asking.mark_received(0, b"", "")
    assert [asking.left_nbytes, Blocks(0).done] == [7, True]


def test_the_range_of_the_last_block_ends_with_the_image() -> None:
    asking = Blocks(BLOCK_NBYTES + 7)
    assert [asking.range_of(0), asking.range_of(1)] == [(0, BLOCK_NBYTES), (BLOCK_NBYTES, BLOCK_NBYTES + 7)]


def test_the_digest_is_that_of_the_digests() -> None:
    blocks = [xxhash.xxh3_128_digest(part) for part in (b"one", b"two")]
    assert combined(blocks) == xxhash.xxh3_128_hexdigest(b"".join(blocks))


def test_a_prefix_and_chunks_beyond_it_are_here() -> None:
    found = image(4 * CHUNK_NBYTES + 10)
    assert found.wait_for_bytes(0, 5, 0.0) == 0
    found.mark_present(0, 100)
    assert (
        found.wait_for_bytes(0, 1000, 0.0),
        found.wait_for_bytes(90, 1000, 0.0),
        found.wait_for_bytes(100, 1000, 0.0),
    ) == (100, 10, 0)
    found.mark_present(2 * CHUNK_NBYTES, 3 * CHUNK_NBYTES)
    assert found.wait_for_bytes(2 * CHUNK_NBYTES + 1, found.nbytes, 0.0) == CHUNK_NBYTES - 1
    found.mark_present(0, CHUNK_NBYTES)
    found.mark_present(CHUNK_NBYTES, 2 * CHUNK_NBYTES)
    assert found.wait_for_bytes(0, found.nbytes, 0.0) == 2 * CHUNK_NBYTES  # then it asks again, from there
    assert found.wait_for_bytes(2 * CHUNK_NBYTES, found.nbytes, 0.0) == CHUNK_NBYTES
    found.mark_present(4 * CHUNK_NBYTES, found.nbytes)
    assert found.wait_for_bytes(4 * CHUNK_NBYTES, found.nbytes, 0.0) == 10


def test_what_was_wrong_is_not_here() -> None:
    found = image(3 * CHUNK_NBYTES, full=True)
    assert found.wait_for_bytes(0, found.nbytes, 0.0) == found.nbytes
    found.mark_missing(CHUNK_NBYTES, 2 * CHUNK_NBYTES)
    assert found.wait_for_bytes(0, found.nbytes, 0.0) == CHUNK_NBYTES
    assert found.wait_for_bytes(CHUNK_NBYTES, found.nbytes, 0.0) == 0
    assert found.wait_for_bytes(2 * CHUNK_NBYTES, found.nbytes, 0.0) == CHUNK_NBYTES


def test_who_waits_is_woken_by_bytes_and_by_the_end() -> None:
    found = image(CHUNK_NBYTES)
    seen: list[object] = []
    came = threading.Event()

    def wait() -> None:
        seen.append(found.wait_for_bytes(0, 10, 30.0))
        came.set()
        try:
            found.wait_for_bytes(500, 510, 30.0)
        except Withdrawn as error:
            seen.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    found.mark_present(0, 500)
    assert came.wait(30)
    found.withdraw("the publish was given up")
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(Withdrawn):
        found.wait_for_bytes(0, 10, 0.0)
    assert seen == [10, "the publish was given up"]

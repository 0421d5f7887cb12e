"""Deltas of versions: lossless for any change, small for those of an optimizer, and
harmless when they are forged.

Covers: archive/deltas.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.archive.deltas import apply_delta, encode_delta
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import DeltaError, encode_block

SIZES = struct.Struct("<HII")


def run(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def there(old: bytes, delta: bytes) -> bytes:
    data = bytearray(old)
    apply_delta(delta, memoryview(data), run)
    return bytes(data)


def normal(count: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Weights in bfloat16."""
    weights = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(0.02)
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


@given(
    st.integers(0, 4000),
    st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    st.sampled_from([(), (1,), (2,), (4, 2), (8, 1)]),
    st.integers(0, 9),
    st.booleans(),
)
def test_the_new_version_comes_back(
    nbytes: int, share: float, widths: tuple[int, ...], seed: int, little: bool
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, nbytes, np.uint8)
    if little:
        old[1::2] &= 0x81  # exponents of small numbers
    new = old.copy()
    where = random.random(nbytes) < share
    new[where] = random.integers(0, 256, int(where.sum()), np.uint8)
    middle = nbytes // 16 * 8
    regions = [(0, middle if len(widths) > 1 else nbytes, widths[0])] if widths else []
    if len(widths) > 1:
        regions.append((middle, nbytes, widths[1]))
    delta = encode_delta(old.data, new.data, regions, run)
    assert there(old.tobytes(), delta) == new.tobytes()
    assert len(delta) <= nbytes + 200


def test_small_elements_make_a_delta_small() -> None:
    """Of an optimizer that moves all weights by as much: small ones change."""
    old = normal(1 << 21)
    weights = (old.astype(np.uint32) << 16).view(np.float32)
    random = np.random.default_rng(2)
    moved = weights + random.choice(np.array([-5e-6, 5e-6], np.float32), len(weights))
    moved += (random.random(len(weights), np.float32) - np.float32(0.5)) * np.abs(weights) * np.float32(2**-8)
    new = ((moved.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    new = np.where(random.random(len(new)) < 0.99, np.where(np.abs(weights) < 2e-4, new, old), new)
    plain = len(encode_block(old.view(np.uint8).data, new.view(np.uint8).data))
    regions = [(0, old.nbytes, 2)]
    delta = encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, regions, run)
    assert SIZES.unpack_from(delta)[0] > 0, "no element is small"
    assert len(delta) < 0.8 * plain
    assert there(old.tobytes(), delta) == new.tobytes()


def test_several_blocks_some_of_them_whole() -> None:
    old = normal(BLOCK_NBYTES // 2 + 5000)
    new = old.copy()
    new[-5000:] = np.random.default_rng(3).integers(0, 65536, 5000, np.uint16)
    new[7] ^= 1
    delta = encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, [(0, old.nbytes, 2)], run)
    (limit, _, _), (last, _, rest) = SIZES.unpack_from(delta), SIZES.unpack_from(delta, SIZES.size)
    assert (limit, last, rest) == (limit, 0xFFFF, 10_000)
    assert limit != 0xFFFF
    assert there(old.tobytes(), delta) == new.tobytes()


def forged() -> tuple[bytes, bytes, bytes]:
    old = normal(3000)
    new = old.copy()
    small = np.argsort(old & 0x7FFF)[:400]
    new[small] += 1
    new[:5] ^= 3
    delta = encode_delta(old.view(np.uint8).data, new.view(np.uint8).data, [(0, old.nbytes, 2)], run)
    assert SIZES.unpack_from(delta)[0] > 0
    return old.tobytes(), new.tobytes(), delta


def test_a_delta_that_is_cut_is_refused() -> None:
    old, _, delta = forged()
    for length in range(len(delta)):
        with pytest.raises((DeltaError, ValueError)):
            there(old, delta[:length])
    with pytest.raises(DeltaError, match=f"a delta of {len(delta) + 1:,} bytes"):
        there(old, delta + b"x")


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_forged_delta_is_refused_or_gives_other_bytes(place: int, mask: int) -> None:
    """Which the digests show then; it neither hangs nor writes elsewhere."""
    old, new, delta = forged()
    place %= len(delta)
    wrong = delta[:place] + bytes([delta[place] ^ mask]) + delta[place + 1 :]
    try:
        assert len(there(old, wrong)) == len(new)
    except (DeltaError, ValueError):
        return

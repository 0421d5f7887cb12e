"""Deltas: lossless for any change of any bytes, small for real ones, and harmless when
they are forged.

Covers: carry/delta.py.
"""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import CHANGED, DeltaError, Region, apply_block, encode_block, is_whole
from replicas.memory import lines
from replicas.memory.lines import LINE_NBYTES, Bytes

MOST = 6_000
SMALL = 4 << 20
HEAD, COUNTS, REGION = struct.Struct("<BBI"), struct.Struct("<IBB"), struct.Struct("<IB")


def block(nbytes: int, seed: int = 0) -> Bytes:
    memory = np.empty(nbytes + LINE_NBYTES, np.uint8)
    data = memory[-memory.ctypes.data % LINE_NBYTES :][:nbytes]
    data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return data


def applied(base: Bytes, delta: bytes) -> Bytes:
    """By both ways: into another memory, and in place; nothing beside it is written."""
    memory = np.full(len(base) + 2 * LINE_NBYTES, 0xA5, np.uint8)
    out = memory[LINE_NBYTES:-LINE_NBYTES]
    same = base.copy()
    try:
        apply_block(base.data, delta, out.data)
        apply_block(same.data, delta, same.data)
        assert np.array_equal(out, same)
    finally:
        assert (memory[:LINE_NBYTES] == 0xA5).all()
        assert (memory[-LINE_NBYTES:] == 0xA5).all()
    return out


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Bytes, Bytes, list[Region], int]:
    """Base, new block, regions of the image, and the block's start in it."""
    nbytes, start = draw(st.integers(0, MOST)), draw(st.sampled_from((0, 4096)))
    base = block(nbytes, draw(st.integers(0, 9)))
    new = block(nbytes)
    new[:] = base
    where = draw(st.lists(st.integers(0, max(0, nbytes - 1)), max_size=60)) if nbytes else []
    new[where] ^= np.array(draw(st.lists(st.integers(0, 255), min_size=len(where), max_size=len(where))), np.uint8)
    if nbytes and draw(st.booleans()):
        dense = sorted(draw(st.tuples(st.integers(0, nbytes), st.integers(0, nbytes))))
        new[dense[0] : dense[1]] += 1
    cuts = sorted(set(draw(st.lists(st.integers(0, 2 * MOST), max_size=8))))
    widths = st.sampled_from((1, 2, 4, 8))
    regions = [(first, last, draw(widths)) for first, last in itertools.pairwise(cuts) if draw(st.booleans())]
    return base, new, regions, start


@pytest.mark.slow
@given(given=blocks())
def test_the_same_bytes_whatever_has_changed(given: tuple[Bytes, Bytes, list[Region], int]) -> None:
    base, new, regions, start = given
    delta = encode_block(base.data, new.data, regions, start=start)
    assert len(delta) <= max(HEAD.size, len(new) // 2)
    if is_whole(delta):
        with pytest.raises(DeltaError, match="of kind 1"):
            apply_block(base.data, delta, base.copy().data)
        assert (base != new).sum() * 24 > len(base) or len(base) < 500
        return
    result = applied(base, delta)
    assert xxhash.xxh3_128_digest(result.data) == xxhash.xxh3_128_digest(new.data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_library", None)
        assert encode_block(base.data, new.data, regions, start=start) == delta
        assert np.array_equal(applied(base, delta), new)


def changed_block(nbytes: int, ratio: float) -> tuple[Bytes, Bytes]:
    """bfloat16 of a normal distribution; some of them go to a neighbouring value."""
    rng = np.random.default_rng(1)
    base, new = block(nbytes), block(nbytes)
    base.view(np.uint16)[:] = (rng.standard_normal(nbytes // 2, np.float32) * 0.02).view(np.uint32) >> 16
    new[:] = base
    where = np.flatnonzero(rng.random(nbytes // 2, np.float32) < ratio)
    new.view(np.int16)[where] += rng.choice(np.array([-1, 1], np.int16), len(where))
    return base, new


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "share"), [(0.0035, 0.0029), (0.01, 0.0070), (0.03, 0.0172)])
def test_it_is_near_the_entropy(ratio: float, share: float) -> None:
    base, new = changed_block(BLOCK_NBYTES, ratio)
    delta = encode_block(base.data, new.data, [(0, BLOCK_NBYTES, 2)])
    assert len(delta) / BLOCK_NBYTES == pytest.approx(share, rel=0.1)
    assert np.array_equal(applied(base, delta), new)


def test_a_block_that_is_the_same_costs_a_few_bytes() -> None:
    base = block(SMALL)
    delta = encode_block(base.data, base.copy().data)
    assert len(delta) == HEAD.size
    assert not is_whole(delta)
    assert np.array_equal(applied(base, delta), base)


def test_a_block_that_has_nothing_in_common_comes_as_bytes() -> None:
    delta = encode_block(block(SMALL, 1).data, block(SMALL, 2).data)
    assert len(delta) == HEAD.size
    assert is_whole(delta)


def test_changes_throughout_are_known_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: object) -> None:
        raise AssertionError("all of the block was compared")

    old, new = block(1 << 20, 1), block(1 << 20, 2)
    monkeypatch.setattr(lines, "find_changed", compared)
    assert is_whole(encode_block(old.data, new.data))
    new[: 3 << 18] = old[: 3 << 18]
    with pytest.raises(AssertionError, match="was compared"):
        encode_block(old.data, new.data)


def test_one_delta_behind_another() -> None:
    first = block(MOST)
    second, third = first.copy(), first.copy()
    second[5] ^= 1
    third[[6, 4000]] ^= 3
    to_second = encode_block(first.data, second.data)
    to_third = encode_block(second.data, third.data)
    assert np.array_equal(applied(applied(first, to_second), to_third), third)


def test_too_many_regions_are_single_bytes() -> None:
    base = block(MOST)
    new = base.copy()
    new[5_001] ^= 1
    regions = [(at, at + 8, 2 + 2 * (at % 16 == 0)) for at in range(0, 4_800, 8)]
    assert np.array_equal(applied(base, encode_block(base.data, new.data, regions)), new)


def test_what_cannot_be_encoded_is_an_error_of_the_caller() -> None:
    base = block(100)
    with pytest.raises(ValueError, match="does not fit"):
        encode_block(base.data, base[:99].data)
    with pytest.raises(ValueError, match="does not fit"):
        encode_block(memoryview(bytes(BLOCK_NBYTES + 1)), memoryview(bytes(BLOCK_NBYTES + 1)))
    with pytest.raises(ValueError, match="elements of 3 bytes"):
        encode_block(base.data, base.data, [(0, 99, 3)])
    with pytest.raises(ValueError, match="does not go into"):
        apply_block(base.data, encode_block(base.data, base.data), base[:99].data)


# ------------------------------------------------------------ hostile input


def victim() -> tuple[Bytes, Bytes, bytes]:
    base, new = changed_block(MOST, 0.01)
    return base, new, encode_block(base.data, new.data, [(0, 4_000, 2), (4_000, MOST, 4)])


def refused_or_told_by_the_digest(base: Bytes, new: Bytes, delta: bytes) -> None:
    try:
        result = applied(base, delta)
    except DeltaError:
        return
    same = xxhash.xxh3_128_digest(result.data) == xxhash.xxh3_128_digest(new.data)
    assert same == np.array_equal(result, new)


@pytest.mark.slow
@given(data=st.data())
def test_a_delta_that_was_changed_is_refused_or_told_by_the_digest(data: st.DataObject) -> None:
    base, new, delta = victim()
    for _ in range(20):
        forged = bytearray(delta)
        for _ in range(data.draw(st.integers(1, 4))):
            forged[data.draw(st.integers(0, len(delta) - 1))] = data.draw(st.integers(0, 255))
        refused_or_told_by_the_digest(base, new, bytes(forged))


def test_a_delta_that_was_cut_or_continued_is_refused() -> None:
    base, _, delta = victim()
    for end in range(len(delta)):
        with pytest.raises(DeltaError):
            apply_block(base.data, delta[:end], base.data)
    for more in (b"\0", zstandard.compress(b"more"), bytes(1000)):
        with pytest.raises(DeltaError):
            apply_block(base.data, delta + more, base.data)


@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    base = block(MOST)
    assume(noise[:2] != b"\x01\x00")
    for delta in (noise, HEAD.pack(1, CHANGED, MOST) + noise):
        with pytest.raises(DeltaError):
            apply_block(base.data, delta, base.data)


def forged(
    count: int,
    planes: int,
    raw: bytes,
    regions: tuple[tuple[int, int], ...] = ((MOST, 2),),
    frame: bytes | None = None,
    head: tuple[int, int, int] = (1, CHANGED, MOST),
) -> bytes:
    places = b"".join(REGION.pack(*one) for one in regions)
    return HEAD.pack(*head) + COUNTS.pack(count, planes, len(regions)) + places + (frame or zstandard.compress(raw))


def frame_of_unknown_size(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(raw)


def bomb(nbytes: int, stated: int, window: int = 0x50) -> bytes:
    """A frame of so many zeros that states another size, and needs another window (RFC
    8878, 3.1.1.1: here both follow the magic number and the descriptor)."""
    frame = bytearray(zstandard.compress(bytes(nbytes)))
    assert frame[4] == 0x80
    frame[5:10] = struct.pack("<BI", window, stated)
    return bytes(frame)


ONE = bytes((7,)) + b"\x01\x00"
FORGED = {
    "an older version": forged(1, 1, ONE, head=(0, CHANGED, MOST)),
    "an unknown kind": forged(1, 1, ONE, head=(1, 3, MOST)),
    "of another block": forged(1, 1, ONE, head=(1, CHANGED, MOST - 2)),
    "the same, and more": HEAD.pack(1, 0, MOST) + b"\0",
    "no changes": forged(0, 1, b""),
    "more changes than elements": forged(MOST // 2 + 1, 1, bytes(MOST // 2 + 1) * 3),
    "gaps of no bytes": forged(1, 0, ONE),
    "gaps of 4 bytes": forged(1, 4, bytes(6)),
    "behind the end": forged(1, 2, (MOST // 2).to_bytes(2, "little") + b"\1\0"),
    "far behind the end": forged(3, 3, b"\xff" * 15),
    "too few values": forged(2, 1, ONE),
    "too many values": forged(1, 1, ONE + b"\0"),
    "no regions": forged(1, 1, ONE, ()),
    "a region of nothing": forged(1, 1, ONE, ((0, 2), (MOST, 2))),
    "regions that overlap": forged(1, 1, ONE, ((MOST, 2), (MOST - 2, 2))),
    "a region beyond the end": forged(1, 1, ONE, ((MOST + 2, 2),)),
    "a hole at the end": forged(1, 1, ONE, ((MOST - 2, 2),)),
    "a width of 0": forged(1, 1, ONE, ((MOST, 0),)),
    "a width of 3": forged(1, 1, ONE, ((MOST, 3),)),
    "a wider element": forged(1, 1, ONE, ((MOST, 4),)),
    "a region that is not aligned": forged(1, 1, ONE, ((3, 1), (MOST - 1, 2), (MOST, 1))),
    "no frame": forged(1, 1, ONE, frame=b"zstd"),
    "two frames": forged(1, 1, ONE, frame=zstandard.compress(ONE) * 2),
    "a skippable frame": forged(1, 1, ONE, frame=b"\x50\x2a\x4d\x18\x03\0\0\0" + ONE),
    "a size that is not told": forged(1, 1, ONE, frame=frame_of_unknown_size(ONE)),
    "a bomb that tells": forged(1, 1, bytes(1 << 22)),
    "a bomb that does not": forged(1, 1, b"", frame=frame_of_unknown_size(bytes(1 << 22))),
    "a bomb that lies": forged(1, 1, b"", frame=bomb(1 << 22, MOST)),
    "a window of gigabytes": forged(1, 1, b"", frame=bomb(1 << 22, MOST, 0xA8)),
    "a size that is a lie": forged(1, 1, b"", frame=bomb(1 << 22, 1 << 31)),
}


@pytest.mark.parametrize("delta", FORGED.values(), ids=FORGED)
def test_a_forged_delta_is_refused_and_nothing_written(delta: bytes) -> None:
    base = block(MOST)
    before = base.copy()
    apply_block(base.data, forged(1, 1, ONE), base.data)  # that one is right
    assert np.flatnonzero(base != before).tolist() == [14]
    with pytest.raises(DeltaError):
        apply_block(base.data, delta, base.data)
    assert np.flatnonzero(base != before).tolist() == [14]


@pytest.mark.slow
def test_who_has_no_delta_loads_neither_numpy_nor_zstandard() -> None:
    code = "import replicas.carry.delta, sys; print({'numpy', 'torch', 'zstandard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_a_delta_loads_no_torch() -> None:
    code = (
        "import sys; from replicas.carry.delta import *; base, new = memoryview(bytes(99999)), bytearray(99999);"
        "new[7] = 1; delta = encode_block(base, memoryview(new)); out = bytearray(99999);"
        "apply_block(base, delta, memoryview(out)); assert out == new; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"

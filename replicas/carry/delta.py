"""Encode a version's blocks as lossless differences from a base. No I/O.

    delta = encode_block(base, new); apply_block(base, delta, out)  # out == new

Theory of operation
===================

A training step in bfloat16 changes about 1 % of the elements, mostly by one unit in the
last place. The delta of a block (:mod:`replicas.carry.blocks`) consists of the *gaps*
between changed elements and the xor of their old and new values. These are small
numbers, whose bytes are put in *planes* (all first bytes, then all second ones, ...)
and compressed by zstd (RFC 8878) at level 1, of which only the entropy coding matters
here. Of 269 MB of bfloat16 in which 0.35 / 1 / 3 % of the elements had changed it
leaves 0.31 / 0.72 / 1.72 % (bench/bench_delta.py); the entropy is 0.25 / 0.63 / 1.59 %.
Positions as int32 with the values take 1.05 / 3.0 / 9.0 %; zstd of the whole xor takes
0.57 / 1.38 / 3.43 %.

Of dtypes the code knows only the bytes of an element. Each block is sent, forwarded,
applied and verified alone. Applying a delta twice in place restores the base.

::

    delta  := version u8, kind u8, nbytes of the block u32; then, if kind is CHANGED:
              count u32, planes u8, regions u8, (end u32, width u8) x regions, frame
    frame  := zstd of: planes x count bytes of gaps; width x n bytes of xor for each
              region, of which n elements changed

Little endian. Regions follow each other, with elements of 1, 2, 4 or 8 bytes, numbered
through all regions. A gap is the number of unchanged elements since the last changed
one. Kind *same* means no changes. Kind *whole* means that the block is to be sent as
bytes: its delta is larger than the block before compression, or than half of it after.

**Hostile input.** A delta comes from another host. It is checked completely before a
byte is written; it decompresses to at most the bytes of its block; positions rise, so
the last one bounds them all. A valid delta may still be wrong: the caller compares the
block's digest with the publisher's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.carry.blocks import BLOCK_NBYTES

if TYPE_CHECKING:  # a carrier stays small until a delta is used
    import numpy as np
    import numpy.typing as npt

VERSION = 1
SAME, WHOLE, CHANGED = range(3)
WIDTHS = (1, 2, 4, 8)
DEFAULT_WIDTH = 2
DELTA_NBYTES_MAX = BLOCK_NBYTES // 2
_LEVEL = 1
_HEAD, _COUNTS, _REGION = struct.Struct("<BBI"), struct.Struct("<IBB"), struct.Struct("<IB")
_PLANES_MAX, _REGIONS_MAX = 3, 255
"""A block has 2^24 elements at most."""
_SAMPLES, _SAMPLE_NBYTES = 256, 128
_THROUGHOUT = 0.8
"""With 2-byte elements a delta does not pay when a share of 0.67 has changed."""

Region = tuple[int, int, int]
"""First byte, end, and the bytes of an element."""


class DeltaError(ConnectionError):
    """The delta is malformed, or belongs to another block."""


@dataclass(frozen=True)
class Changes:
    """Changed elements of one region (a range of a block with elements of one size).

    :ivar start: the region's first byte in the block. :ivar end: its end.
    :ivar numbers: indices of the elements in the region, rising.
    :ivar values: unsigned integers of the elements' size: the new values, or the xor of
        old and new ones.
    """

    start: int
    end: int
    numbers: npt.NDArray[np.uint32]
    values: npt.NDArray[Any]


def encode_block(base: memoryview, new: memoryview, regions: Iterable[Region] = (), *, start: int = 0) -> bytes:
    """Return the encoded delta that turns ``base`` into ``new``, for one block.

    It is of kind *whole*, without changes, if a delta would be too large: the block's
    bytes are to be sent then.

    :param base: the block's bytes in the older version, as many as ``new`` has.
    :param regions: (first byte, end, bytes of an element) in the image; if empty,
        elements have :data:`DEFAULT_WIDTH`. Bytes outside all regions are 1-byte
        elements.
    :param start: the block's first byte in the image.
    :raises ValueError: the sizes differ or exceed a block, or a region's elements have
        another size than 1, 2, 4 or 8 bytes.
    """
    import numpy as np
    import zstandard

    from replicas.memory.lines import find_changed

    nbytes = new.nbytes
    if base.nbytes != nbytes or nbytes > BLOCK_NBYTES:
        raise ValueError(f"a base of {base.nbytes} bytes does not fit a block of {nbytes}")
    old, now = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    places = _layout(regions, start, nbytes)
    whole = _HEAD.pack(VERSION, WHOLE, nbytes)
    if _differ_throughout(old, now):
        return whole
    positions, planes = [np.empty(0, np.uint32)], []
    at = before = 0
    room = nbytes
    for end, width in places:
        found = find_changed(now, old, None, at, end, width, room // (1 + width))
        if found is None:
            return whole
        numbers, xors = found
        planes.append(_planes(xors, width))
        positions.append(numbers + np.uint32(before))
        room -= len(numbers) * (1 + width)
        at, before = end, before + (end - at) // width
    gaps = np.concatenate(positions)
    if not len(gaps):
        return _HEAD.pack(VERSION, SAME, nbytes)
    gaps[1:] -= gaps[:-1] + np.uint32(1)
    count = max(1, -(-int(gaps.max()).bit_length() // 8))
    raw = b"".join((_planes(gaps, count), *planes))
    if len(raw) > nbytes:
        return whole
    counts = _COUNTS.pack(len(gaps), count, len(places)) + b"".join(_REGION.pack(*place) for place in places)
    delta = _HEAD.pack(VERSION, CHANGED, nbytes) + counts + zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    return delta if len(delta) <= nbytes // 2 else whole


def _differ_throughout(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> bool:
    """Return True if most sampled elements differ, so that a delta cannot pay.

    Samples are read as 2-byte elements. Returns False for blocks below 32 KiB.

    :param old: the block's bytes in the base. :param new: those in the new version.
    """
    count = len(new) // _SAMPLE_NBYTES
    if count < _SAMPLES:
        return False
    runs = (one[: count * _SAMPLE_NBYTES].view("<u2").reshape(count, -1) for one in (old, new))
    before, now = (run[:: count // _SAMPLES] for run in runs)
    return bool((before != now).mean() > _THROUGHOUT)


def is_whole(delta: bytes) -> bool:
    """Return True if the delta holds no changes, but says to send the block's bytes.

    False means that it is for :func:`apply_block`. Only its head is read and checked.

    :raises DeltaError: the delta is malformed.
    """
    return _head(delta)[0] == WHOLE


def apply_block(base: memoryview, delta: bytes, out: memoryview) -> None:
    """Write the block that ``delta`` makes of ``base`` to ``out``.

    ``base`` and ``out`` may be the same memory.

    :raises ValueError: they differ in size.
    :raises DeltaError: the delta is malformed, of another block, or *whole*; nothing
        was written.
    """
    import numpy as np

    from replicas.memory.lines import apply_xors

    if base.nbytes != out.nbytes:
        raise ValueError(f"a block of {base.nbytes} bytes does not go into {out.nbytes}")
    changes = _decoded(delta, base.nbytes)
    old, new = np.frombuffer(base, np.uint8), np.frombuffer(out, np.uint8)
    if old.ctypes.data != new.ctypes.data:
        np.copyto(new, old)
    for one in changes:
        apply_xors(new[one.start : one.end], one.numbers, one.values)


def _layout(regions: Iterable[Region], start: int, nbytes: int) -> Sequence[tuple[int, int]]:
    """Return (end in the block, bytes of an element) of regions that cover the block.

    :param regions: (first byte, end, bytes of an element) in the image; they are cut to
        whole elements in the block. Gaps become regions of 1-byte elements; if empty,
        the block is one region of elements of ``DEFAULT_WIDTH`` bytes. If more than 255
        result, the block is one region of 1-byte elements instead.
    :param start: the block's first byte in the image. ``nbytes``: its size.
    :raises ValueError: a region has elements of another size than 1, 2, 4 or 8 bytes.
    """
    places: list[tuple[int, int]] = []

    def place(end: int, width: int) -> None:
        """Add a region that ends at ``end``, with elements of ``width`` bytes.

        If the last one has elements of that size, too, extend it instead.
        """
        if places and places[-1][1] == width:
            places.pop()
        places.append((end, width))

    at = 0
    for first, last, width in sorted(regions) or [(start, start + nbytes, DEFAULT_WIDTH)]:
        if width not in WIDTHS:
            raise ValueError(f"elements of {width} bytes")
        first, last = -(-max(first - start, at) // width) * width, min(last - start, nbytes) // width * width
        if first < last:
            if at < first:
                place(first, 1)
            place(last, width)
            at = last
    if at < nbytes:
        place(nbytes, 1)
    return places if len(places) <= _REGIONS_MAX else [(nbytes, 1)]


def _planes(values: npt.NDArray[Any], count: int) -> bytes:
    """Return the lowest byte of each value, then the second byte of each, and so on.

    ``count`` bytes of each value are taken. Integers that are small then compress well.
    """
    return values.view("u1").reshape(-1, values.itemsize)[:, :count].T.tobytes()


def _joined(planes: npt.NDArray[np.uint8], width: int) -> npt.NDArray[Any]:
    """Return integers of ``width`` bytes from the planes that :func:`_planes` makes."""
    values: npt.NDArray[Any] = planes[0].astype(f"<u{width}")
    for number in range(1, len(planes)):
        more = planes[number].astype(values.dtype)
        more <<= 8 * number
        values |= more
    return values


def _head(delta: bytes) -> tuple[int, int]:
    """Check a delta's head; return its kind, and the number of bytes of its block.

    :raises DeltaError: the delta is malformed.
    """
    if not _HEAD.size <= len(delta) <= DELTA_NBYTES_MAX:
        raise DeltaError(f"a delta of {len(delta)} bytes")
    version, kind, nbytes = _HEAD.unpack_from(delta)
    if version != VERSION or kind > CHANGED or (kind != CHANGED and len(delta) > _HEAD.size):
        raise DeltaError(f"a delta of version {version} and kind {kind}")
    return kind, nbytes


def _decoded(delta: bytes, nbytes: int) -> list[Changes]:
    """Check a delta of a block of ``nbytes``; return its changes, with xors as values.

    Returns no changes if the block is the same.

    :raises DeltaError: the delta is malformed, of another block, or *whole*.
    """
    kind, stated = _head(delta)
    if stated != nbytes or kind == WHOLE:
        raise DeltaError(f"a delta of kind {kind} of a block of {stated} bytes, not {nbytes}")
    if kind == SAME:
        return []
    try:
        count, planes, regions = _COUNTS.unpack_from(delta, _HEAD.size)
        at = _HEAD.size + _COUNTS.size
        places = [_REGION.unpack_from(delta, at + number * _REGION.size) for number in range(regions)]
    except struct.error as error:
        raise DeltaError("a delta that ends early") from error
    elements = _elements(places, nbytes)
    if not (0 < count <= elements[-1] and 0 < planes <= _PLANES_MAX):
        raise DeltaError(f"{count} changes of {elements[-1]} elements, gaps of {planes} bytes")
    raw = decompressed(delta[at + regions * _REGION.size :], count * planes, nbytes)
    return _changes(raw, count, planes, places, elements)


def _elements(places: Sequence[tuple[int, int]], nbytes: int) -> list[int]:
    """Return, for each region, how many elements the block has up to the region's end.

    :param places: (end, bytes of an element) of each region, in order.
    :param nbytes: size of the block.
    :raises DeltaError: the regions are malformed, or do not cover the block.
    """
    elements = [0]
    at = 0
    for end, width in places:
        if width not in WIDTHS or not at < end <= nbytes or at % width or end % width:
            raise DeltaError(f"a region of {width}-byte elements from {at} to {end}")
        elements.append(elements[-1] + (end - at) // width)
        at = end
    if at != nbytes:
        raise DeltaError(f"regions of {at} of {nbytes} bytes")
    return elements[1:]


def decompressed(frame: bytes, least: int, most: int) -> bytes:
    """Return the content of a zstd ``frame``: over ``least``, up to ``most`` bytes.

    :raises DeltaError: the frame is malformed, or has another size.
    """
    import zstandard

    try:
        nbytes = zstandard.frame_content_size(frame)
        if not least < nbytes <= most:
            raise DeltaError(f"{nbytes} bytes of changes: more than {least}, at most {most} can be")
        raw = zstandard.ZstdDecompressor(max_window_size=BLOCK_NBYTES).decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"zstd: {error}") from error
    if len(raw) != nbytes:
        raise DeltaError(f"{len(raw)} bytes of changes instead of {nbytes}")
    return raw


def _changes(
    raw: bytes, count: int, planes: int, places: Sequence[tuple[int, int]], elements: Sequence[int]
) -> list[Changes]:
    """Return the changes by region, with xors as values, from the decompressed delta.

    :param raw: planes of the gaps, then of each region's xors.
    :param count: number of changed elements.
    :param planes: bytes of each gap.
    :param places: (end, bytes of an element) of each region.
    :param elements: number of elements up to the end of each region.
    :raises DeltaError: the sizes do not fit.
    """
    import numpy as np

    data = np.frombuffer(raw, np.uint8)
    positions = np.cumsum(_joined(data[: count * planes].reshape(planes, count), 4), dtype=np.intp)
    positions += np.arange(count)
    if positions[-1] >= elements[-1]:
        raise DeltaError(f"a change of element {positions[-1]} of {elements[-1]}")
    numbers = positions.astype(np.uint32)
    found: list[Changes] = []
    at, start, first, before = count * planes, 0, 0, 0
    for (end, width), until, last in zip(places, elements, np.searchsorted(positions, elements).tolist(), strict=True):
        size = (last - first) * width
        if at + size > len(data):
            raise DeltaError(f"{len(data)} bytes of changes are too few")
        values = _joined(data[at : at + size].reshape(width, last - first), width)
        found.append(Changes(start, end, numbers[first:last] - np.uint32(before), values))
        at, start, first, before = at + size, end, last, until
    if at != len(data):
        raise DeltaError(f"{len(data)} bytes of changes are too many")
    return found

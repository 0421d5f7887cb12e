"""Buckets: cut a version into units of transfer; pure arithmetic on its manifest.

Theory of operation
===================

Every member of a lane computes the same plan from the manifest and the routes, without
communication: buckets, in one order for all members. An image is cut from start to end.
The pieces of a part come in the order of the owner's memory. A piece larger than a
bucket is cut along its first dimensions; adjacent small pieces share a bucket. The
buckets of several parts are interleaved to fill the image from its start, as far as the
order within each part allows. So all owners send at the same time, and a receiver can
digest the image behind the last byte that will still change
(:attr:`BucketPlan.settled`).

The size of a bucket depends on the route. Every member except the first and the last
forwards each bucket, so the last one finishes (members - 2) buckets after the first
receiver: long routes have small buckets. With one receiver nothing is forwarded, and
large buckets cost least. (Measured; see :mod:`replicas.sidecar.transfer`.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import Manifest, Piece

MAX_BUCKET_NBYTES = 8 << 20
CHAIN_BUCKET_NBYTES = 4 << 20
MIN_BUCKET_NBYTES = 512 << 10
FILL_RATIO = 16
"""A chain fills with at most 1/16 of the bytes, unless buckets get too small."""


@dataclass(frozen=True)
class Bucket:
    """A contiguous range of ``nbytes`` in the owner's memory, from ``start``.

    :ivar pieces: whole pieces of a part; empty for an image.
    :ivar part: index of the part (0 for an image).
    """

    owner: int
    start: int
    nbytes: int
    pieces: tuple[Piece, ...] = ()
    part: int = 0


@dataclass(frozen=True)
class BucketPlan:
    """The buckets in which one member takes part, in order.

    :ivar settled: end of the image's data that later buckets leave unchanged, in bytes:
        before the first bucket, then after each.
    """

    buckets: tuple[Bucket, ...]
    settled: tuple[int, ...]


def bucket_limit(nbytes: int, members: int) -> int:
    """Return the bucket size in bytes for ``nbytes`` through a chain of ``members``."""
    passing = members - 2
    if passing < 1:
        return MAX_BUCKET_NBYTES
    return max(MIN_BUCKET_NBYTES, min(CHAIN_BUCKET_NBYTES, nbytes // (FILL_RATIO * passing)))


def make_plan(
    manifest: Manifest, routes: Sequence[Sequence[int]], rank: int, *, by_part: bool, limit: int | None = None
) -> BucketPlan:
    """Plan the buckets of lane rank ``rank``.

    :param routes: one route for each part; unless ``by_part``, one for the whole image.
        Routes without ``rank`` are skipped: this member has the bytes of those parts.
    :param limit: bucket size in bytes on all routes; default :func:`bucket_limit`.
    """

    mine = [(part, route) for part, route in enumerate(routes) if rank in route]
    total = manifest.data_nbytes
    if not by_part:
        sizes = [(route[0], limit or bucket_limit(total, len(route))) for _, route in mine]
        buckets = [
            Bucket(owner, start, min(size, total - start)) for owner, size in sizes for start in range(0, total, size)
        ]
        firsts = [bucket.start for bucket in buckets]
    else:
        cut = {
            part: buckets_of_part(
                manifest, part, route[0], limit or bucket_limit(manifest.part_nbytes(part), len(route))
            )
            for part, route in mine
        }
        firsts, buckets = _mixed(manifest, cut)
    settled = [manifest.data_nbytes]
    for first in reversed(firsts):
        settled.append(min(settled[-1], first))
    return BucketPlan(tuple(buckets), tuple(reversed(settled)))


def _mixed(manifest: Manifest, of_part: dict[int, list[Bucket]]) -> tuple[list[int], list[Bucket]]:
    """Merge the buckets by image offset, each part in its order; return both."""
    heap: list[tuple[int, int, int]] = []

    def offer(part: int, index: int) -> None:
        if index < len(of_part[part]):
            first = min(_image_offset(manifest, piece) for piece in of_part[part][index].pieces)
            heapq.heappush(heap, (first, part, index))

    for part in of_part:
        offer(part, 0)
    firsts: list[int] = []
    buckets: list[Bucket] = []
    while heap:
        first, part, index = heapq.heappop(heap)
        firsts.append(first)
        buckets.append(of_part[part][index])
        offer(part, index + 1)
    return firsts, buckets


def split_piece(piece: Piece, item: int, limit: int) -> Iterator[Piece]:
    """Cut a piece along its first axes to at most ``limit`` bytes or 1 element."""
    nbytes = prod(piece.shape) * item
    axis = next((axis for axis, extent in enumerate(piece.shape) if extent > 1), None)
    if nbytes <= limit or axis is None:
        yield piece
        return
    row = nbytes // piece.shape[axis]
    rows = max(1, limit // row)
    for first in range(0, piece.shape[axis], rows):
        offsets, shape = list(piece.offsets), list(piece.shape)
        offsets[axis] += first
        shape[axis] = min(rows, piece.shape[axis] - first)
        cut = Piece(piece.tensor, tuple(offsets), tuple(shape), piece.source_offset + first * row)
        yield from split_piece(cut, item, limit)


def buckets_of_part(manifest: Manifest, part: int, owner: int, limit: int = MAX_BUCKET_NBYTES) -> list[Bucket]:
    """Cut one part into buckets; each byte used by the manifest is in exactly one."""
    assert manifest.parts is not None
    buckets: list[Bucket] = []
    run: list[Piece] = []
    start = end = 0

    def close() -> None:
        if end > start:
            buckets.append(Bucket(owner, start, end - start, tuple(run), part))

    for whole in sorted(manifest.parts[part], key=lambda piece: piece.source_offset):
        item = item_nbytes(manifest.tensors[whole.tensor].dtype)
        for piece in split_piece(whole, item, limit):
            nbytes = prod(piece.shape) * item
            if not run or piece.source_offset != end or end + nbytes - start > limit:
                close()
                run, start, end = [], piece.source_offset, piece.source_offset
            run.append(piece)
            end += nbytes
    close()
    return buckets


def image_run(manifest: Manifest, bucket: Bucket) -> int | None:
    """Return the bucket's offset in the data section if it is contiguous, else None."""
    if not bucket.pieces:
        return bucket.start
    first = _image_offset(manifest, bucket.pieces[0])
    for piece in bucket.pieces:
        expected = first + piece.source_offset - bucket.start
        if not prod(piece.shape):
            continue
        whole = manifest.tensors[piece.tensor].shape
        axis = next((axis for axis, extent in enumerate(piece.shape) if extent > 1), len(whole))
        in_one_run = piece.shape[axis + 1 :] == whole[axis + 1 :]  # all later axes are whole
        if _image_offset(manifest, piece) != expected or not in_one_run:
            return None
    return first


def _image_offset(manifest: Manifest, piece: Piece) -> int:
    """Return the offset of the piece's first byte in the data section."""
    spec = manifest.tensors[piece.tensor]
    index = 0
    for offset, extent in zip(piece.offsets, spec.shape, strict=True):
        index = index * extent + offset
    return manifest.offsets[piece.tensor] + index * item_nbytes(spec.dtype)

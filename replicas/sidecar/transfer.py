"""Moving one version within a group: buckets, a short window, and digests on the way.

Theory of operation
===================

Every member of the lane takes part in every broadcast, with the same buckets in the same order, which follow from the
manifest alone. Mode ``"image"``: the data section in buckets of 32 MiB from its one owner. Mode ``"parts"``: the pieces of
each part in turn, in the order in which they lie in the owner's memory; pieces are cut along their first dimension until
they fit a bucket, and runs of small ones that lie together share one. A receiver takes a bucket straight into the image
where it is one run of bytes there too, else into staging memory, from which its pieces are scattered. A sender that is
not a bucket's owner receives it into staging memory and forgets it.

Two broadcasts are under way while the main thread hashes the one before: the digest costs little extra time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from replicas.core.manifest import Manifest, Piece, item_nbytes
from replicas.sidecar.groups import Group, Handle
from replicas.sidecar.wire import TransferResult, TransferSpec
from replicas.weights.digest import Digest, digest_of
from replicas.weights.tensors import piece_view

__all__ = ["BUCKET_NBYTES", "Bucket", "buckets_of_part", "run_transfer", "scatter", "split_piece"]

BUCKET_NBYTES = 32 << 20
WINDOW = 2


@dataclass(frozen=True)
class Bucket:
    """``nbytes`` bytes that lie together in their owner's memory, from ``start`` on; ``pieces`` of a part, whole."""

    owner: int
    start: int
    nbytes: int
    pieces: tuple[Piece, ...] = ()


def split_piece(piece: Piece, item: int, limit: int) -> Iterator[Piece]:
    """Cut a piece along its first dimensions until each part has at most ``limit`` bytes (or is one element)."""
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


def buckets_of_part(manifest: Manifest, part: int, owner: int, limit: int = BUCKET_NBYTES) -> list[Bucket]:
    """The buckets of one part; each byte that the manifest takes from it is in exactly one of them."""
    assert manifest.parts is not None
    buckets: list[Bucket] = []
    run: list[Piece] = []
    start = end = 0

    def close() -> None:
        if run:
            buckets.append(Bucket(owner, start, end - start, tuple(run)))

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


def scatter(staged: torch.Tensor, bucket: Bucket, data: torch.Tensor, manifest: Manifest) -> None:
    """Copy the pieces of a bucket (uint8, as they lie in their owner's memory) to their places in an image's data."""
    for piece in bucket.pieces:
        view = piece_view(data, manifest, piece)
        first = piece.source_offset - bucket.start
        view.copy_(_elements(staged, first, view))


def _elements(staged: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    chunk = staged[first : first + like.numel() * like.itemsize]
    if chunk.storage_offset() % like.itemsize:  # a bucket may start between two elements of the widest dtype
        chunk = chunk.clone()
    return chunk.view(like.dtype).view(like.shape)


class _Mover:
    """One member's side of a transfer."""

    def __init__(self, group: Group, spec: TransferSpec, manifest: Manifest, memory: torch.Tensor) -> None:
        self._group = group
        self._spec = spec
        self._manifest = manifest
        self._deadline = time.monotonic() + spec.timeout_s
        self._receives = spec.role == "receive"
        holds_image = self._receives or spec.mode == "image"
        expected = manifest.image_nbytes if holds_image else None
        if expected is not None and memory.numel() != expected:
            raise ValueError(f"the slot has {memory.numel()} bytes, the image {expected}")
        self._memory = memory[manifest.data_offset :] if holds_image else memory
        self._spare: list[torch.Tensor] = []
        self.digests: dict[int, Digest] = {}
        self.verify_s = 0.0

    def run(self, buckets: Iterator[Bucket]) -> None:
        flying: deque[tuple[Bucket, torch.Tensor, torch.Tensor | None, Handle]] = deque()
        for bucket in buckets:
            tensor, spare = self._place(bucket)
            flying.append((bucket, tensor, spare, self._group.broadcast(tensor, bucket.owner, self._deadline)))
            if len(flying) > WINDOW:
                self._finish(*flying.popleft())
        while flying:
            self._finish(*flying.popleft())

    def _place(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The memory that this member sends from or receives into, and the staging memory of which it is a part."""
        if bucket.owner == self._group.rank:
            if bucket.start + bucket.nbytes > self._memory.numel():
                raise ValueError(f"the slot has {self._memory.numel()} bytes, less than its part of the manifest")
            return self._memory[bucket.start : bucket.start + bucket.nbytes], None
        if self._receives and not bucket.pieces:
            return self._memory[bucket.start : bucket.start + bucket.nbytes], None
        if self._receives and len(bucket.pieces) == 1:
            view = piece_view(self._memory, self._manifest, bucket.pieces[0])
            if view.is_contiguous():
                return view.view(-1).view(torch.uint8), None
        spare = self._spare.pop() if self._spare else torch.empty(BUCKET_NBYTES, dtype=torch.uint8)
        return spare[: bucket.nbytes], spare

    def _finish(self, bucket: Bucket, tensor: torch.Tensor, spare: torch.Tensor | None, handle: Handle) -> None:
        handle.wait()
        mine = bucket.owner == self._group.rank
        if mine or self._receives:
            started = time.monotonic()
            self.digests.setdefault(bucket.owner, Digest()).update(tensor)
            self.verify_s += time.monotonic() - started
            if spare is not None:
                scatter(tensor, bucket, self._memory, self._manifest)
        if spare is not None:
            self._spare.append(spare)

    def image_digest(self) -> str:
        """Of the data section as it lies in memory now."""
        started = time.monotonic()
        digest = digest_of(self._memory)
        self.verify_s += time.monotonic() - started
        return digest


def run_transfer(group: Group, spec: TransferSpec, manifest: Manifest, memory: torch.Tensor) -> TransferResult:
    """Send or receive one version.

    :param memory: uint8: an image slot, or the packed part of a sender in mode ``"parts"``.
    :raises RuntimeError: a peer failed, or the timeout passed; ``memory`` of a receiver is undefined then.
    :raises ValueError: ``spec`` does not fit the manifest, the group or the memory.
    """
    parts = 1 if spec.mode == "image" else len(manifest.parts or ())
    if len(spec.owners) != parts or not all(0 <= owner < group.size for owner in spec.owners):
        raise ValueError(f"owners {spec.owners} do not fit {parts} part(s) in a group of {group.size}")
    started = time.monotonic()
    mover = _Mover(group, spec, manifest, memory)
    if spec.mode == "image":
        owner, total = spec.owners[0], manifest.data_nbytes
        starts = range(0, total, BUCKET_NBYTES)
        mover.run(Bucket(owner, start, min(BUCKET_NBYTES, total - start)) for start in starts)
        image_digest = mover.digests.get(owner, Digest()).hexdigest()
        part_digests: dict[int, str] = {}
    else:
        numbered = enumerate(spec.owners)
        mover.run(bucket for part, owner in numbered for bucket in buckets_of_part(manifest, part, owner))
        seen = spec.owners if spec.role == "receive" else (group.rank,)
        part_digests = {owner: mover.digests.get(owner, Digest()).hexdigest() for owner in seen}
        image_digest = mover.image_digest() if spec.role == "receive" else ""
    elapsed = time.monotonic() - started
    return TransferResult(image_digest, part_digests, max(elapsed - mover.verify_s, 0.0), mover.verify_s)

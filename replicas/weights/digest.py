"""Digests of weights: xxh3-128, in hex, of the xxh3-128 of each block of 16 MiB.

Several threads hash blocks, in any order: one thread reads 16 GB/s, less than memory
gives. Hashing releases the GIL. Digests are compared only with digests of this library.
Weights in GPU memory have another kind of digest, computed on the GPU:
:mod:`replicas.weights.devices.device_digest`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Literal

import torch
import xxhash

from replicas.weights.copy_pool import CopyPool, helpers_for
from replicas.weights.devices.accelerator import accelerator
from replicas.weights.devices.device_digest import device_digest_of

__all__ = ["BLOCK_NBYTES", "Digest", "DigestKind", "combined", "digest_of"]

BLOCK_NBYTES = 16 << 20
DigestKind = Literal["host", "device"]


def combined(blocks: Iterable[bytes]) -> str:
    """The digest of a stream, from the binary xxh3-128 of its blocks."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


class Digest:
    """An incremental digest: independent of how the stream is cut into chunks."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._block = xxhash.xxh3_128()
        self._room = BLOCK_NBYTES
        self.nbytes = 0

    def update(self, data: torch.Tensor | memoryview | bytes) -> None:
        """Append bytes, or a contiguous 1-D uint8 CPU tensor (read in place)."""
        view = data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data)
        start = 0
        while start < view.nbytes:
            chunk = view[start : start + self._room]
            self._block.update(chunk)
            self._room -= chunk.nbytes
            start += chunk.nbytes
            if not self._room:
                self._blocks.append(self._block.digest())
                self._block.reset()
                self._room = BLOCK_NBYTES
        self.nbytes += view.nbytes

    def hexdigest(self) -> str:
        return combined(self._blocks if self._room == BLOCK_NBYTES else [*self._blocks, self._block.digest()])


def digest_of(data: torch.Tensor | memoryview | bytes, kind: DigestKind = "host") -> str:
    """Compute the digest of one contiguous run of bytes, in several threads; blocking.

    :param kind: ``"device"``: a device digest
        (:mod:`replicas.weights.devices.device_digest`), computed by the tensor's device
        on a stream of this library: earlier writes to the tensor must have completed.
    """
    if kind == "device":
        if not isinstance(data, torch.Tensor):
            raw = bytearray(data)
            data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        gpu = accelerator()
        uuid = gpu.uuid_of(data) if gpu is not None else ""
        with gpu.on_side_stream(uuid) if gpu is not None and uuid else nullcontext():
            return device_digest_of(data)
    view = data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data)
    blocks: dict[int, bytes] = {}

    def hash_block(start: int) -> None:
        blocks[start] = xxhash.xxh3_128_digest(view[start : start + BLOCK_NBYTES])

    pool = CopyPool(helpers_for(view.nbytes // 2))  # a thread hashes faster than it copies
    try:
        pool.run([functools.partial(hash_block, start) for start in range(0, view.nbytes, BLOCK_NBYTES)])
    finally:
        pool.close()
    return combined(blocks[start] for start in sorted(blocks))

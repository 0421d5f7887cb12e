"""Digests of weights: xxh3-128, in hex, of a stream of bytes. Hashing a large chunk releases the GIL."""

from __future__ import annotations

import torch
import xxhash

__all__ = ["Digest", "digest_of"]

_CHUNK_NBYTES = 64 << 20


class Digest:
    """A digest that grows chunk by chunk: equal streams have equal digests, however they were cut."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self.nbytes = 0

    def update(self, data: torch.Tensor | memoryview | bytes) -> None:
        """Append ``data``: bytes, or a contiguous one-dimensional uint8 CPU tensor (read in place)."""
        view = data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data)
        for start in range(0, view.nbytes, _CHUNK_NBYTES):
            self._state.update(view[start : start + _CHUNK_NBYTES])
        self.nbytes += view.nbytes

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def digest_of(data: torch.Tensor | memoryview | bytes) -> str:
    """The digest of one contiguous run of bytes."""
    digest = Digest()
    digest.update(data)
    return digest.hexdigest()

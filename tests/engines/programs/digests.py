"""A digest of a whole model, the same in each process of a test."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

__all__ = ["digest"]


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of all names and bytes, in order."""
    hashed = xxhash.xxh3_128()
    for name, tensor in weights:
        hashed.update(name.encode())
        hashed.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()

"""A digest of a whole model, the same in each process of a test."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

__all__ = ["digest"]


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of all names and bytes, in whichever order a source yields them."""
    found = {}
    for name, tensor in weights:
        data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        found[name] = xxhash.xxh3_128_hexdigest(data)
    return xxhash.xxh3_128_hexdigest(repr(sorted(found.items())).encode())

"""Find values that are not finite (NaN, infinities), or that a cast makes infinite."""

from __future__ import annotations

import torch

from replicas.common.sizes import list_text
from replicas.core.base.manifest import PartManifest
from replicas.weights.layout import Places

NAMED = 3
"""Tensors that an error names."""
CHUNK = 1 << 22
"""Elements checked together, so that temporaries stay in the CPU caches."""


def not_finite(data: torch.Tensor, manifest: PartManifest) -> dict[str, int]:
    """Return how many NaN and infinite values each tensor has, by its name.

    Tensors without such values are left out.

    :param data: the data section of an image (a whole version), or a packed part (one
        rank's bytes); on any device.
    :param manifest: the layout of ``data``.
    """
    places, found = Places(manifest), dict[str, int]()
    for number, view in zip(places.order, places.views(data, as_bits=False), strict=True):
        index = number if manifest.pieces is None else manifest.pieces[number].tensor
        name = manifest.tensors[index].name
        if (view.is_floating_point() or view.is_complex()) and (count := _count(view)):
            found[name] = found.get(name, 0) + count
    return found


def overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a cast to ``dtype`` would make a finite value infinite."""
    if not tensor.numel():
        return False
    most = torch.finfo(dtype).max
    low, high = map(float, torch.aminmax(tensor))
    if -most <= low and high <= most:  # False if there is a NaN
        return False
    return any(bool((chunk.isfinite() & chunk.to(dtype).isinf()).any()) for chunk in _chunks(tensor))


def counts_text(found: dict[str, int]) -> str:
    """Return a text with the names and counts of the first three tensors.

    :param found: the result of :func:`not_finite`.
    """
    return list_text([f"{name!r} ({count:,})" for name, count in found.items()], NAMED)


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the elements as flat chunks of at most 4 Mi elements."""
    return torch.split(tensor.reshape(-1), CHUNK)


def _count(view: torch.Tensor) -> int:
    """Return how many values of a floating or complex tensor are NaN or infinite."""
    count = 0
    for chunk in _chunks(view):
        try:
            finite = torch.isfinite(chunk)
        except RuntimeError:  # a dtype of few bits, which torch only casts
            finite = torch.isfinite(chunk.to(torch.float32))
        if not bool(finite.all()):
            count += int((~finite).sum())
    return count

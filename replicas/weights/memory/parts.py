"""Copies the packed parts of a version into its image."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from replicas.core.versions.manifest import Manifest
from replicas.weights.copying import copy_pairs
from replicas.weights.tensors import piece_view

__all__ = ["part_pairs", "scatter_parts"]


def scatter_parts(manifest: Manifest, part: int, source: torch.Tensor, data: torch.Tensor) -> None:
    """Copy the pieces of one part to their places in an image.

    :param source: uint8, the packed part ``part`` of ``manifest``.
    :param data: uint8, the data section of the image.
    """
    copy_pairs(part_pairs(manifest, part, source, data))


def part_pairs(
    manifest: Manifest, part: int, source: torch.Tensor, data: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The copies of :func:`scatter_parts`, as pairs of image view and part view."""
    for piece in (manifest.parts or ())[part]:
        view = piece_view(data, manifest, piece)
        chunk = source[piece.source_offset : piece.source_offset + view.numel() * view.itemsize]
        yield view, chunk.view(view.dtype).view(view.shape)

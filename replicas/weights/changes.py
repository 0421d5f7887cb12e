"""What of a version differs from one before it: positions and values, by tensor.

Theory of operation
===================

A step of training changes few elements of a model, and who has the version before needs
only those. While the slot of that version has not been refilled, both are in shared
memory under one manifest, and their bytes are compared, tensor by tensor
(:mod:`replicas.memory.lines`). Only bits count: a NaN is equal to itself, and -0.0
differs from 0.0.

**Nobody waits for the base.** It is read without a lock, so its owner may begin to fill
it with another version at any moment; but it removes its flag first
(:mod:`replicas.linux.locks`). So the flag is looked at *after* each tensor: if it is
still there, the base had not been written to when it was compared. Else this tensor and
all that follow come whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import Manifest
from replicas.memory.lines import Lines, changed
from replicas.weights.copies.copy_pool import helpers_for
from replicas.weights.copies.tensors import bits
from replicas.weights.memory.buffers import Buffer

SHARE = 8
"""A tensor of which more than one element in so many has changed comes whole: to write
single elements would cost as much."""
_RUN_NBYTES = 1 << 30
"""Compared in one call, which numbers elements by 32 bits."""
_WIDTH_MAX = 8


def _none() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class Change:
    """What has changed of one tensor (:meth:`replicas.Update.changes`).

    :ivar name: of the tensor.
    :ivar whole: all of it, in its published shape and dtype, where more than an eighth
        has changed, or what has changed is not known; else None.
    :ivar positions: of the changed elements, rising, in the flattened (row-major)
        tensor: int64 of shape ``[n]``, on the CPU. Empty if nothing has changed, or
        with ``whole``.
    :ivar values: the elements there: the tensor's dtype, shape ``[n]``, on the CPU.
    """

    name: str
    whole: torch.Tensor | None = None
    positions: torch.Tensor = field(default_factory=_none)
    values: torch.Tensor = field(default_factory=_none)


def all_of(name: str, tensor: torch.Tensor) -> Change:
    return Change(name, tensor, values=tensor.view(-1)[:0])


class Difference:
    """Between an image and the one before it, which may be overwritten meanwhile.

    :param image: uint8 of shape ``[manifest.image_nbytes]``, header included.
    :param base: the memory of an image of the same manifest, opened without a lock;
        closed with the block. None: there is none, and everything has changed.
    :param sharing: how many processes of this host do so at the same time.
    """

    def __init__(self, image: torch.Tensor, manifest: Manifest, base: Buffer | None, sharing: int = 1) -> None:
        self._base = base
        self._threads = helpers_for(2 * manifest.data_nbytes, sharing) + 1
        self._places: dict[str, tuple[int, int, int]] = {}
        if base is not None:
            for spec, start in zip(manifest.tensors, manifest.offsets, strict=True):
                self._places[spec.name] = start, start + spec.nbytes, item_nbytes(spec.dtype)
            self._run, self._old = (one[manifest.data_offset :].numpy() for one in (image, base.readable()))
            self._lines = Lines(self._run, self._old)

    def __enter__(self) -> Difference:
        return self

    def __exit__(self, *_: object) -> None:
        self._lose()

    def _lose(self) -> None:
        base, self._base = self._base, None
        if base is not None:
            base.close()

    def positions(self, name: str) -> torch.Tensor | None:
        """Positions of a tensor's changed elements; None: take all of it."""
        if self._base is None:
            return None
        found = self._compared(*self._places[name])
        if not self._base.unchanged:
            self._lose()
            return None
        return found

    def _compared(self, first: int, last: int, item: int) -> torch.Tensor | None:
        self._lines.compare(first, last, self._threads)
        width, parts = min(item, _WIDTH_MAX), [np.empty(0, np.int64)]
        for start in range(first, last, _RUN_NBYTES):
            end = min(start + _RUN_NBYTES, last)
            most = (end - start) // width // SHARE
            some = changed(self._run, self._old, self._lines.words, start, end, width, most)
            if some is None:
                return None
            parts.append(some[0].astype(np.int64) + (start - first) // width)
        numbers = np.concatenate(parts)
        return torch.from_numpy(np.unique(numbers // 2) if item > width else numbers)

    def of(self, name: str, tensor: torch.Tensor) -> Change:
        """The change of a tensor, whose view in the image is given."""
        found = self.positions(name)
        if found is None:
            return all_of(name, tensor)
        return Change(name, None, found, bits(tensor).view(-1).index_select(0, found).view(tensor.dtype))

"""A version in memory that others may see, and an image of the next one."""

from __future__ import annotations

from typing import Any

import torch

from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.weights.changes import Change, Difference
from replicas.weights.loading import load_image, views
from replicas.weights.memory.buffers import Buffer


class Pair:
    """A version that others may see, and an image of the next one, alike at first."""

    def __init__(self, **shapes: tuple[str, tuple[int, ...]]) -> None:
        self.manifest = Manifest(tuple(TensorSpec(name, *shape) for name, shape in shapes.items()))
        self.old = Buffer.allocate(self.manifest.image_nbytes, "test")
        assert self.old.claim() == "claimed"
        generator = torch.Generator().manual_seed(1)
        raw = torch.randint(0, 2, (self.manifest.image_nbytes,), dtype=torch.uint8, generator=generator)
        self.old.tensor().copy_(raw)
        self.old.offer(1)
        self.image = raw.clone() if raw.data_ptr() % 64 == 0 else _aligned(raw)
        self.new = views(self.image, self.manifest)

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in views(self.old.tensor(), self.manifest).items()}

    def difference(self) -> Difference:
        return Difference(self.image, self.manifest, Buffer.open(self.old.place, 1, lock=False))

    def found(self) -> dict[str, Change]:
        with self.difference() as difference:
            return {name: difference.of(name) for name in self.new}

    def load(self, model: Any) -> None:
        with self.difference() as difference:
            load_image(model, self.image, self.manifest, difference)


def _aligned(raw: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(len(raw) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + len(raw)].copy_(raw)

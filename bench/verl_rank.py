"""Ray actors of ``bench_verl.py``: a trainer and rollout workers, for verl's
manager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.weights import Weights
from replicas.integrations.shared.refit import Refit

__all__ = ["Rollout", "Trainer"]


class _Worker:
    def __init__(self, what: str, seed: int) -> None:
        torch.set_num_threads(1)
        self.weights = Weights(what, seed)
        self.engine = Refit(options={"slots": 3})

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)

    def figure(self) -> int:
        """Of all values, to compare."""
        return int(sum(tensor.view(torch.int16).sum() for tensor in self.weights.tensors.values()))


class Trainer(_Worker):
    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.tensors.items()

    async def update_weights(self, global_steps: int, mode: str) -> dict[str, float]:
        return await self.engine.send_weights(self._walk(), global_steps=global_steps)


class Rollout(_Worker):
    """What comes is copied into its own model."""

    async def update_weights(self, global_steps: int) -> None:
        model = self.weights.tensors
        async for name, tensor in self.engine.receive_weights(global_steps=global_steps):
            model[name].copy_(tensor)

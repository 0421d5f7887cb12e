"""Ray actors that verl's manager calls as its trainers and rollout workers, with the
channel's engine in them, which die where a test says.

They do not import verl, which takes ten seconds of processor time: the engine is the
class below verl's own (tests/engines/frameworks/test_verl.py runs that one, too).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch

from replicas.integrations.shared.refit import Refit

__all__ = ["NAMES", "Rollout", "Trainer"]

NAMES = [f"layers.{number}.weight" for number in range(24)]
ELEMENTS = 20_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Worker:
    """``doom``: the next call of this name ends the process: at its ``entry``, in its
    ``middle``, or at its ``exit``, when it was carried out and nobody has heard so."""

    def __init__(self, **options: Any) -> None:
        self.engine = Refit(**options)
        self._doom = ("", "")

    def doom(self, call: str, moment: str) -> None:
        self._doom = (call, moment)

    def who(self) -> int:
        return os.getpid()

    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._die_at(method, "entry")
        found = getattr(self.engine, method)(*args, **kwargs)
        self._die_at(method, "exit")
        return found

    def _die_at(self, call: str, moment: str) -> None:
        if self._doom == (call, moment):
            die()


class Trainer(_Worker):
    """Its weights are all equal to the step."""

    async def update_weights(self, global_steps: int, mode: str) -> dict[str, float]:
        self._die_at("update_weights", "entry")
        found = await self.engine.send_weights(self._weights(global_steps), global_steps=global_steps)
        self._die_at("update_weights", "exit")
        return found

    def _weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(NAMES):
            if number == len(NAMES) // 2:
                self._die_at("update_weights", "middle")
            yield name, torch.full((ELEMENTS,), float(step))


class Rollout(_Worker):
    """Its model has the values that it was given last."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model: dict[str, torch.Tensor] = {}

    async def update_weights(self, global_steps: int) -> None:
        self._die_at("update_weights", "entry")
        self.model.clear()
        async for name, tensor in self.engine.receive_weights(global_steps=global_steps):
            if len(self.model) == len(NAMES) // 2:
                self._die_at("update_weights", "middle")
            self.model[name] = tensor.clone()
        self._die_at("update_weights", "exit")

    def values(self) -> tuple[int, set[float]]:
        """Number of its tensors, and all their values."""
        return len(self.model), {value for tensor in self.model.values() for value in tensor.tolist()}

"""Ray actors with an engine of NeMo-RL's refit interface, and what calls them there.

NeMo-RL is not on PyPI. :class:`Synchronizer` makes the calls that its
``CheckpointEngineWeightSynchronizer`` makes (repository NVIDIA-NeMo/RL, main branch of
2026-08-22), in their order; an engine is made by ``module:ClassName``, as there.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import ray
import torch

__all__ = ["TRANSPORT", "Policy", "Rollout", "Synchronizer"]

TRANSPORT = "replicas.integrations.nemo:CheckpointEngine"
TENSORS = 12


class _Worker:
    def __init__(self, rank: int, transport: str, **options: Any) -> None:
        module, name = transport.split(":")
        self.rank = rank
        self.engine = getattr(importlib.import_module(module), name)(bucket_size=300_000, **options)
        self.dies = False

    def doom(self) -> None:
        self.dies = True

    def who(self) -> int:
        return os.getpid()

    def prepare(self) -> Any:
        return {**self.engine.prepare(), "rank": self.rank}

    def finalize(self) -> None:
        self.engine.finalize()

    def die_if_doomed(self) -> None:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)


class Policy(_Worker):
    def init(self, **topology: Any) -> None:
        self.engine.init_policy_process_group(worker_rank=self.rank, **topology)

    async def send(self, value: float) -> None:
        await self.engine.send_weights(self._weights(value))

    def _weights(self, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            if number == TENSORS // 2:
                self.die_if_doomed()
            yield f"layers.{number}.weight", torch.full((25_000,), value)


class Rollout(_Worker):
    def init(self, **topology: Any) -> None:
        self.engine.init_rollout_process_group(rollout_rank=self.rank, **topology)

    async def receive(self) -> set[float]:
        """The values of all tensors that came, if all came."""
        found: list[torch.Tensor] = []
        async for batch in self.engine.receive_weight_batches():
            self.die_if_doomed()
            found += [tensor.clone() for _, tensor in batch]
        assert len(found) == TENSORS
        return {value for tensor in found for value in tensor.tolist()}


class Synchronizer:
    """Of some policy and rollout workers."""

    def __init__(self, policies: list[Any], rollouts: list[Any]) -> None:
        self.policies, self.rollouts = policies, rollouts

    def init_communicator(self) -> None:
        workers = [*self.policies, *self.rollouts]
        metadata = ray.get([worker.prepare.remote() for worker in workers], timeout=120)
        sizes = {"train_world_size": len(self.policies), "rollout_world_size": len(self.rollouts)}
        ray.get([worker.init.remote(metadata=metadata, **sizes) for worker in workers], timeout=120)

    def sync_weights(self, value: float) -> list[set[float]]:
        sent = [policy.send.remote(value) for policy in self.policies]
        results = ray.get(sent + [rollout.receive.remote() for rollout in self.rollouts], timeout=120)
        return list(results[len(sent) :])

    def shutdown(self) -> None:
        ray.get([worker.finalize.remote() for worker in (*self.policies, *self.rollouts)], timeout=120)

"""A target that keeps all versions, in a thread of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import replicas
from replicas import errors
from replicas.coordinator import Coordinator
from tests.support.waits import eventually

__all__ = ["Listener", "listening"]


class Listener:
    """What a rollout has received.

    :ivar where: arguments of join for the trainer.
    :ivar versions: number, meta and tensors of each version received.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.where: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token, "group": "trainer"}
        self.versions: list[tuple[int, dict[str, Any], dict[str, torch.Tensor]]] = []
        self.channel = replicas.join("policy", **{**self.where, "group": "rollout"})
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        while True:
            try:
                update = self.channel.receive().wait()
            except errors.Gone:
                return  # it was closed
            with update:
                found = {name: tensor.clone() for name, tensor in update}
                self.versions.append((update.version, dict(update.meta), found))

    def close(self) -> None:
        self.channel.close(wait=False)
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def steps(self) -> list[int]:
        return [meta["step"] for _, meta, _ in self.versions]

    def wait_for(self, step: int) -> dict[str, torch.Tensor]:
        """The tensors of the newest version, once that is of this step."""
        eventually(lambda: self.versions and self.steps[-1] == step, f"the version of step {step}")
        return self.versions[-1][2]


@contextmanager
def listening(**settings: Any) -> Iterator[Listener]:
    """A coordinator with the channel ``policy``, and a rollout that listens to it."""
    config = {"sources": ["trainer"], "targets": ["rollout"], "deadline": "30s", **settings}
    with Coordinator({"policy": config}).in_thread() as coordinator:
        listener = Listener(coordinator)
        try:
            yield listener
        finally:
            listener.close()

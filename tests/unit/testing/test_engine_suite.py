"""The scenes of engines, on a toy that is right, and on toys with a fault each.

Covers: testing/engine_suite.py, engine/protocol.py.
"""

from __future__ import annotations

import pytest
import torch

from replicas import Update, errors
from replicas.engine import Engine, PauseMode, Refused
from replicas.testing.engine_suite import SCENES, Trial, play


class ToyServer:
    """A model of two tensors. It remembers what it has answered."""

    def __init__(self) -> None:
        self.model = {name: torch.zeros(4) for name in ("a", "b")}
        self.cache: float | None = None
        self.is_paused = self.is_dead = False

    def answer(self) -> float | None:
        """One value, if all of the model has it."""
        if self.is_paused:
            return None
        if self.cache is None:
            (self.cache,) = {float(one) for tensor in self.model.values() for one in tensor}
        return self.cache

    def kill(self) -> None:
        self.is_dead = True


class ToyEngine(Engine):
    """Its verbs; what a test breaks, it overrides."""

    name = "a toy"

    def __init__(self, server: ToyServer) -> None:
        self.server = server

    def check(self, update: Update, timeout_s: float) -> str:
        self._ask()
        found = {spec.name: spec.shape for spec in update.manifest.tensors}
        known = {name: tuple(tensor.shape) for name, tensor in self.server.model.items()}
        wrong = sorted({name for name, _ in found.items() ^ known.items()})
        return f"these do not fit: {', '.join(wrong)}" if wrong else ""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._ask()
        self.server.is_paused = True

    def load(self, update: Update, timeout_s: float) -> None:
        self._ask()
        try:
            update.load_into(self.server.model)
        except errors.ManifestMismatch as error:
            raise Refused(error.message) from error

    def reset_caches(self, timeout_s: float) -> None:
        self._ask()
        self.server.cache = None

    def resume(self, timeout_s: float) -> None:
        self._ask()
        self.server.is_paused = False

    def checksum(self, update: Update, timeout_s: float) -> str | None:
        return ", ".join(name for name, tensor in update if not torch.equal(tensor, self.server.model[name]))

    def health(self) -> str:
        return "it was killed" if self.server.is_dead else ""

    def _ask(self) -> None:
        if self.server.is_dead:
            raise errors.SyncError("it does not answer", phase="load")


def trial_of(kind: type[ToyEngine], limit_s: float = 30.0) -> Trial:
    server = ToyServer()
    return Trial(
        connect=lambda: kind(server),
        weights=lambda value: {name: torch.full((4,), value) for name in ("a", "b")},
        answer=server.answer,
        kill=server.kill,
        limit_s=limit_s,
    )


@pytest.mark.parametrize("scene", SCENES)
def test_a_toy_that_is_right_survives(scene: str) -> None:
    play(scene, trial_of(ToyEngine))


class Forgetful(ToyEngine):
    def reset_caches(self, timeout_s: float) -> None:
        pass


class Careless(ToyEngine):
    """It takes whatever is given."""

    def check(self, update: Update, timeout_s: float) -> str:
        return ""

    def load(self, update: Update, timeout_s: float) -> None:
        self.server.model = {name: tensor.clone() for name, tensor in update}


class Late(ToyEngine):
    """It finds a misfit when it is paused."""

    def check(self, update: Update, timeout_s: float) -> str:
        return ""


class Torn(ToyEngine):
    def load(self, update: Update, timeout_s: float) -> None:
        self._ask()
        self.server.model["a"] = update.tensors()["a"].clone()


class Restless(ToyEngine):
    """It does not pause."""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        self._ask()


class Sleepless(ToyEngine):
    """It says nothing of its death."""

    def health(self) -> str:
        return ""


FAULTS = {
    Forgetful: "it serves each version",
    Careless: "a name does not fit",
    Late: "a shape does not fit",
    Torn: "it serves each version",
    Restless: "a load fails for good",
    Sleepless: "the server is killed between loads",
}


@pytest.mark.parametrize(("kind", "scene"), FAULTS.items())
def test_a_toy_with_a_fault_does_not(kind: type[ToyEngine], scene: str) -> None:
    trial = trial_of(kind, limit_s=0.5)
    if kind is Sleepless:
        trial = trial_of(kind_without_verbs(kind), limit_s=0.5)
    with pytest.raises((AssertionError, errors.ReplicasError)):
        play(scene, trial)


def kind_without_verbs(kind: type[ToyEngine]) -> type[ToyEngine]:
    """Its verbs do not notice either that the server was killed."""
    return type(kind.__name__, (kind,), {"_ask": lambda self: None})

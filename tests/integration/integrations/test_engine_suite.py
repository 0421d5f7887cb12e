"""The scenes of every engine, with vLLM's verbs and a look-alike of its server."""

from __future__ import annotations

import pytest
import torch

from replicas.integrations.vllm_verbs import VllmEngine
from replicas.testing.engine_suite import SCENES, Trial, play
from tests.support.engines import FakeEngine


@pytest.mark.parametrize("scene", SCENES)
def test_vllms_verbs_survive(scene: str) -> None:
    with FakeEngine() as server:

        def answer() -> float | None:
            if server.paused:
                return None
            (value,) = {float(one) for tensor in server.workers[0].model.values() for one in tensor}
            return value

        trial = Trial(
            connect=lambda: VllmEngine(server.url),
            weights=lambda value: {name: torch.full((64,), value) for name in ("a", "b", "c")},
            answer=answer,
            kill=server.kill,
        )
        play(scene, trial)

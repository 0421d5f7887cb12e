"""Versions of ``hf(model)`` in a released vLLM, by architecture: the engine then
answers as transformers does with the same weights.

Covers: integrations/vllm_worker/reload.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.programs.architectures import ARCHITECTURES, AS_ITSELF, BFLOAT16
from tests.engines.test_vllm_reload import run

PROGRAM = "architecture_engine.py"
ROUNDING, ROUNDING_OF_BFLOAT16 = 1e-4, 0.1
"""Of log-probabilities; those of other weights differ by 0.2 or more."""
OFTEN = ("Llama, tied", "Qwen3-MoE", "gpt-oss")
"""The others are of their kinds, and left to make test-all."""


@pytest.mark.parametrize(
    "architecture", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.long) for one in ARCHITECTURES]
)
def test_an_engine_answers_as_transformers_does(tmp_path: Path, architecture: str) -> None:
    found = run(PROGRAM, architecture, str(tmp_path / "loads"))
    print(architecture, found)
    if architecture in AS_ITSELF:
        assert found["answer"] == run(PROGRAM, architecture, str(tmp_path / "starts"), "fresh")["answer"]
        return
    most = ROUNDING_OF_BFLOAT16 if architecture in BFLOAT16 else ROUNDING
    assert found["another model"] > 0.2
    assert found["from disk"] < most
    assert found["loaded"] < most

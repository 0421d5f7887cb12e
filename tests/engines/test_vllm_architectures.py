"""Versions of ``hf(model)`` in a released vLLM, by architecture: the engine then
answers as transformers does with the same weights.

Covers: integrations/vllm_worker/reload.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
        fresh = run(PROGRAM, architecture, str(tmp_path / "starts"), "fresh")
        assert {name: found[name] for name in fresh} == fresh
        return
    most = ROUNDING_OF_BFLOAT16 if architecture in BFLOAT16 else ROUNDING
    assert found["another model"] > 0.2
    assert found["from disk"] < most
    assert found["loaded"] < most
    assert found["greedy"] < most


@pytest.mark.long
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="vLLM computes these with AMX")
@pytest.mark.parametrize(
    ("architecture", "method", "kind", "words"),
    [
        ("DeepSeek-V3", "float8", "ValueError", "requires AMX tile support"),
        ("gpt-oss", "MXFP4", "NotImplementedError", "No MXFP4 MoE backend supports"),
        ("Qwen2", "int8", "UsageError", "scales whose memory a reload frees"),
    ],
)
def test_a_quantised_model_is_refused_on_a_cpu(
    tmp_path: Path, architecture: str, method: str, kind: str, words: str
) -> None:
    """float8 and MXFP4 by vLLM itself, when it starts; int8 by its worker, when it
    joins."""
    found = run("quantised_engine.py", architecture, method, str(tmp_path))
    assert found["kind"] == kind
    assert words in found["text"]

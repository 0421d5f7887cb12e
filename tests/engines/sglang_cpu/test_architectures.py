"""Versions of ``hf(model)`` in the released SGLang, by architecture: the engine then
answers as transformers does with the same weights.

Covers: integrations/shared/model_folder.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engines.sglang_cpu.world import VARIABLES
from tests.support.runs import ROOT

PROGRAM = ROOT / "tests/engines/programs/sglang_architecture.py"
SECONDS = 300.0
ROUNDING, ROUNDING_OF_ONE = 0.2, 0.5
"""Of log-probabilities in bfloat16, on average and at most; those of other weights
differ by more than that, on average."""
RUN = ("Qwen3-MoE", "Llama, tied", "Qwen2", "Phi-3", "Mixtral", "GLM-4-MoE", "LoRA", "DoRA")
OFTEN = RUN[:1]
REFUSED: Mapping[str, str] = {
    "gpt-oss": "GptOssForCausalLM requires one of",  # an attention backend, of which a CPU has none
    "DeepSeek-V3": "assert rope_scaling is not None",  # of a CPU's rotary embedding
    "Falcon-H1": "No module named 'sgl_kernel.mamba'",
    "Granite hybrid": "No module named 'sgl_kernel.mamba'",
}


def start(architecture: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), VARIABLES["PYTHONPATH"]))
    command = [sys.executable, str(PROGRAM), architecture, str(folder)]
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": path}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize(
    "architecture", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.long) for one in RUN]
)
def test_a_server_answers_as_transformers_does(tmp_path: Path, architecture: str) -> None:
    done = start(architecture, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(architecture, found)
    assert found["misfit"] is None
    assert found["said"][0]
    assert found["another model"] > ROUNDING_OF_ONE
    assert found["from disk"] < ROUNDING
    assert found["loaded"] < ROUNDING
    assert found["greedy"] < ROUNDING_OF_ONE


@pytest.mark.long
@pytest.mark.parametrize("architecture", REFUSED)
def test_an_architecture_without_kernels_for_a_cpu_does_not_start(tmp_path: Path, architecture: str) -> None:
    done = start(architecture, tmp_path)
    assert done.returncode != 0
    assert REFUSED[architecture] in done.stderr

"""Versions of ``hf(model)`` in the released SGLang, by architecture: the engine then
answers as transformers does with the same weights.

Covers: integrations/shared/model_folder.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.sglang_cpu.world import VARIABLES
from tests.support.runs import ROOT

PROGRAM = ROOT / "tests/engines/programs/sglang_architecture.py"
SECONDS = 300.0
ROUNDING = 0.2
"""Of log-probabilities in bfloat16; those of other weights differ by 0.5 or more."""
RUN = ("Qwen3-MoE", "Llama, tied", "Qwen2", "Phi-3", "Mixtral", "GLM-4-MoE", "LoRA", "DoRA")
"""gpt-oss, latent attention and Mamba need kernels that SGLang 0.5.23 does not have for
this processor."""
OFTEN = RUN[:1]


@pytest.mark.parametrize(
    "architecture", [one if one in OFTEN else pytest.param(one, marks=pytest.mark.long) for one in RUN]
)
def test_a_server_answers_as_transformers_does(tmp_path: Path, architecture: str) -> None:
    path = os.pathsep.join((str(ROOT), VARIABLES["PYTHONPATH"]))
    command = [sys.executable, str(PROGRAM), architecture, str(tmp_path)]
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": path}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(architecture, found)
    assert found["said"][0]
    assert found["another model"] > 0.5
    assert found["from disk"] < ROUNDING
    assert found["loaded"] < ROUNDING

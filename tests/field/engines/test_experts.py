"""A model of experts in the released vLLM: ATOM#2028 in docs/field.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

ROUNDING = 0.05
"""Of log-probabilities in bfloat16; those of another model differ by 1 or more."""


@pytest.mark.timeout(600)
def test_atom_2028_experts_that_match_no_name_are_refused_by_name(tmp_path: Path) -> None:
    """None is skipped in silence; what the trainer's model calls its experts is
    known."""
    command = [sys.executable, str(ROOT / "tests/field/engines/experts.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["good"] < ROUNDING < found["other weights"] / 10
    assert "mlp.expert_2" in found["renamed"]
    assert "model.layers.0.mlp.experts.routed_experts.w13_weight" in found["missing"]
    assert "model.layers.0.mlp.experts.9.gate_proj.weight" in found["extra"]
    assert found["after refusals"] == found["good"]
    assert found["of the trainer's model"] < ROUNDING
    assert found["after all that"] == found["good"]

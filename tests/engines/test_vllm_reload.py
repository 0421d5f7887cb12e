"""What a released vLLM's worker loads: a whole version or nothing of it, by name.

Covers: integrations/vllm_worker/reload.py, integrations/vllm_worker/ties.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import ROOT

ROUNDING = 0.05
"""Of log-probabilities in bfloat16; those of another model differ by 1 or more."""
QKV = "model.layers.0.self_attn.qkv_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.routed_experts.w13_weight"
WORDS = {
    "q_proj": f"a part only of 1 of the model's layers: {QKV} (16384 of 32768 elements)",
    "k_proj and v_proj": QKV,
    "an expert": EXPERTS,
    "a part of an expert": EXPERTS,
    "a layer": "no weights for 9 of the model's parameters: model.layers.1.",
    "a norm": "model.layers.0.input_layernorm.weight",
    "rows": "near model.layers.0.self_attn.q_proj.weight [32, 64]",
    "integers": f"torch.int32 is given for {QKV}, which is torch.bfloat16",
    "float8": f"torch.float8_e4m3fn is given for {QKV}",
    "names of a compiled model": "publish hf(model), whose names are those of its checkpoint",
    "a tensor of nobody's": "which it does not have: model.layers.0.self_attn.q_proj.bias",
    "another vocabulary": "near lm_head.weight [100, 64]",
}


def run(program: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests/engines/programs" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("tiny_engine.py", str(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("kind", ["ignores the head", "refuses the head", "has a head"])
def test_a_version_of_a_tied_trainer_is_loaded_whatever_is_tied_here(tmp_path: Path, kind: str) -> None:
    errors = run("tied_engine.py", kind, str(tmp_path))
    assert errors["another model"] > 10 * ROUNDING
    assert errors["from disk"] < ROUNDING
    assert errors["loaded"] < ROUNDING


def test_a_model_of_experts_computes_with_each_version_that_is_loaded(found: dict[str, Any]) -> None:
    assert found["another model"] > 10 * ROUNDING
    cases = ("from disk", "loaded", "loaded again", "after one that died", "partial")
    assert {name: found[name] for name in cases if not found[name] < ROUNDING} == {}


@pytest.mark.parametrize(("misfit", "words"), WORDS.items())
def test_a_version_that_does_not_fit_is_refused_by_name(found: dict[str, Any], misfit: str, words: str) -> None:
    assert words in found["refused"][misfit]


def test_a_model_that_differs_in_one_element_is_found_by_name(found: dict[str, Any]) -> None:
    itself = found["proofs"].pop("of itself")
    assert itself["wrong"] == []
    named = {name for name, wrong in found["proofs"].items() if wrong}
    assert all(name in wrong[0] for name, wrong in found["proofs"].items() if wrong)
    told = {name for name in found["proofs"] if ".experts." not in name}  # a CPU packs those
    assert named >= told
    assert itself["equal"] >= len(told)


def test_a_refused_version_leaves_the_model_as_it_was(found: dict[str, Any]) -> None:
    assert found["after all that"] == found["loaded again"]


def test_a_partial_version_may_lack_whole_layers_only(found: dict[str, Any]) -> None:
    assert QKV in found["refused of a partial version"]


def test_keys_and_values_that_are_not_finite_are_cleared(found: dict[str, Any]) -> None:
    assert found["memory"] == [False, True]


def test_kv_connectors_that_cannot_be_cleared_are_known(found: dict[str, Any]) -> None:
    assert found["connectors"] == {
        "OffloadingConnector": [],
        "ExampleConnector": ["ExampleConnector"],
        "MultiConnector": ["ExampleConnector"],
    }


def test_a_server_with_a_draft_model_is_refused(found: dict[str, Any]) -> None:
    assert found["speculative"]["n-grams"] == ""
    assert "decodes speculatively with a draft model" in found["speculative"]["a draft model"]

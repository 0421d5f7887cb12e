"""Quantised checkpoints that are published and mirrored: mlx-lm, which computes with
them on a CPU, and transformers, which dequantises them, then answer as with the same
weights by the formats' specifications.

vLLM 0.32 and SGLang 0.5.23 need a GPU or AMX for these two formats.

Covers: sources/mirror.py, sources/checkpoint.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import replicas
from replicas.sources import checkpoint
from replicas.sources.mirror import Mirror, Version
from replicas.testing import FakeRun
from tests.engines.programs.architectures import true_answer
from tests.engines.quantised.models import MODELS, write
from tests.support.runs import ROOT

PROGRAM = ROOT / "tests/engines/quantised/mlx_answers.py"
SECONDS = 300.0
ROUNDING = 2e-3
"""Of log-probabilities in float32, at most; those of other weights differ by more than
1."""
Mirrored = tuple[str, list[Path], list[Path]]
READERS: dict[str, Any] = {
    "DeepSeek-V3": FineGrainedFP8Config(dequantize=True),
    "gpt-oss": Mxfp4Config(dequantize=True),
}


def mirror(target: replicas.Channel, kept: Mirror) -> Path:
    """Write the newest version, as ``replicas mirror`` does; return its folder."""
    with target.receive().wait(60) as update:
        file = os.open(update.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return kept.write(file, Version(version=update.version, digest=update.digest, meta={}))
        finally:
            os.close(file)


def read(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def ask_mlx(folders: Iterable[Path]) -> list[torch.Tensor]:
    path = os.pathsep.join((str(ROOT), str(Path(sys.prefix) / "mlx")))
    command = [sys.executable, str(PROGRAM), *map(str, folders)]
    variables = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.tensor(one) for one in json.loads(done.stdout.splitlines()[-1]).values()]


@pytest.fixture(scope="module", params=MODELS)
def mirrored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mirrored:
    """The architecture; its checkpoints of two seeds, dequantised; and the folders of
    the versions of the quantised ones."""
    folder = tmp_path_factory.mktemp("quantised")
    given, plain = ([folder / f"{kind} {seed}" for seed in (0, 1)] for kind in ("given", "plain"))
    for seed, (one, other) in enumerate(zip(given, plain, strict=True)):
        write(request.param, seed, one, other)
    places = []
    with FakeRun() as run, Mirror(folder / "mirror", like=given[0]) as kept:
        trainer, target = run.join("trainer"), run.join("rollout")
        for one in given:
            trainer.publish(checkpoint(one)).wait(60)
            places.append(mirror(target, kept))
    for one, place in zip(given, places, strict=True):
        tensors, same = (load_file(path / "model.safetensors") for path in (one, place))
        assert tensors.keys() == same.keys()
        assert {name for name in tensors if tensors[name].dtype != same[name].dtype} == set()
    return request.param, plain, places


def test_mlx_lm_answers_as_transformers_does(mirrored: Mirrored) -> None:
    architecture, plain, places = mirrored
    old, new = (true_answer(read(one, torch.float32)) for one in plain)
    assert (new - old).abs().max() > 1
    found = ask_mlx(places)
    print(architecture, *(float((one - true).abs().max()) for one, true in zip(found, (old, new), strict=True)))
    assert (found[0] - old).abs().max() < ROUNDING
    assert (found[1] - new).abs().max() < ROUNDING


def test_transformers_reads_a_version_as_its_weights(mirrored: Mirrored) -> None:
    architecture, plain, places = mirrored
    for one, place in zip(plain, places, strict=True):
        model = read(place, torch.bfloat16, quantization_config=READERS[architecture])
        assert torch.equal(true_answer(model), true_answer(read(one, torch.bfloat16)))

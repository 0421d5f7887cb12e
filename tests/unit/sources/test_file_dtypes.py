"""Dtypes of files: those of the installed safetensors, as it writes and reads them.

Covers: core/base/manifest.py, sources/checkpoint.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from replicas import errors
from replicas.core.base.dtypes import CODES, ITEM_NBYTES
from replicas.core.base.manifest import Manifest, TensorSpec
from replicas.sources import checkpoint
from replicas.sources.checkpoint import differences
from replicas.testing import FakeRun

WITHOUT_TORCH = {"F6_E2M3", "F6_E3M2"}
"""Codes of safetensors for which torch has no dtype."""
LACKING = {"complex128", "complex32"}
"""Dtypes that can be published, and that safetensors does not have."""


def sample(name: str) -> torch.Tensor:
    """A tensor of [4, 2] that has all kinds of bytes."""
    nbytes = 8 * ITEM_NBYTES[name]
    values = [0, 1] * (nbytes // 2) if name == "bool" else range(7, 7 + nbytes)
    return torch.tensor(values, dtype=torch.uint8).view(getattr(torch, name)).view(4, 2)


def header_of(data: bytes) -> Mapping[str, Mapping[str, object]]:
    found: Mapping[str, Mapping[str, object]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def test_every_code_of_the_installed_safetensors_is_known(tmp_path: Path) -> None:
    path = tmp_path / "x"
    body = b'{"w":{"dtype":"?","shape":[],"data_offsets":[0,0]}}'
    path.write_bytes(len(body).to_bytes(8, "little") + body)
    with pytest.raises(SafetensorError) as caught:
        safe_open(path, "pt")
    known = set(re.findall("`([A-Z0-9_]+)`", str(caught.value)))
    assert len(known) > 15, "safetensors names its codes in this error"
    assert set(CODES) == known - WITHOUT_TORCH
    assert not [code for code in WITHOUT_TORCH if hasattr(torch, f"float{code[1:].lower()}fn")]


def test_every_dtype_of_torch_that_safetensors_writes_is_known() -> None:
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    written = set()
    for dtype in dtypes:
        try:
            save({"w": torch.empty(0, dtype=torch.uint8).view(dtype)})
        except (KeyError, RuntimeError):
            continue
        written.add(str(dtype).removeprefix("torch."))
    assert written == ITEM_NBYTES.keys() - LACKING


@pytest.mark.parametrize("name", sorted(ITEM_NBYTES.keys() - LACKING))
def test_a_tensor_stands_in_a_file_as_safetensors_writes_it(name: str, tmp_path: Path) -> None:
    tensor, manifest = sample(name), Manifest((TensorSpec("w", name, (4, 2)),))
    manifest.check_file()
    assert header_of(manifest.header)["w"] == header_of(save({"w": tensor}))["w"]
    save_file({"w": tensor}, tmp_path / "theirs")
    (tmp_path / "ours").write_bytes(manifest.header + bytes(tensor.view(torch.uint8).flatten().tolist()))
    for file in ("ours", "theirs"):
        assert differences(checkpoint(tmp_path / file), {"w": tensor}) == []
        assert differences(load_file(tmp_path / file), {"w": tensor}) == []


def test_a_version_of_all_dtypes_is_a_file() -> None:
    weights = {name: sample(name) for name in ITEM_NBYTES.keys() - LACKING}
    weights |= {"none": torch.empty(3, 0, dtype=torch.float4_e2m1fn_x2), "scale": torch.ones((), dtype=torch.bfloat16)}
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish(weights).wait()
        with rollout.receive().wait() as update:
            assert differences(load_file(update.path), weights) == []
            assert differences(checkpoint(update.path), weights) == []
            assert differences(load_file(update.path_to_copy), weights) == []


@pytest.mark.parametrize(
    "tensor",
    [*map(sample, sorted(LACKING)), torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)],
    ids=[*sorted(LACKING), "half a scalar"],
)
def test_what_safetensors_lacks_is_refused_as_a_file_and_loaded(tensor: torch.Tensor, tmp_path: Path) -> None:
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish({"w": tensor, "v": torch.ones(2)}).wait()
        with rollout.receive().wait() as update:
            for way in ("path", "path_to_copy"):
                with pytest.raises(
                    errors.ManifestMismatch, match=r"tensor 'w' is (complex|float4).* safetensors has no"
                ):
                    getattr(update, way)
            assert differences(update.tensors(), {"w": tensor, "v": torch.ones(2)}) == []
            model = {"w": torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype), "v": torch.zeros(2)}
            update.load_into(model)
            assert differences(model, update.tensors()) == []
            (tmp_path / "image").write_bytes(update.manifest.header + bytes(update.manifest.data_nbytes))
    with pytest.raises(SafetensorError, match=r"unknown variant|slice does not end up at a byte boundary"):
        safe_open(tmp_path / "image", "pt")  # a file that nobody takes for another one

"""What transformers and PEFT save of a model, and what a source gives."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.models.architectures import quiet

__all__ = ["adapter_saved", "different", "given", "merged", "saved", "state"]

Tensors = Mapping[str, torch.Tensor]


def saved(model: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes of the model."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).save_pretrained(folder)  # it changes the configuration
        return load_file(Path(folder) / "model.safetensors")


def merged(peft_model: Any) -> Any:
    """``merge_and_unload()`` of a copy."""
    with quiet():
        return copy.deepcopy(peft_model).merge_and_unload()


def adapter_saved(peft_model: Any) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes of the active adapter."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(peft_model).save_pretrained(folder, selected_adapters=[peft_model.active_adapters[0]])
        return load_file(next(Path(folder).rglob("adapter_model.safetensors")))


def given(source: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """What a source yields, gathered."""
    with quiet():
        return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone() for name, one in source}


def state(model: Any) -> dict[str, Any]:
    """All that a publish must leave as it is."""
    tensors: dict[str, Any] = {name: one.detach().clone() for name, one in model.state_dict().items()}
    for name, one in model.named_parameters():
        tensors[f"{name} trained"] = torch.tensor(one.requires_grad)
        if one.grad is not None:
            tensors[f"{name} gradient"] = one.grad.clone()
    return tensors


def different(one: Tensors, other: Tensors) -> list[str]:
    """Names that only one has, or whose dtype, shape or bits differ."""
    both = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + sorted(name for name in both if not _same(one[name], other[name]))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(*(it.contiguous().reshape(-1).view(torch.uint8) for it in (one, other)))

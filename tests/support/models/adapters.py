"""Adapters of PEFT on these models, each with weights that change the model's
answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import peft
import torch
from torch import nn

from tests.support.models.architectures import quiet

__all__ = ["ADAPTERS", "SEVERAL", "randomise"]

Wrap = Callable[[Any], Any]


def _targets(model: Any) -> list[str]:
    """Names of some linear layers, not of the head."""
    kinds = (nn.Linear, _conv1d())
    head = model.get_output_embeddings()
    text = getattr(model.model, "language_model", model) if hasattr(model, "model") else model
    names = [
        path.rpartition(".")[2] for path, one in text.named_modules() if isinstance(one, kinds) and one is not head
    ]
    usual = [name for name in ("q_proj", "v_proj", "down_proj", "in_proj") if name in names]
    return usual[:2] or list(dict.fromkeys(names))[:2]


def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _leaf(model: Any, wanted: Any) -> str:
    path: str = next(path for path, one in model.named_modules() if one is wanted)
    return path.rpartition(".")[2]


def _embedding(model: Any) -> str:
    return _leaf(model, model.get_input_embeddings())


def _lora(**options: Any) -> Wrap:
    return lambda model: peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=_targets(model), **options))


def _embeddings(model: Any) -> Any:
    targets = [*_targets(model), _embedding(model)]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))


def _modules_to_save(model: Any) -> Any:
    head = model.get_output_embeddings() or getattr(model, "score", None)
    saved = _leaf(model, head) if head is not None else _embedding(model)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=_targets(model), modules_to_save=[saved]))


def _experts(model: Any) -> Any:
    packed = [name for name, one in model.named_parameters() if one.ndim == 3 and "expert" in name]
    leaves = list(dict.fromkeys(".".join(name.split(".")[-2:]) for name in packed))
    if not leaves:
        raise ValueError("the model packs no experts")
    targets = _targets(model)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, target_parameters=leaves))


def _several(names: Sequence[str], active: list[str]) -> Wrap:
    def wrap(model: Any) -> Any:
        targets = _targets(model)
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets), adapter_name=names[0])
        for name in names[1:]:
            made.add_adapter(name, peft.LoraConfig(r=2, target_modules=targets))
        for name in names:
            made.set_adapter(name)
            randomise(made)
        made.base_model.set_adapter(active if len(active) > 1 else active[0])
        return made

    return wrap


def _ia3(model: Any) -> Any:
    targets = _targets(model)
    return peft.get_peft_model(model, peft.IA3Config(target_modules=targets, feedforward_modules=targets[-1:]))


def _norms(model: Any) -> Any:
    kinds = {
        path.rpartition(".")[2]
        for path, one in model.named_modules()
        if "norm" in type(one).__name__.lower() and hasattr(one, "weight")
    }
    return peft.get_peft_model(model, peft.LNTuningConfig(target_modules=sorted(kinds)))


def _method(config: Any, **options: Any) -> Wrap:
    return lambda model: peft.get_peft_model(model, config(target_modules=_targets(model), **options))


SEVERAL: Mapping[str, Wrap] = {
    "one of two": _several(["policy", "reference"], ["policy"]),
    "two": _several(["a", "b"], ["a", "b"]),
    "odd names": _several(["math", "lora_A"], ["math"]),
}
ADAPTERS: Mapping[str, Wrap] = {
    "LoRA": _lora(),
    "rslora": _lora(use_rslora=True),
    "DoRA": _lora(use_dora=True),
    "bias": _lora(bias="all"),
    "bias, lora_only": _lora(bias="lora_only"),
    "lora_bias": _lora(lora_bias=True),
    "trained tokens": _lora(trainable_token_indices=[1, 5]),
    "embeddings": _embeddings,
    "modules_to_save": _modules_to_save,
    "experts": _experts,
    **SEVERAL,
    "IA3": _ia3,
    "LN tuning": _norms,
}
"""By the name in the handbook's table."""
METHODS: Mapping[str, Wrap] = {
    "ADALORA": _method(peft.AdaLoraConfig, init_r=6, target_r=4, total_step=10),
    "BOFT": _method(peft.BOFTConfig, boft_block_size=4),
    "FOURIERFT": _method(peft.FourierFTConfig, n_frequency=10),
    "HRA": _method(peft.HRAConfig),
    "IA3": _ia3,
    "LN_TUNING": _norms,
    "LOHA": _method(peft.LoHaConfig, r=4),
    "LOKR": _method(peft.LoKrConfig, r=4),
    "LORA": _lora(),
    "OFT": _method(peft.OFTConfig, oft_block_size=4, r=0),
    "PREFIX_TUNING": lambda model: peft.get_peft_model(
        model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ),
    "PROMPT_TUNING": lambda model: peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ),
    "P_TUNING": lambda model: peft.get_peft_model(
        model, peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    ),
    "TRAINABLE_TOKENS": lambda model: peft.get_peft_model(model, peft.TrainableTokensConfig(token_indices=[1, 2, 3])),
    "VERA": lambda model: peft.get_peft_model(model, peft.VeraConfig(r=4, target_modules=["q_proj"])),
}
"""By PEFT's own names of its methods."""


def randomise(model: Any, seed: int = 1) -> Any:
    """Move what is trained; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad(), quiet():
        for parameter in model.parameters():
            if parameter.requires_grad:
                step = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.copy_((parameter.float() + step).to(parameter.dtype))
    return model

"""The released transformers, PEFT and FSDP as sources, by the names that TRL sends.

Covers: sources/hf.py.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

from replicas.sources import hf
from replicas.sources.hf import HfSource

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params
    from trl.generation.vllm_generation import VLLMGeneration

Model = torch.nn.Module


def model(*, tied: bool = True) -> Model:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=tied,
    )
    made: Model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def tuned(**options: Any) -> Model:
    """A model with a LoRA adapter that changes something."""
    targets = ["q_proj", "v_proj", "gate_proj"]
    made: Model = get_peft_model(model(), LoraConfig(r=4, target_modules=targets, modules_to_save=["norm"], **options))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return made


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(made: Any, layers: Any) -> Any:
    """The model under FSDP2, unit by unit."""
    for layer in layers:
        fully_shard(layer)
    return fully_shard(made)


def grpo(made: Model, *, fsdp: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """What GRPOTrainer sends to a server, by its own walk."""
    generation: Any = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = made
    generation.accelerator = SimpleNamespace(device=torch.device("cpu"))
    gather = lambda _: contextlib.nullcontext()  # noqa: E731  # what TRL has where nothing is to be gathered
    generation._dist = SimpleNamespace(is_fsdp=fsdp, fsdp_version=2, gather_params=gather)
    walk: Iterator[tuple[str, torch.Tensor]] = generation._iter_named_params()
    return walk


def names(weights: Any) -> list[str]:
    return [name for name, _ in weights]


def announced(weights: Any) -> bool:
    """Whether metadata() says exactly what the walk gives."""
    given = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
    return bool(given == weights.metadata())


def at_once(weights: HfSource) -> list[str] | None:
    """Names of the tensors that publish copies without a walk."""
    found = weights.resident()
    return None if found is None else list(found)


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_model_has_the_names_that_trl_sends(tied: bool) -> None:
    made = model(tied=tied)
    assert names(hf(made)) == names(_iter_vllm_named_params(made)) == names(grpo(made))
    assert ("lm_head.weight" in names(hf(made))) is not tied
    assert announced(hf(made))
    assert at_once(hf(made)) == names(hf(made))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}])
def test_a_merged_adapter_gives_what_trl_sends_and_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    made = tuned(**options)
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    got = dict(hf(made))
    assert all(torch.equal(before[name], parameter) for name, parameter in made.named_parameters())
    merged: Any = made
    merged.merge_adapter()
    wanted = {name: parameter.detach().clone() for name, parameter in _iter_vllm_named_params(made)}
    merged.unmerge_adapter()
    assert list(got) == list(wanted) == names(grpo(made))
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    changed = [name for name, parameter in made.named_parameters() if not torch.equal(before[name], parameter)]
    assert changed  # a merge and its reverse in bfloat16, which the source avoids
    assert announced(hf(made))
    assert at_once(hf(made)) is None


def test_frozen_parameters_come_unless_they_are_not_wanted() -> None:
    made = model()
    made.get_parameter("model.embed_tokens.weight").requires_grad = False
    assert "model.embed_tokens.weight" in names(hf(made))
    assert names(hf(made, frozen=False)) == names(_iter_vllm_named_params(made))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("tied", [True, False])
def test_fsdp2_gives_the_shards_which_publish_gathers(tied: bool) -> None:
    made: Any = model(tied=tied)
    plain = names(hf(made))
    made = sharded(made, made.model.layers)
    assert names(hf(made)) == plain == names(_iter_vllm_named_params(made)) == names(grpo(made, fsdp=True))
    assert all(hasattr(tensor, "full_tensor") for _, tensor in hf(made))
    assert at_once(hf(made)) is None
    assert announced(hf(made))


@pytest.mark.usefixtures("group")
def test_an_adapter_under_fsdp2_is_merged_layer_by_layer() -> None:
    made: Any = tuned()
    wanted = {name: tensor.clone() for name, tensor in hf(made)}
    made = sharded(made, made.base_model.model.model.layers)
    before = {name: parameter.full_tensor().clone() for name, parameter in made.named_parameters()}
    source: Any = hf(made)
    got = {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in source}
    assert all(torch.equal(before[name], parameter.full_tensor()) for name, parameter in made.named_parameters())
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert announced(source)
    assert list(got) == list(wanted) == names(grpo(made, fsdp=True))

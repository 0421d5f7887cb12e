"""Hugging Face models as sources: what wrappers, dtypes, methods of PEFT and changes of
the model in between do to what is published, and what is refused.

Covers: sources/hf.py, sources/models/adapters.py, sources/models/unwrapping.py,
sources/models/gathering.py, sources/models/plan.py.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from replicas import errors
from replicas.sources import hf
from replicas.sources.models.adapters import MERGED, SAVED
from replicas.sources.models.unwrapping import unwrap
from replicas.testing import FakeRun
from replicas.weights.feed import Feed
from tests.support.models.adapters import ADAPTERS, METHODS, SEVERAL, randomise
from tests.support.models.architectures import forward, make, quiet
from tests.support.models.saved import adapter_saved, different, given, merged, saved, state

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tuned(adapter: str = "LoRA", architecture: str = "Qwen2", dtype: torch.dtype = torch.bfloat16) -> Any:
    with quiet():
        return randomise({**ADAPTERS, **METHODS}[adapter](make(architecture, dtype)))


def names(source: Any) -> set[str]:
    return {name for name, _, _ in source.metadata()}


# ------------------------------------------------------------ nothing is changed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_each_method_gives_what_peft_merges_and_saves(method: str, dtype: torch.dtype) -> None:
    model = tuned(method, dtype=dtype)
    before = state(model)
    if method in MERGED:
        assert not different(given(hf(model)), saved(merged(model)))
    else:
        with pytest.raises(errors.UsageError, match=f"of method {method}.*only"):
            given(hf(model))
    assert not different(given(hf(model, adapter="only")), adapter_saved(model))
    assert not different(before, state(model))


def test_all_tested_methods_are_those_that_are_taken() -> None:
    assert set(METHODS) == set(SAVED)
    assert set(MERGED) < set(SAVED)


def test_a_method_that_no_test_covers_is_refused() -> None:
    model = make("Qwen2")
    with quiet():
        model = peft.get_peft_model(model, peft.RandLoraConfig(r=4, target_modules=["q_proj"]))
    for source in (hf(model), hf(model, adapter="only")):
        with pytest.raises(errors.UsageError, match="'default' is of method RANDLORA, which is not supported"):
            given(source)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_publishes_leave_the_trainers_weights_as_they_were(dtype: torch.dtype) -> None:
    model = tuned("bias", dtype=dtype)
    source, before = hf(model), state(model)
    for _ in range(20):
        assert given(source)
    assert not different(before, state(model))


@pytest.mark.slow
def test_training_with_publishes_ends_where_training_without_them_does() -> None:
    def trained(*, publish: bool) -> Any:
        model = tuned()
        source = hf(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        tokens = torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(4))
        model.train()
        for _ in range(20):
            model(input_ids=tokens, labels=tokens).loss.backward()
            if publish:
                given(source)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return state(model), optimizer.state_dict()["state"]

    (one, its_moments), (other, others_moments) = trained(publish=True), trained(publish=False)
    assert not different(one, other)
    assert all(
        torch.equal(value, others_moments[number][name])
        for number, moments in its_moments.items()
        for name, value in moments.items()
    )


def test_a_walk_that_is_left_in_the_middle_changes_nothing() -> None:
    model = tuned("experts", "Qwen3-MoE")
    before, source = state(model), hf(model)
    for steps in range(0, len(source.metadata()), 7):
        walk = iter(source)
        for _ in range(steps):
            next(walk)
        with pytest.raises(KeyboardInterrupt):
            walk.throw(KeyboardInterrupt)  # type: ignore[attr-defined]  # it is a generator
        assert not different(before, state(model))
    assert not different(given(source), saved(merged(model)))


def test_a_merge_that_fails_is_an_error_and_changes_nothing() -> None:
    model = tuned("lora_bias", "Llama")
    before = state(model)
    with pytest.raises(errors.UsageError, match=r"cannot merge the adapter of 'model.layers.0.*base layer has no bias"):
        hf(model).metadata()
    assert not different(before, state(model))


def test_tied_layers_that_are_both_tuned_are_merged_together() -> None:
    model = make("Llama, tied")
    with quiet():
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens", "lm_head"])
        model = randomise(peft.get_peft_model(model, config))
    assert not different(given(hf(model)), saved(merged(model)))


# ------------------------------------------------------------ the model as it is now


def test_a_source_is_that_of_the_model_as_it_is_at_each_publish() -> None:
    model = tuned("one of two")
    source = hf(model)
    assert not different(given(source), saved(merged(model)))
    model.set_adapter("reference")
    assert not different(given(source), saved(merged(model)))
    assert not different(given(hf(model, adapter="only")), adapter_saved(model))
    randomise(model, 9)
    assert not different(given(source), saved(merged(model)))
    with quiet():
        model.merge_adapter()
    assert not different(given(source), saved(merged(model)))
    with quiet():
        model.unmerge_adapter()
    model.to(torch.float32)
    assert {dtype for _, dtype, _ in source.metadata()} == {torch.float32}
    assert not different(given(source), saved(merged(model)))


def test_a_tie_that_comes_and_goes_is_seen() -> None:
    model = make("Llama")
    source, head = hf(model), model.lm_head.weight
    assert "lm_head.weight" in names(source)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert "lm_head.weight" not in names(source)
    assert not different(given(source), saved(model))
    model.lm_head.weight = head
    assert not different(given(source), saved(model))


def test_a_tie_that_the_class_does_not_know_has_both_names() -> None:
    model = make("Llama")
    up, gate = model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj
    up.weight = gate.weight
    found = given(hf(model))
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(found[f"model.layers.0.mlp.{name}.weight"], gate.weight)


@pytest.mark.slow
def test_a_checkpoint_that_was_loaded_is_saved_as_it_was(tmp_path: Any) -> None:
    for architecture in ("Qwen3-MoE", "Qwen2.5-VL", "Gemma 3", "DeepSeek-V3"):
        model = make(architecture)
        with quiet():
            copy.deepcopy(model).save_pretrained(tmp_path / architecture)
            read = type(model).from_pretrained(tmp_path / architecture, dtype=torch.bfloat16)
        assert not different(given(hf(read)), saved(read))
        assert names(hf(read)) == names(hf(model))


def test_frozen_parameters_are_left_out_if_wanted() -> None:
    model = make("DeepSeek-V3")
    model.requires_grad_(False)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_()
    left = names(hf(model, frozen=False))
    assert left == {f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in range(4)} | {
        "model.layers.1.mlp.gate.e_score_correction_bias"  # a buffer, which a trainer moves
    }
    adapted = tuned()
    assert names(hf(adapted, frozen=False)) == {
        f"model.layers.{layer}.self_attn.{kind}_proj.{what}"
        for layer in range(2)
        for kind in "qv"
        for what in ("weight", "bias")
    }


def test_memory_of_a_walk_is_that_of_one_layer() -> None:
    """Of all tensors that a walk gives, merged and split ones, few live at a time."""
    model = tuned("experts", "Qwen3-MoE")
    alive: list[weakref.ref[Any]] = []
    whole = max(one.numel() for one in model.parameters())
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    for _, tensor in hf(model):
        alive = [*(one for one in alive if one() is not None), weakref.ref(tensor)]
        found: list[Any] = [one() for one in alive]
        others = {one.untyped_storage().data_ptr(): one for one in found}
        made = sum(one.untyped_storage().nbytes() // 2 for place, one in others.items() if place not in own)
        assert made <= 2 * whole + 2 * 32 * 96
        del tensor, others, found


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_names_of_one_memory_are_tied_whatever_the_parameters_are(targets: list[str]) -> None:
    def tied() -> Any:
        model = make("Llama, tied")
        model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())
        with quiet():
            return randomise(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets)))

    found = given(hf(tied()))
    with quiet():
        whole = tied().merge_and_unload().state_dict()  # not of a copy, which would not be tied
    assert found.keys() == whole.keys() - {"lm_head.weight"}
    assert not different(found, {name: one for name, one in whole.items() if name in found})


def test_a_source_keeps_no_tensor_of_a_model_that_has_changed() -> None:
    model = make("Qwen3-MoE")
    source = hf(model)
    given(source)
    old = [weakref.ref(one) for one in model.parameters()]
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
    given(source)
    assert not [one for one in old if one() is not None]


def test_a_source_of_each_publish_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """``publish(hf(model))``: neither transformers nor the modules are asked again."""
    unwrapped = Mock(wraps=unwrap)
    monkeypatch.setattr("replicas.sources.models.plan.unwrap", unwrapped)
    model = make("Qwen3-MoE")
    for _ in range(3):
        randomise(model, 1)
        assert not different(given(hf(model)), saved(model))
    assert unwrapped.call_count == 1
    model.to(torch.float32)
    assert not different(given(hf(model)), saved(model))
    model.model.layers[0].mlp = make("Qwen2").model.layers[0].mlp
    with pytest.raises(errors.UsageError, match="replaced by a wrapper"):
        given(hf(model))


def test_what_is_known_of_a_model_does_not_keep_it() -> None:
    model = make("Llama")
    given(hf(model))
    found = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert [one() for one in found] == [None, None]


def test_planning_leaves_torchs_initialisation_as_it_is() -> None:
    before = nn.init.normal_
    seen: list[object] = []

    class Looking(type(make("Qwen2"))):  # type: ignore[misc]  # made at run time
        def __init__(self, config: Any, extra: int) -> None:
            super().__init__(config)
            seen.append(nn.init.normal_)

    model = make("Qwen2")
    other = Looking(model.config, 3)
    other.load_state_dict(model.state_dict())
    assert names(hf(other)) == names(hf(model))  # its constructor needs more than a configuration
    assert set(seen) == {before}
    assert nn.init.normal_ is before


# ------------------------------------------------------------ the way back


def test_a_tensor_that_is_computed_cannot_be_loaded_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    model = make("Llama")
    convert = core_model_loading.revert_weight_conversion

    def joined(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(convert(model, tensors))
        q, k = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qk")
        found["model.layers.0.self_attn.qk.weight"] = torch.cat([found.pop(q), found.pop(k)])
        return found

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", joined)
    wanted = joined(model, dict(model.state_dict()))
    assert not different(given(hf(model)), wanted)
    assert hf(model).resident() is None
    with pytest.raises(errors.UsageError, match=r"qk.weight' is computed from .*q_proj.weight and .*publish\(model\)"):
        hf(model).destinations()


CONSTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a list of indices": lambda one: one[[1, 0, *range(2, len(one))]],
    "a constant on the device": lambda one: one * torch.tensor(2.0, device=one.device),
    "a value": lambda one: one * one.sum().item(),
    "a write in place": lambda one: one.clone().mul_(2),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_conversion_that_meta_tensors_do_not_show_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling2Loop of transformers 5.24 has a list of indices."""
    from transformers import core_model_loading

    def converted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: CONSTANTS[kind](one) if name == "lm_head.weight" else one for name, one in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", converted)
    with pytest.raises(errors.UsageError, match=r"publish\(model\)"):
        hf(make("Llama")).metadata()


def test_a_conversion_by_indices_on_the_device_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def converted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(tensors)
        for name in ("model.norm.weight", "lm_head.weight"):
            one = found[name]
            found[name] = one[torch.arange(len(one) - 1, -1, -1, device=one.device)].to(device=one.device)
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"].view(torch.int16)
        return found

    model = make("Llama")
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", converted)
    source = hf(model)
    assert not different(given(source), converted(model, model.state_dict()))
    assert source.metadata() == [(name, one.dtype, tuple(one.shape)) for name, one in given(source).items()]


def test_an_adapted_model_cannot_be_loaded_into() -> None:
    model = make("Qwen2")
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish(hf(model)).wait()
        with rollout.receive().wait() as update:
            with pytest.raises(
                errors.UsageError, match=r"an adapter of the model changes 'model.layers.0.self_attn.q_proj"
            ):
                update.load_into(hf(tuned()))
            reader = make("Qwen2", seed=3)
            update.load_into(hf(reader))
    assert torch.equal(forward(model), forward(reader))


def test_changes_alone_reach_the_packed_experts() -> None:
    model, reader = make("Qwen3-MoE"), make("Qwen3-MoE", seed=3)
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        for _ in range(3):
            trainer.publish(hf(model)).wait()
            with rollout.receive().wait() as update:
                update.load_into(hf(reader), changed_only=update.base > 0)
            assert not different(model.state_dict(), reader.state_dict())
            with torch.no_grad():
                model.model.layers[1].mlp.experts.gate_up_proj[2, 3, 4] += 1
                model.model.norm.weight[5] += 1


# ------------------------------------------------------------ wrappers and shards


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("group") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(model: Any) -> Any:
    return next(one for path, one in model.named_modules() if path.endswith("layers"))


def fsdp2(model: Any) -> Any:
    for layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


def fsdp1(model: Any, *, original: bool) -> Any:
    policy = ModuleWrapPolicy({type(layers(model)[0])})
    options: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def each_layer(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wrapped(model: Any) -> Any:
        found = layers(model)
        for number, layer in enumerate(found):
            found[number] = wrap(layer)
        return model

    return wrapped


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "compiled": torch.compile,
    "compiled layers": each_layer(torch.compile),
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "checkpointed layers": each_layer(checkpoint_wrapper),
    "FSDP2": fsdp2,
    "FSDP2 of checkpointed layers": lambda model: fsdp2(each_layer(checkpoint_wrapper)(model)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("architecture", ["Llama, tied", "Qwen3-MoE", "Qwen2.5-VL"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_do_not_show(architecture: str, wrapper: str) -> None:
    model = WRAPPERS[wrapper](make(architecture))
    assert not different(given(hf(model)), saved(make(architecture)))
    adapted = WRAPPERS[wrapper](tuned(architecture=architecture))
    before = given(adapted.state_dict().items())
    assert not different(given(hf(adapted)), saved(merged(tuned(architecture=architecture))))
    assert not different(given(hf(adapted, adapter="only")), adapter_saved(tuned(architecture=architecture)))
    assert not different(before, given(adapted.state_dict().items()))


@pytest.mark.slow
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("architecture", ["Llama, tied", "Qwen3-MoE", "Qwen2.5-VL"])
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_is_gathered_unit_by_unit(architecture: str, original: bool) -> None:
    source = hf(fsdp1(make(architecture), original=original))
    wanted = saved(make(architecture))
    assert source.resident() is None
    assert {name: (dtype, shape) for name, dtype, shape in source.metadata()} == {
        name: (one.dtype, tuple(one.shape)) for name, one in wanted.items()
    }
    assert not different(given(source), wanted)
    assert not different(given(source), wanted)  # once more: the first gathers set FSDP1 up
    with pytest.raises(errors.UsageError, match="sharded by FSDP1"):
        source.destinations()


@pytest.mark.usefixtures("group")
def test_adapters_under_fsdp1_are_refused() -> None:
    model = make("Qwen2")
    with quiet():
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj"]), autocast_adapter_dtype=False
        )
    with pytest.raises(errors.UsageError, match=r"PEFT model under FSDP1.*FSDP2"):
        given(hf(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))))


@pytest.mark.usefixtures("group")
def test_packed_experts_of_shards_cannot_be_loaded_into_and_the_rest_can() -> None:
    with pytest.raises(errors.UsageError, match=r"is a part of the sharded model.layers.0.mlp.experts"):
        hf(fsdp2(make("Qwen3-MoE"))).destinations()
    assert hf(fsdp2(make("Qwen2"))).destinations().keys() == names(hf(make("Qwen2")))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("cast", [False, True])
def test_a_forward_before_a_publish_does_not_show_under_fsdp2(cast: bool) -> None:
    """It leaves the outermost parameters gathered, and cast."""
    options: Any = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)} if cast else {}
    model = fully_shard(make("Qwen2", torch.float32), **options)
    wanted = saved(make("Qwen2", torch.float32))
    source = hf(model)
    for _ in range(2):
        model(input_ids=torch.tensor([[1, 2, 3]]))
        assert {dtype for _, dtype, _ in source.metadata()} == {torch.float32}
        assert not different(given(source), wanted)
        assert source.destinations().keys() == wanted.keys()


# ------------------------------------------------------------ what is refused


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_wrapper_that_is_not_known_is_refused_with_the_name_that_it_changed() -> None:
    for model in (make("Qwen2"), tuned()):
        layers(model)[1].mlp = Wrapper(layers(model)[1].mlp)
        with pytest.raises(errors.UsageError, match=r"has '.*mlp.inner.*lacks '.*layers.1.mlp"):
            given(hf(model))


@pytest.mark.parametrize("make_inner", [lambda: make("Qwen2"), tuned])
def test_a_module_that_holds_a_model_is_refused_with_its_place(make_inner: Callable[[], Any]) -> None:
    with pytest.raises(errors.UsageError, match=r"the Wrapper holds a \w+ as .inner.*hf\(module.inner\)"):
        given(hf(Wrapper(make_inner())))


def test_adapters_that_transformers_added_are_refused() -> None:
    model = make("Qwen2")
    model._hf_peft_config_loaded = True  # add_adapter() of transformers 5.24 wants a PEFT that is not released
    with pytest.raises(errors.UsageError, match=r"add_adapter.*get_peft_model"):
        given(hf(model))


def test_a_quantised_model_is_refused() -> None:
    from types import SimpleNamespace

    model = make("Qwen2")
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="fp8"))
    with pytest.raises(errors.UsageError, match=r"quantised \(fp8\).*dequantize"):
        given(hf(model))


@pytest.mark.parametrize("size", [1, 2])
def test_tensor_parallelism_of_transformers_is_refused(size: int) -> None:
    model = make("Qwen2")
    model._tp_size = size
    if size == 1:  # as under transformers' own FSDP2
        assert not different(given(hf(model)), saved(make("Qwen2")))
        return
    with pytest.raises(errors.UsageError, match=r"tensor parallelism.*FSDP2"):
        given(hf(model))


class OwnedDict(dict[str, Any]):
    """As DeepSpeed's ZeRO-3 puts in place of a module's parameters."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner


def test_parameters_in_a_dict_of_another_kind_are_found() -> None:
    model = make("Qwen2")
    for module in model.modules():
        own = OwnedDict(module)
        own.update(module._parameters)
        module._parameters = own
    assert not different(given(hf(model)), saved(make("Qwen2")))


def test_two_active_adapters_are_not_one() -> None:
    model = tuned("two")
    with pytest.raises(errors.UsageError, match=r"2 are active \(a, b\).*set_adapter\(\) with one of a, b"):
        given(hf(model, adapter="only"))
    assert not different(given(hf(model)), saved(merged(model)))


def test_an_adapter_that_is_called_like_a_module_is_refused() -> None:
    model = tuned("odd names")
    assert "lora_A" in model.peft_config
    assert "odd names" in SEVERAL
    with pytest.raises(errors.UsageError, match="cannot tell adapter 'math' from the others of math, lora_A"):
        given(hf(model, adapter="only"))


def test_an_adapter_of_a_model_without_one_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="no adapter"):
        hf(make("Qwen2"), adapter="only")


@pytest.mark.parametrize("wrong", [{"adapter": "both"}, {"sync": "cuda"}])
def test_a_wrong_argument_names_the_right_ones(wrong: Any) -> None:
    with pytest.raises(errors.UsageError, match="pass"):
        hf(make("Qwen2"), **wrong)


def test_the_configuration_of_an_adapter_is_what_peft_saves(tmp_path: Any) -> None:
    model = tuned()
    with quiet():
        copy.deepcopy(model).save_pretrained(tmp_path)
    wanted = json.loads((tmp_path / "adapter_config.json").read_text())
    found = json.loads(hf(model, adapter="only").adapter_config)
    lists = {name for name, value in wanted.items() if isinstance(value, list)}
    for name in found.keys() - {"auto_mapping"}:  # for people who do not know the class of the base model
        assert (sorted(found[name]) if name in lists else found[name]) == (
            sorted(wanted[name]) if name in lists else wanted[name]
        )
    with pytest.raises(AttributeError):
        _ = hf(model).adapter_config
    with pytest.raises(AttributeError, match="2 are active"):
        _ = hf(tuned("two"), adapter="only").adapter_config


# ------------------------------------------------------------ other modules, dtypes


def test_another_module_is_given_by_its_state_dict() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    compiled: Any = torch.compile(module[2])
    assert not different(given(hf(nn.Sequential(module[0], module[1], compiled))), module.state_dict())
    with quiet():
        adapted = randomise(peft.get_peft_model(nn.Sequential(nn.Linear(3, 4)), peft.LoraConfig(target_modules=["0"])))
    assert not different(given(hf(adapted)), merged(adapted).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["DeepSeek-V3", "MiniMax-M2", "T5", "Qwen2"])
def test_a_cast_keeps_in_float32_what_from_pretrained_keeps(
    architecture: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    model = make(architecture, torch.float32)
    with quiet():
        copy.deepcopy(model).save_pretrained(tmp_path)
        read = type(model).from_pretrained(tmp_path, dtype=dtype)
    planned = Feed(hf(model), dtype=dtype).plan()
    assert planned is not None
    found = {spec.name: spec.dtype for spec in planned.tensors}
    wanted = {name: str(one).removeprefix("torch.") for name, one, _ in hf(read).metadata()}
    buffers = {name for name, _ in read.named_buffers()}  # which from_pretrained leaves in the dtype of the file
    assert {name: one for name, one in found.items() if name not in buffers} == {
        name: one for name, one in wanted.items() if name not in buffers
    }


def test_peft_is_asked_once_which_tensors_an_adapter_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask the Hub for the base model's configuration."""
    asked = Mock(side_effect=peft.get_peft_model_state_dict)
    monkeypatch.setattr(peft, "get_peft_model_state_dict", asked)
    model = tuned()
    source = hf(model, adapter="only")
    for _ in range(3):
        assert not different(given(source), adapter_saved(model))
        randomise(model, 5)
    assert asked.call_count == 1
    model.to(torch.float32)
    assert not different(given(source), adapter_saved(model))
    assert asked.call_count == 2


@pytest.mark.slow
def test_an_interrupt_at_any_line_changes_nothing() -> None:
    """At some lines of what runs during a walk, of ours and of PEFT."""
    model = tuned("experts", "Qwen3-MoE")
    before, wanted = state(model), saved(merged(model))
    given(hf(model))  # what is asked of PEFT once in a process is not among the lines
    for stop in random.Random(1).sample(range(_lines_of(hf(model), None)), 12):
        source = hf(model)
        with pytest.raises(KeyboardInterrupt):
            _lines_of(source, stop)
        assert not different(before, state(model))
    assert not different(given(source), wanted)


def _lines_of(source: Any, stop: int | None) -> int:
    """Walk; return how many lines of sources and PEFT ran.

    :param stop: raise KeyboardInterrupt at this one.
    """
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.rpartition("/")[0].endswith(("sources", "models", "tuners", "lora")):
            return None
        if event == "line":
            lines += 1
            if lines - 1 == stop:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in source:
            pass
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (lambda name: name.replace("weight", "weight$"), r"gives the name 'model\.embed_tokens\.weight\$'"),
        (lambda name: re.sub(r"layers\.\d", "layers.0", name), r"leaves out 'model\.layers\.0"),
    ],
    ids=["pattern", "one name of two layers"],
)
def test_names_that_transformers_mixes_up_are_refused(named: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.19 names the experts of a gpt-oss that was dequantised."""
    from transformers import core_model_loading

    def renamed(_: object, tensors: dict[str, Any]) -> dict[str, Any]:
        return {named(name): tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", renamed)
    with pytest.raises(errors.UsageError, match=f"cannot name the checkpoint of LlamaForCausalLM: it {text}"):
        hf(make("Llama")).metadata()

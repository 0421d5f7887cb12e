"""Adapters of packed experts are merged in slices, with the bits of PEFT's merge.

Covers: sources/models/experts.py.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from replicas.sources import hf
from replicas.sources.models import experts
from tests.support.models.adapters import randomise
from tests.support.models.saved import different, given, merged, saved, state

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


def _model(kind: str, count: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_local_experts": count, "num_experts": count, **options}
    config = transformers.CONFIG_MAPPING[kind](
        intermediate_size=24, moe_intermediate_size=24, num_experts_per_tok=2, head_dim=16, **sizes
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _tuned(model: Any, adapters: int = 1, ranks: tuple[int, ...] = (3, 2)) -> Any:
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    made: Any = None
    for number in range(adapters):
        config = peft.LoraConfig(r=ranks[number], target_modules=["q_proj"], target_parameters=targets)
        if made is None:
            made = peft.get_peft_model(model, config, adapter_name="a0")
        else:
            made.add_adapter(f"a{number}", config)
        made.set_adapter(f"a{number}")
        randomise(made, number)
    made.base_model.set_adapter([f"a{number}" for number in range(adapters)])
    return made


@pytest.mark.parametrize("slice_nbytes", [1, 6000])
@pytest.mark.parametrize(("count", "adapters"), [(4, 1), (5, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])  # gpt-oss keeps its experts transposed, with a bias
def test_slices_have_the_bits_of_the_whole(
    kind: str, dtype: torch.dtype, count: int, adapters: int, slice_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "SLICE_NBYTES", slice_nbytes)
    model = _tuned(_model(kind, count, dtype), adapters)
    before = state(model)
    assert not different(given(hf(model)), saved(merged(model)))
    assert not different(before, state(model))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that an operation makes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


def test_what_peft_computes_is_for_some_experts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "SLICE_NBYTES", 1)
    model = _tuned(_model("qwen3_moe", 32))
    packed = model.base_model.model.model.layers[0].mlp.experts.get_base_layer().gate_up_proj
    source = hf(model)
    all_at_once, of_metadata, of_a_walk = _Largest(), _Largest(), _Largest()  # type: ignore[no-untyped-call]
    with all_at_once:
        copy.deepcopy(model).merge_and_unload()
    with of_metadata:
        source.metadata()
    with of_a_walk:
        given(source)
    assert all_at_once.nbytes >= 2 * packed.nbytes  # in float32
    assert of_metadata.nbytes <= packed.nbytes
    assert of_a_walk.nbytes <= packed.nbytes


def test_an_unknown_layout_of_peft_is_merged_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import ParamWrapper

    known = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda self, *given: known(self, *given).flip(0))
    monkeypatch.setattr(experts, "SLICE_NBYTES", 1)
    experts._slices_are_right.cache_clear()
    try:
        assert not experts._slices_are_right()
        model = _tuned(_model("qwen3_moe", 6))
        assert not different(given(hf(model)), saved(merged(model)))
    finally:
        experts._slices_are_right.cache_clear()


def test_the_question_to_peft_leaves_the_random_numbers_of_a_trainer() -> None:
    experts._slices_are_right.cache_clear()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert experts._slices_are_right()
    assert torch.equal(before, torch.get_rng_state())

"""Merge PEFT's adapters of packed experts in slices.

For a parameter that has the weights of all experts of a layer (experts x rows x
columns), PEFT's ``merge`` computes the change of all experts at once: several times the
layer in memory. :func:`merge_in_slices` runs the same method on views of a few experts
at a time. The result is bit for bit the same, as each expert's change is a matrix
product of its own.

How PEFT packs the experts' matrices A and B is not part of its API. So
:func:`_slices_are_right` tests the installed PEFT once; if a slice differs from the
same part of the whole, nothing is merged here, and PEFT merges all experts at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from replicas.sources.models.unwrapping import copy_modules

__all__ = ["merge_in_slices"]

SLICE_NBYTES = 2 << 20
"""Bytes of weights in one slice. A slice has two experts at least: PEFT treats one like
a layer without experts."""


def merge_in_slices(layers: Iterable[nn.Module]) -> None:
    """Merge active adapters, in place, into layers that pack experts (whose parameters
    hold the weights of all experts of a layer), a few experts at a time.

    Layers without experts are left alone, and so are all if the installed PEFT does not
    merge slices correctly. PEFT marks a merged layer, and does not merge it again.

    :param layers: private copies of tuned layers.
    """
    for layer in layers:
        wrappers = _wrappers(layer)
        experts = {wrapper.num_experts for wrapper in wrappers}
        if len(experts) != 1 or min(experts) < 4 or not _slices_are_right():
            continue
        count = experts.pop()
        step = max(2, SLICE_NBYTES * count // max(wrapper.get_param().nbytes for wrapper in wrappers))
        for first in range(0, count - 1, step):
            last = first + step if first + step < count - 1 else count
            merged = _merge_slice(wrappers, first, last)
        for wrapper, of_slice in zip(wrappers, merged, strict=True):
            wrapper.merged_adapters = of_slice.merged_adapters


def _wrappers(layer: Any) -> list[Any]:
    """Return PEFT's wrappers around the parameters of a layer that packs experts.

    The outermost comes first; empty if ``layer`` packs no experts.
    """
    from peft.tuners.lora.layer import ParamWrapper

    found = []
    while type(layer) is ParamWrapper:
        found.append(layer)
        layer = layer.base_layer
    return found


def _merge_slice(wrappers: list[Any], first: int, last: int) -> list[Any]:
    """Merge the adapters of some experts into the layer's own parameters, in place.

    Return copies of the wrappers for these experts, which PEFT has marked as merged.

    :param first: number of the first expert. :param last: one more than the last.
    """
    parts: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for wrapper in wrappers:
            parts[id(wrapper.get_param())] = wrapper.get_param()[first:last]
            for a, b in zip(wrapper.lora_A.values(), wrapper.lora_B.values(), strict=True):
                by_expert = a.weight.reshape(wrapper.num_experts, -1, a.weight.shape[-1])
                parts[id(a.weight)] = by_expert[first:last].flatten(0, 1)
                by_expert = b.weight.reshape(b.weight.shape[0], -1, wrapper.num_experts)
                parts[id(b.weight)] = by_expert[..., first:last].flatten(1)
    copied = _wrappers(copy_modules(wrappers[0], lambda tensor: parts.get(id(tensor), tensor)))
    for wrapper in copied:
        wrapper.num_experts = last - first
    copied[0].unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    for wrapper, of_slice in zip(wrappers, copied, strict=True):
        part, whole = of_slice.get_param(), parts[id(wrapper.get_param())]
        if part.data_ptr() != whole.data_ptr():  # not merged in place
            with torch.no_grad():
                whole.copy_(part)
    return copied


@functools.cache
def _slices_are_right() -> bool:
    """Return True if the installed PEFT merges slices to the same values as the whole.

    In both layouts of experts; tested once, on a small layer.
    """
    import peft

    for is_transposed in (False, True):
        layer = nn.Module()
        layer.register_parameter("packed", nn.Parameter(torch.zeros(5, 3, 2)))
        layer.is_transposed = is_transposed  # type: ignore[assignment]  # as in the experts of gpt-oss
        outer = nn.Module()
        outer.add_module("experts", layer)
        config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.packed"])
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            wrapper: Any = peft.inject_adapter_in_model(config, outer).experts
        with torch.no_grad():
            for tensor in (wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight):
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))
        whole = wrapper.get_delta_weight("default")
        wrappers = _wrappers(wrapper)
        if not wrappers:
            return False
        for first, last in ((0, 2), (2, 5)):
            _merge_slice(wrappers, first, last)
        if not torch.equal(wrapper.get_param(), whole):
            return False
    return True

"""Which tensors a checkpoint of a model has, and of which tensors in memory each is
made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from replicas import errors
from replicas.sources import transformers_rules
from replicas.sources.bare import Bare, Unit, bare
from replicas.sources.peft_merge import Merging, adapter_tensors, find_peft_model
from replicas.sources.recording import Arrangement, Form, record
from replicas.weights.copies.tensors import is_dtensor

__all__ = ["Plan", "Planner", "is_whole"]


class Plan(NamedTuple):
    """The tensors of a checkpoint.

    :ivar rows: how each is made, by its name in the checkpoint, in the order of the
        walk.
    :ivar state: the tensors in memory by name: whole ones and shards.
    :ivar units: those that FSDP1 has flattened, by the id of the tensor in ``state``.
    :ivar merging: merges adapters; None: there are none to be merged.
    """

    rows: dict[str, Arrangement]
    state: dict[str, torch.Tensor]
    units: dict[int, Unit]
    merging: Merging | None


class Planner:
    """Makes the plan of a model at each publish, as the model may have changed.

    What follows from names, shapes and dtypes alone is remembered.

    :param only: the adapter alone. :param frozen: False: without what is not trained.
    """

    def __init__(self, model: nn.Module, *, only: bool, frozen: bool) -> None:
        self._model = model
        self._only = only
        self._frozen = frozen
        self._known: tuple[object, dict[str, Arrangement]] | None = None
        self._merged: dict[tuple[str, ...], tuple[object, dict[str, Form]]] = {}
        self._kept: tuple[object, torch.dtype, frozenset[str]] | None = None
        self._base: Any = None

    def bare(self) -> Bare:
        """The model without its wrappers."""
        return bare(self._model)

    def plan(self) -> Plan:
        """The plan of the model as it is now.

        :raises replicas.errors.UsageError: the model is of a kind that is not
            supported.
        """
        found = self.bare()
        peft_model = find_peft_model(found.module)
        if peft_model is not None and found.units:
            text = "hf: a PEFT model under FSDP1 is not supported"
            raise errors.UsageError(text, hint="wrap it with FSDP2 (fully_shard)")
        if self._only:
            state = adapter_tensors(peft_model, _tensors(found.module))
            forms = {name: _whole_form(tensor) for name, tensor in state.items()}
            return Plan(record(dict, forms), state, {}, None)
        merging = None if peft_model is None else Merging(found)
        base = found.module if merging is None else merging.base
        state = _tensors(base)
        rows = self._rows(base, state, merging)
        order = {id(unit.module): number for number, unit in enumerate(found.units.values())}
        if order:  # the tensors of a unit follow one another, as each unit is gathered once
            place = {name: order.get(id(found.units[id(one)].module), -1) if id(one) in found.units else -1 for name, one in state.items()}
            rows = dict(sorted(rows.items(), key=lambda row: place[row[1].inputs[0]]))
        return Plan(rows, state, found.units, merging)

    def kept(self, dtype: torch.dtype) -> frozenset[str]:
        """Names of the last plan whose tensors stay in float32 when the model is
        cast."""
        if self._known is None or self._only or not transformers_rules.is_pretrained(self._base):
            return frozenset()
        rows = self._known[1]
        if self._kept is None or self._kept[0] is not rows or self._kept[1] != dtype:
            used = {name for row in rows.values() for name in row.inputs}
            kept = transformers_rules.kept_names(self._base, used, dtype)
            names = frozenset(name for name, row in rows.items() if not kept.isdisjoint(row.inputs))
            self._kept = rows, dtype, names
        return self._kept[2]

    def _rows(self, base: Any, state: dict[str, torch.Tensor], merging: Merging | None) -> dict[str, Arrangement]:
        pretrained = transformers_rules.is_pretrained(base)
        if not pretrained:
            _refuse_model_inside(base)
        names = transformers_rules.saved_names(base, state, _ties(state)) if pretrained else list(state)
        forms = {name: _whole_form(state[name]) for name in names}
        if merging is not None:
            forms |= self._merged_forms(merging, names)
        key = type(base), getattr(base, "_weight_conversions", None), state.keys(), forms
        if self._known is None or self._known[0] != key:
            if pretrained:
                transformers_rules.check(base, state)
            rows = transformers_rules.arrangements(base, forms) if pretrained else record(dict, forms)
            self._known = key, rows
        self._base = base
        rows = self._known[1]
        if self._frozen:
            return rows
        tuned = () if merging is None else merging.origins
        return {name: row for name, row in rows.items() if any(one in tuned or _is_trained(state[one]) for one in row.inputs)}

    def _merged_forms(self, merging: Merging, names: list[str]) -> dict[str, Form]:
        """Dtypes and shapes that a merge gives: learned from one of zeros."""
        found: dict[str, Form] = {}
        for name in names:
            if name not in merging.origins:
                continue
            group, inner = merging.origins[name]
            key = merging.key(group)
            if group not in self._merged or self._merged[group][0] != key:
                merged = merging.merge(group, _zeros)
                self._merged[group] = key, {one: Form.of(tensor) for one, tensor in merged.items()}
            found[name] = self._merged[group][1][inner]
        return found


def is_whole(tensor: torch.Tensor) -> bool:
    """True if the tensor is no shard."""
    return not is_dtensor(tensor) and not hasattr(tensor, "ds_id")


def _whole_form(tensor: torch.Tensor) -> Form:
    """Dtype and shape of the whole of which this rank may have a shard."""
    if is_whole(tensor):
        return Form.of(tensor)
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Form.of(torch.empty(shape, dtype=tensor.dtype, device="meta"))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Of the whole tensor's shape, where its local part is."""
    form = _whole_form(tensor)
    device = "cpu" if tensor.is_meta else tensor.device
    zeros = torch.zeros(form.shape, dtype=form.dtype, device=device)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, without a module's own data."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _ties(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names that are one tensor."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        key: object = id(tensor)
        if is_whole(tensor) and not tensor.is_meta and tensor.numel():
            key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        names[key].append(name)
    return [one for one in names.values() if len(one) > 1]


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _refuse_model_inside(module: nn.Module) -> None:
    for path, inner in module.named_modules():
        if transformers_rules.is_pretrained(inner) or (path and find_peft_model(inner) is not None):
            text = f"hf: the {type(module).__name__} holds a {type(inner).__name__} as .{path}, and would name its tensors so"
            raise errors.UsageError(text, hint=f"pass the model itself: hf(module.{path})")

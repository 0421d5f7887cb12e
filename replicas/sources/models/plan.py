"""Decide which tensors the checkpoint of a model has, and from which tensors in memory
each is made."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from replicas import errors
from replicas.sources.models import saving
from replicas.sources.models.adapters import Merging, adapter_tensors, find_peft_model
from replicas.sources.models.recording import Arrangement, Form, record
from replicas.sources.models.unwrapping import Unit, Unwrapped, is_whole, memory_of, unwrap

__all__ = ["Plan", "Planner"]


class Plan(NamedTuple):
    """The tensors of a checkpoint.

    :ivar rows: how each is made, by its name in the checkpoint, in the order in which
        they are yielded.
    :ivar state: the tensors in memory by name: whole ones and shards.
    :ivar units: FSDP1's flattened parameters, by the id of the tensor in ``state``.
    :ivar merging: merges the adapters; None without adapters to merge.
    """

    rows: dict[str, Arrangement]
    state: dict[str, torch.Tensor]
    units: dict[int, Unit]
    merging: Merging | None


class _Structure(NamedTuple):
    """The structure of a model, valid while its ``signature`` does not change."""

    signature: list[object]
    found: Unwrapped
    peft_model: Any
    merging: Merging | None
    base: Any
    """Without wrappers and adapters."""
    state: dict[str, torch.Tensor]
    merged: dict[str, Form]
    """Dtype and shape of the tensors that a merge changes, by name."""


class Planner:
    """Makes the plan of a model at each publish, as the model may have changed.

    Results that depend on the modules and tensors, or on names, shapes and dtypes
    alone, are cached.

    :param only: plan the adapter alone. :param frozen: False: leave out tensors that
        are not trained.
    """

    def __init__(self, model: nn.Module, *, only: bool, frozen: bool) -> None:
        self._model = model
        self._only = only
        self._frozen = frozen
        self._structure: _Structure | None = None
        self._known: tuple[object, dict[str, Arrangement]] | None = None
        self._adapter: tuple[_Structure, Plan] | None = None
        self._kept: tuple[object, torch.dtype, frozenset[str]] | None = None

    def read_structure(self) -> _Structure:
        """Return the model without wrappers and adapters; cached while it is unchanged.

        :raises replicas.errors.UsageError: its adapters are of an unsupported kind.
        """
        _reshard(self._model)
        signature = _signature(self._model)
        if self._structure is not None and self._structure.signature == signature:
            return self._structure
        found = unwrap(self._model)
        peft_model = find_peft_model(found.module)
        if peft_model is not None and found.units:
            text = "hf: a PEFT model under FSDP1 is not supported"
            raise errors.UsageError(text, hint="wrap it with FSDP2 (fully_shard)")
        merging = Merging(found) if peft_model is not None and not self._only else None
        base = found.module if merging is None else merging.base
        if not self._only and not saving.is_pretrained(base):
            _refuse_model_inside(base)
        state, merged = _tensors(base), {} if merging is None else _merged_forms(merging)
        self._structure = _Structure(signature, found, peft_model, merging, base, state, merged)
        return self._structure

    def plan(self) -> Plan:
        """Return the plan of the model in its current state.

        :raises replicas.errors.UsageError: the model is of an unsupported kind.
        """
        structure = self.read_structure()
        if self._only:
            return self._adapter_plan(structure)
        rows, units = self._rows(structure), structure.found.units
        if units:  # FSDP1 gathers whole units, and needs the outermost first
            order = {id(module): number for number, module in enumerate(self._model.modules())}
            place = {
                name: order[id(units[id(one)].module)] for name, one in structure.state.items() if id(one) in units
            }
            rows = dict(sorted(rows.items(), key=lambda row: place.get(row[1].inputs[0], -1)))
        return Plan(rows, structure.state, units, structure.merging)

    def _adapter_plan(self, structure: _Structure) -> Plan:
        """Return the plan of the adapter. PEFT is asked once for the same model: it may
        look for the base model's configuration on the Hub."""
        if self._adapter is None or self._adapter[0] is not structure:
            state = adapter_tensors(structure.peft_model, structure.state)
            forms = {name: _whole_form(tensor) for name, tensor in state.items()}
            plan = Plan(record(dict, forms), state, {}, None)
            if not {id(tensor) for tensor in state.values()} <= {id(tensor) for tensor in structure.state.values()}:
                return plan  # new tensors, e.g. a computed prompt: not cached
            self._adapter = structure, plan
        return self._adapter[1]

    def kept_in_float32(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the names of the last plan whose tensors stay in float32 when the
        model is cast."""
        base = None if self._structure is None else self._structure.base
        if self._known is None or base is None or not saving.is_pretrained(base):
            return frozenset()
        rows = self._known[1]
        if self._kept is None or self._kept[0] is not rows or self._kept[1] != dtype:
            used = {name for row in rows.values() for name in row.inputs}
            kept = saving.kept_names(base, used, dtype)
            names = frozenset(name for name, row in rows.items() if not kept.isdisjoint(row.inputs))
            self._kept = rows, dtype, names
        return self._kept[2]

    def _rows(self, structure: _Structure) -> dict[str, Arrangement]:
        base, state, merging = structure.base, structure.state, structure.merging
        pretrained = saving.is_pretrained(base)
        names = saving.saved_names(base, state, _ties(state)) if pretrained else list(state)
        forms = {
            name: structure.merged[name] if name in structure.merged else _whole_form(state[name]) for name in names
        }
        key = type(base), getattr(base, "_weight_conversions", None), tuple(state), forms
        if self._known is None or self._known[0] != key:
            if pretrained:
                saving.check(base, state)
            rows = saving.arrangements(base, forms) if pretrained else record(dict, forms)
            self._known = key, rows
        rows = self._known[1]
        if self._frozen:
            return rows
        tuned = () if merging is None else merging.origins
        trained = {name for name, one in state.items() if name in tuned or _is_trained(one)}
        return {name: row for name, row in rows.items() if not trained.isdisjoint(row.inputs)}


def _merged_forms(merging: Merging) -> dict[str, Form]:
    """Return dtypes and shapes of merged tensors, from one merge of zeros per kind of
    layer."""
    found: dict[str, Form] = {}
    alike: list[tuple[object, list[Form]]] = []
    for group in dict.fromkeys(group for group, _ in merging.origins.values()):
        key = merging.key(group)
        known = next((forms for other, forms in alike if other == key), None)
        if known is None:
            known = [Form.of(tensor) for tensor in merging.merge(group, _zeros).values()]
            alike.append((key, known))
        found |= dict(zip(merging.merged_names(group), known, strict=True))
    return {name: found[origin] for name, (_, origin) in merging.origins.items()}


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 free the parameters that a forward has gathered, as ``state_dict()``
    does: the outermost ones, which may have been cast."""
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp):
            module.reshard()


def _signature(model: nn.Module) -> list[object]:
    """Return the ids of a model's modules and tensors, with dtypes, and the active
    adapters."""
    found: list[object] = []
    for module in model.modules():
        inside = module.__dict__
        found.append(id(module))
        for tensor in (*inside["_parameters"].values(), *inside["_buffers"].values()):
            found += (id(tensor), tensor if tensor is None else tensor.dtype)
        if (active := inside.get("_active_adapter")) is not None:
            found.append(str(active))
    return found


def _whole_form(tensor: torch.Tensor) -> Form:
    """Return dtype and shape of the whole tensor, of which this rank may have a
    shard."""
    if is_whole(tensor):
        return Form.of(tensor)
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Form.of(torch.empty(shape, dtype=tensor.dtype, device="meta"))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the whole tensor's shape, on the device of its local part."""
    form = _whole_form(tensor)
    device = "cpu" if tensor.is_meta else tensor.device
    zeros = torch.zeros(form.shape, dtype=form.dtype, device=device)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, without other state of a
    module."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _ties(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return lists of names that share one tensor."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[memory_of(tensor)].append(name)
    return [one for one in names.values() if len(one) > 1]


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _refuse_model_inside(module: nn.Module) -> None:
    for path, inner in module.named_modules():
        if saving.is_pretrained(inner) or (path and find_peft_model(inner) is not None):
            text = f"hf: the {type(module).__name__} holds a {type(inner).__name__} as .{path}, and would name its tensors so"
            raise errors.UsageError(text, hint=f"pass the model itself: hf(module.{path})")

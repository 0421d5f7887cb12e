"""Decide which tensors the checkpoint of a model has, and from which tensors in memory
each is made."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from replicas import errors
from replicas.sources.models import saving
from replicas.sources.models.adapters import Merging, adapter_tensors, find_peft_model
from replicas.sources.models.recording import Arrangement, Form, record
from replicas.sources.models.unwrapping import Unit, is_whole, memory_of, unwrap

__all__ = ["Plan", "Planner"]


class Plan(NamedTuple):
    """Which tensors a checkpoint has, and from which tensors in memory each is made.

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
    units: dict[int, Unit]
    peft_model: Any
    merging: Merging | None
    base: Any
    """Without wrappers and adapters."""
    original: nn.Module | None
    """The model's own module of which ``base`` is the copy; None with adapters."""
    state: dict[str, torch.Tensor]
    merged: dict[str, Form]
    """Dtype and shape of the tensors that a merge changes, by name."""


class _Place(NamedTuple):
    """Where a model has a tensor.

    :ivar module: position of the module in ``model.modules()``.
    :ivar kind: ``"_parameters"`` or ``"_buffers"``.
    """

    module: int
    kind: str
    name: str


class _Places(NamedTuple):
    """Where a model without adapters to merge, and without FSDP1, has its tensors.

    :ivar form: of the modules and tensors for which this holds.
    :ivar base: the model without wrappers, as a position in ``model.modules()``.
    :ivar conversions: transformers' conversions of ``base`` for which this holds.
    :ivar places: of the tensors, by name.
    """

    form: object
    base: int
    conversions: object
    places: dict[str, _Place]


class _Memo:
    """Results of the last plan of a model; neither tensors nor modules, which may be
    freed meanwhile.

    :ivar arrangements: how the tensors of the checkpoint are made, and the key of
        names, dtypes and shapes for which that holds.
    """

    def __init__(self) -> None:
        """Begin without results."""
        self.arrangements: tuple[object, dict[str, Arrangement]] | None = None
        self.places: _Places | None = None


_memos: WeakKeyDictionary[nn.Module, _Memo] = WeakKeyDictionary()
"""For ``publish(hf(model))``, which makes a source at each step: of 272 tensors, a plan
takes 150 ms, and a comparison with the last one 5 ms."""


class Planner:
    """Makes a model's :class:`Plan` at each publish, as the model may have changed.

    Results that depend on the modules and tensors, or on names, shapes and dtypes
    alone, are cached.
    """

    def __init__(self, model: nn.Module, *, only: bool, frozen: bool) -> None:
        """Keep the model; results of the last planner of the same model are reused.

        :param only: plan the adapter alone. :param frozen: False: leave out tensors
            that are not trained.
        """
        self._model = model
        self._only = only
        self._frozen = frozen
        self._structure: _Structure | None = None
        self._memo = _Memo() if only else _memos.setdefault(model, _Memo())
        self._adapter: tuple[_Structure, Plan] | None = None
        self._base: Any = None
        self._kept: tuple[object, torch.dtype, frozenset[str]] | None = None

    def unwrapped_structure(self) -> _Structure:
        """Return the model without wrappers and adapters; cached while it is unchanged.

        Copies its modules, not its tensors. FSDP2 first frees what a forward has
        gathered.

        :raises replicas.errors.UsageError: the model, or its adapters, are of a kind
            that is not supported.
        """
        _reshard(self._model.modules())
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
        original = found.origins.get(id(base))
        self._structure = _Structure(signature, found.units, peft_model, merging, base, original, state, merged)
        return self._structure

    def plan(self) -> Plan:
        """Return the plan of the model in its current state; gather nothing.

        It is made of names, dtypes and shapes alone. FSDP2 first frees what a forward
        has gathered.

        :raises replicas.errors.UsageError: the model is of an unsupported kind.
        """
        if (known := self._known_plan()) is not None:
            return known
        structure = self.unwrapped_structure()
        if self._only:
            return self._adapter_plan(structure)
        rows, units = self._rows(structure), structure.units
        self._base = structure.base
        self._remember(structure)
        if self._memo.places is not None:
            self._structure = None  # it would keep tensors that the model may replace
        if units:  # FSDP1 gathers whole units, and needs the outermost first
            order = {id(module): number for number, module in enumerate(self._model.modules())}
            place = {
                name: order[id(units[id(one)].module)] for name, one in structure.state.items() if id(one) in units
            }
            rows = dict(sorted(rows.items(), key=lambda row: place.get(row[1].inputs[0], -1)))
        return Plan(rows, structure.state, units, structure.merging)

    def _known_plan(self) -> Plan | None:
        """Return the last plan, with the tensors that the model has now. FSDP2 first
        frees what a forward has gathered.

        Return None if there is none, or if the model's modules, or dtypes, shapes or
        ties of its tensors, have changed.
        """
        known, arrangements = self._memo.places, self._memo.arrangements
        if known is None or arrangements is None:
            return None
        modules = list(self._model.modules())
        _reshard(modules)
        if known.form != _form_of_all(modules):
            return None
        self._base = modules[known.base]
        if known.conversions != getattr(self._base, "_weight_conversions", None):
            return None
        state = {name: modules[at.module].__dict__[at.kind][at.name] for name, at in known.places.items()}
        return Plan(self._trained(arrangements[1], state, ()), state, {}, None)

    def _remember(self, structure: _Structure) -> None:
        """Store in which modules of the model the tensors of its plan are: the next
        publish can then reuse the plan (:meth:`_known_plan`).

        Store nothing, and drop an older entry, if some of the tensors are not in the
        model's own modules, as with adapters or FSDP1.

        :param structure: the model without wrappers, with its tensors by name.
        """
        self._memo.places = None
        modules = list(self._model.modules())
        places = {id(tensor): place for place, tensor in _places(modules)}
        if structure.merging is None and all(id(one) in places for one in structure.state.values()):
            base = structure.base
            self._memo.places = _Places(
                _form_of_all(modules),
                next(number for number, one in enumerate(modules) if one is structure.original),
                getattr(base, "_weight_conversions", None),
                {name: places[id(tensor)] for name, tensor in structure.state.items()},
            )

    def _adapter_plan(self, structure: _Structure) -> Plan:
        """Return the plan of the adapter alone; cached for the same structure.

        PEFT is asked once: it may look for the base model's configuration on the Hub.
        """
        if self._adapter is None or self._adapter[0] is not structure:
            state = adapter_tensors(structure.peft_model, structure.state)
            forms = {name: _whole_form(tensor) for name, tensor in state.items()}
            plan = Plan(record(dict, forms), state, {}, None)
            if not {id(tensor) for tensor in state.values()} <= {id(tensor) for tensor in structure.state.values()}:
                return plan  # new tensors, e.g. a computed prompt: not cached
            self._adapter = structure, plan
        return self._adapter[1]

    def kept_in_float32(self, dtype: torch.dtype) -> frozenset[str]:
        """Return the names of the last plan's tensors that stay in float32 when the
        model is cast to ``dtype``; empty before a plan, or for a model not of
        transformers."""
        base, known = self._base, self._memo.arrangements
        if known is None or base is None or not saving.is_pretrained(base):
            return frozenset()
        rows = known[1]
        if self._kept is None or self._kept[0] is not rows or self._kept[1] != dtype:
            used = {name for row in rows.values() for name in row.inputs}
            kept = saving.kept_names(base, used, dtype)
            names = frozenset(name for name, row in rows.items() if not kept.isdisjoint(row.inputs))
            self._kept = rows, dtype, names
        return self._kept[2]

    def _rows(self, structure: _Structure) -> dict[str, Arrangement]:
        """Return how each tensor of the checkpoint is made, by its name there; cached.

        Tensors that are made of frozen ones only are left out with ``frozen=False``.
        """
        base, state, merging = structure.base, structure.state, structure.merging
        pretrained = saving.is_pretrained(base)
        names = saving.saved_names(base, state, _ties(state)) if pretrained else list(state)
        forms = {
            name: structure.merged[name] if name in structure.merged else _whole_form(state[name]) for name in names
        }
        key = type(base), getattr(base, "_weight_conversions", None), tuple(state), forms
        known = self._memo.arrangements
        if known is None or known[0] != key:
            if pretrained:
                saving.check(base, state)
            rows = saving.arrangements(base, forms) if pretrained else record(dict, forms)
            known = self._memo.arrangements = key, rows
        return self._trained(known[1], state, () if merging is None else merging.origins)

    def _trained(
        self, rows: dict[str, Arrangement], state: Mapping[str, torch.Tensor], tuned: Container[str]
    ) -> dict[str, Arrangement]:
        """Return ``rows`` (how each tensor is made) or, with ``frozen=False``, those of
        them that are made of a tensor that is trained. Buffers count as trained.

        :param state: the tensors in memory. :param tuned: names of those that adapters
            change, which count as trained.
        """
        if self._frozen:
            return rows
        trained = {name for name, one in state.items() if name in tuned or _is_trained(one)}
        return {name: row for name, row in rows.items() if not trained.isdisjoint(row.inputs)}


def _merged_forms(merging: Merging) -> dict[str, Form]:
    """Return dtype and shape of each tensor that a merge changes, by name.

    Merges zeros once for each kind of layer, and no tensor of the model.
    """
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


def _reshard(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 free the parameters that a forward has gathered, as ``state_dict()``
    does.

    They may have been cast. Other modules are left alone.
    """
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for module in modules if fsdp is not None else ():
        if isinstance(module, fsdp):
            module.reshard()


def _signature(model: nn.Module) -> list[object]:
    """Return a list that is equal while the model's structure is unchanged: ids of its
    modules and tensors, with dtypes, and the active adapters."""
    found: list[object] = []
    for module in model.modules():
        inside = module.__dict__
        found.append(id(module))
        for tensor in (*inside["_parameters"].values(), *inside["_buffers"].values()):
            found += (id(tensor), tensor if tensor is None else tensor.dtype)
        if (active := inside.get("_active_adapter")) is not None:
            found.append(str(active))
    return found


def _places(modules: list[nn.Module]) -> Iterator[tuple[_Place, torch.Tensor | None]]:
    """Yield (place, tensor) of each parameter and buffer of these modules.

    A place is a module's index in ``modules``, ``"_parameters"`` or ``"_buffers"``, and
    the name in that module. A tensor that several places share comes once for each. It
    is None where the module has registered None, as for a missing bias.

    :param modules: all modules, as of ``model.modules()``: submodules are not walked.
    """
    for number, module in enumerate(modules):
        for kind in ("_parameters", "_buffers"):
            for name, tensor in module.__dict__[kind].items():
                yield _Place(number, kind, name), tensor


def _form_of_all(modules: list[nn.Module]) -> list[object]:
    """Return a list to compare: equal for models of the same form.

    They have modules of the same kinds and names, and tensors of the same dtypes and
    shapes that are tied alike.

    :param modules: all modules of the model, as of ``model.modules()``.
    """
    first: dict[object, int] = {}
    found: list[object] = []
    for module in modules:
        inside = module.__dict__
        found += (type(module), *inside["_modules"], frozenset(inside["_non_persistent_buffers_set"]))
    for place, tensor in _places(modules):
        found.append(place)
        if tensor is not None:
            form = _whole_form(tensor)
            tie = first.setdefault(memory_of(tensor), len(found))
            found += (is_whole(tensor), form.dtype, form.shape, form.strides, tie)
    return found


def _whole_form(tensor: torch.Tensor) -> Form:
    """Return dtype, shape and strides of the whole tensor, of which this may be a
    shard."""
    if is_whole(tensor):
        return Form.of(tensor)
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Form.of(torch.empty(shape, dtype=tensor.dtype, device="meta"))


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Return new zeros of the whole tensor's shape and dtype, on the device of its
    local part."""
    form = _whole_form(tensor)
    device = "cpu" if tensor.is_meta else tensor.device
    zeros = torch.zeros(form.shape, dtype=form.dtype, device=device)
    return nn.Parameter(zeros, requires_grad=False) if isinstance(tensor, nn.Parameter) else zeros


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name, not detached, also those of
    submodules. A tensor that is tied comes under each of its names.

    Other state of a module, which is not a tensor, is left out.
    """
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def _ties(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the lists of names that share one tensor, each of two names or more."""
    names: dict[object, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[memory_of(tensor)].append(name)
    return [one for one in names.values() if len(one) > 1]


def _is_trained(tensor: torch.Tensor) -> bool:
    """Return True for a parameter that is trained, and for every buffer."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _refuse_model_inside(module: nn.Module) -> None:
    """Raise UsageError if a module inside ``module`` is a model of transformers or
    PEFT, whose names in the checkpoint would then get a prefix."""
    for path, inner in module.named_modules():
        if saving.is_pretrained(inner) or (path and find_peft_model(inner) is not None):
            text = f"hf: the {type(module).__name__} holds a {type(inner).__name__} as .{path}, and would name its tensors so"
            raise errors.UsageError(text, hint=f"pass the model itself: hf(module.{path})")

"""Hugging Face models, wrapped or sharded by any trainer, as a stream of checkpoint
tensors.

An inference engine loads a version by the names of the model's checkpoint. A trainer
has the same tensors under other names (wrappers add prefixes), in parts (FSDP, ZeRO-3),
or not at all (a LoRA adapter is to be added to the layer below it). :func:`hf` gives
them back one by one, gathered and merged one by one, so that no second model is ever in
memory.

========================= ==========================================================
model                     how a parameter becomes whole
========================= ==========================================================
plain, DDP, torch.compile it is
FSDP2 (DTensor)           ``publish`` gathers it, or with ``ranks = "all"`` its shards
FSDP1                     ``summon_full_params`` of one wrapped module at a time
ZeRO-3                    ``deepspeed.zero.GatheredParameters`` of one parameter
PEFT, ``merged``          each tuned layer merges, is copied, gets its bytes back
PEFT, ``only``            the adapter's own tensors, under PEFT's names
========================= ==========================================================

A merge and its reverse in bfloat16 do not give the same base weights back; a training
run that merges at each step drifts. So the base weight's bytes are put back, exactly.

Gathers are collectives: every rank of the trainer must walk the source, in the same
order. A gather that runs on another CUDA stream than the caller's (FSDP1's) leaves
tensors that the caller's stream may overwrite too early; pass ``sync="device"`` then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from replicas import errors

__all__ = ["HfSource", "hf"]

_INNER = ("module", "_orig_mod", "_fsdp_wrapped_module")
"""Where DDP, torch.compile and FSDP1 keep the model that they wrap."""
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class _Row(NamedTuple):
    name: str
    parameter: torch.nn.Parameter
    layer: Any
    """The PEFT layer that is merged around the read; None: nothing is to be merged."""


def hf(
    model: torch.nn.Module,
    *,
    adapter: Literal["merged", "only"] = "merged",
    frozen: bool = True,
    sync: Literal["none", "device"] = "none",
) -> HfSource:
    """The weights of a Hugging Face model under the names of its checkpoint.

    Pass the result to :meth:`replicas.Channel.publish` at each step, on every rank that
    holds a part of the model; it may be kept and published again.

    :param model: a ``transformers`` model, plain or wrapped by DDP, FSDP1, FSDP2,
        ZeRO-3, ``torch.compile`` or PEFT, or several of them. Tied weights come once,
        under the name that comes first.
    :param adapter: of a PEFT model: ``"merged"``, the base model with the active
        adapters added to it, or ``"only"``, the adapters' own tensors.
    :param frozen: False: leave out parameters that are not trained. Servers must keep
        theirs then (``--partial``).
    :param sync: ``"device"``: wait for the device before each gathered tensor is
        handed out; default: gathers are on the current stream.
    :raises replicas.errors.UsageError: ``adapter="only"`` of a model without adapters,
        or an argument is not one of these.
    """
    return HfSource(model, adapter, frozen, sync)


class HfSource:
    """What :func:`hf` returns: an iterable of (name, tensor) with ``metadata()``."""

    def __init__(self, model: torch.nn.Module, adapter: str, frozen: bool, sync: str) -> None:
        if adapter not in ("merged", "only"):
            raise errors.UsageError(f"hf: adapter={adapter!r}", hint='pass "merged" or "only"')
        if sync not in ("none", "device"):
            raise errors.UsageError(f"hf: sync={sync!r}", hint='pass "none" or "device"')
        self._model = model
        self._frozen = frozen
        self._only = adapter == "only"
        self._sync = sync == "device"
        if self._only and _peft_model(model) is None:
            raise errors.UsageError("hf: this model has no adapter", hint='pass adapter="merged", or a PEFT model')

    @property
    def adapter_config(self) -> str:
        """Configuration of the adapter, as PEFT saves it (JSON), for
        ``publish(..., adapter=)``.

        :raises AttributeError: the source is not ``adapter="only"``, or several
            adapters are active.
        """
        peft = _peft_model(self._model)
        if not self._only or len(peft.active_adapters) != 1:
            raise AttributeError("adapter_config")
        found = peft.peft_config[peft.active_adapters[0]].to_dict()
        return json.dumps({**found, "inference_mode": True}, default=sorted)

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor in order, from the ranks' own parts: no
        communication."""
        units = _fsdp1_units(self._model)
        if units:
            return [row for unit in units for row in _fsdp1_metadata(unit)]
        return [(row.name, row.parameter.dtype, _whole_shape(row.parameter)) for row in self._rows()]

    def resident(self) -> dict[str, torch.Tensor] | None:
        """All tensors by name, if none must be gathered or merged: then ``publish``
        copies them at once. Else None."""
        if _fsdp1_units(self._model):
            return None
        rows = list(self._rows())
        if any(
            type(row.parameter.data) is not torch.Tensor or hasattr(row.parameter, "ds_id") or _is_to_merge(row)
            for row in rows
        ):
            return None
        return {row.name: row.parameter.detach() for row in rows}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        units = _fsdp1_units(self._model)
        pairs = (pair for unit in units for pair in _fsdp1_tensors(unit)) if units else self._tensors()
        for name, tensor in pairs:
            if self._sync and tensor.device.type != "cpu":
                torch.accelerator.synchronize(tensor.device)
            yield name, tensor

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for row in self._rows():
            with _gathered(row) as tensor:
                yield row.name, tensor

    def _rows(self) -> Iterator[_Row]:
        """One row for each tensor. (The layers that FSDP1 has flattened are walked
        otherwise.)"""
        return self._adapter_rows() if self._only else self._model_rows()

    def _model_rows(self) -> Iterator[_Row]:
        tuned = _tuned_layers(self._model)
        peft = _peft_model(self._model)
        prefix = getattr(getattr(peft, "base_model", None), "prefix", None) if peft is not None else None
        for name, parameter in self._model.named_parameters():
            plain = _checkpoint_name(name)
            if prefix is not None and (prefix in plain or "original_module" in plain):
                continue
            layer = tuned.get(id(parameter))
            if not self._frozen and not parameter.requires_grad and layer is None:
                continue
            plain = plain.removeprefix("base_model.model.").replace(".base_layer", "")
            yield _Row(_without_saved_module(plain), parameter, layer)

    def _adapter_rows(self) -> Iterator[_Row]:
        peft = _peft_model(self._model)
        prefix = peft.base_model.prefix
        for name, parameter in self._model.named_parameters():
            plain = _checkpoint_name(name)
            if prefix in plain or "modules_to_save" in plain:
                yield _Row(_without_adapter_name(plain, peft.active_adapters), parameter, None)


def _checkpoint_name(name: str) -> str:
    name = name.removeprefix("module.")
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _without_saved_module(name: str) -> str:
    head, found, rest = name.partition(".modules_to_save.")
    return f"{head}.{rest.partition('.')[2]}" if found else name


def _without_adapter_name(name: str, adapters: list[str]) -> str:
    for adapter in adapters:
        name = name.replace(f".{adapter}.", ".")
    return name


def _peft_model(model: torch.nn.Module) -> Any:
    """The PEFT model within the wrappers; None: there is none."""
    inner: Any = model
    while inner is not None:
        if hasattr(inner, "peft_config") and hasattr(inner, "active_adapters"):
            return inner
        inner = next(
            (found for name in _INNER if isinstance(found := getattr(inner, name, None), torch.nn.Module)), None
        )
    return None


def _tuned_layers(model: torch.nn.Module) -> dict[int, Any]:
    """PEFT's layers by the id of the base weight that they change when merged."""
    if _peft_model(model) is None:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return {id(parameter): layer for layer in layers for parameter in layer.get_base_layer().parameters(recurse=False)}


def _fsdp1_units(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Name and module of each unit that FSDP1 has flattened, in the model's order."""
    return [
        (_checkpoint_name(f"{name}." if name else ""), module)
        for name, module in model.named_modules()
        if type(module).__name__ == "FullyShardedDataParallel" and getattr(module, "_handle", None) is not None
    ]


def _fsdp1_metadata(unit: tuple[str, Any]) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    prefix, flat = unit[0], unit[1]._handle.flat_param
    for name, shape in zip(flat._fqns, flat._shapes, strict=True):
        yield prefix + _checkpoint_name(name), flat.dtype, tuple(shape)


def _fsdp1_tensors(unit: tuple[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole parameters of one unit, in the order of its metadata; a collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    prefix, module = unit
    with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
        whole = {_checkpoint_name(name): tensor for name, tensor in module.named_parameters()}
        for name in module._handle.flat_param._fqns:
            yield prefix + _checkpoint_name(name), whole[_checkpoint_name(name)].detach()


def _is_to_merge(row: _Row) -> bool:
    return row.layer is not None and not row.layer.merged and not row.layer.disable_adapters


def _whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextlib.contextmanager
def _gathered(row: _Row) -> Iterator[torch.Tensor]:
    """The parameter as one tensor (of FSDP2: the DTensor, which publish gathers)."""
    parameter = row.parameter
    if hasattr(parameter, "ds_id"):
        import deepspeed

        tuned = [] if row.layer is None else [p for p in row.layer.parameters() if p is not parameter]
        with deepspeed.zero.GatheredParameters([parameter, *tuned]), _merged(row) as tensor:
            yield tensor
        return
    with _merged(row) as tensor:
        yield tensor


@contextlib.contextmanager
def _merged(row: _Row) -> Iterator[torch.Tensor]:
    """The parameter with the adapters of its layer added; afterwards it is as
    before."""
    parameter, layer = row.parameter, row.layer
    if not _is_to_merge(row):
        yield parameter.detach()
        return
    saved = parameter.detach().clone()
    layer.merge()
    try:
        merged = parameter.detach().clone()
    finally:
        layer.unmerge()
        with torch.no_grad():
            parameter.copy_(saved)
    yield merged

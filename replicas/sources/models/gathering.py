"""Gather and merge the tensors of a model, one after the other.

A whole tensor stays in memory from the first row of a plan that needs it to the last.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, cast

import torch
from torch import nn

from replicas.sources.models.plan import Plan
from replicas.sources.models.recording import Arrangement
from replicas.sources.models.unwrapping import Unit
from replicas.weights.copies.tensors import is_dtensor

__all__ = ["WholeTensors"]


class WholeTensors:
    """Context manager: makes a checkpoint's tensors by its plan, one after the other.

    It gathers the tensors in memory on demand, and releases them.
    """

    def __init__(self, plan: Plan) -> None:
        """Begin with nothing gathered; count the rows that need each of the model's
        tensors, to release it after the last of them.

        :param plan: its rows (how tensors of the checkpoint are made) are requested in
            order.
        """
        self._plan = plan
        self._left = Counter(key for row in plan.rows.values() for key in self._keys(row))
        self._open: dict[object, tuple[contextlib.ExitStack, dict[str, torch.Tensor]]] = {}

    def __enter__(self) -> WholeTensors:
        """Return this object; nothing is gathered yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release all tensors that are still gathered, also after an error."""
        with contextlib.ExitStack() as all_of_them:
            for stack, _tensors in self._open.values():
                all_of_them.push(stack)
            self._open.clear()

    def tensor_of(self, row: Arrangement) -> torch.Tensor:
        """Return the tensor of a row. Gather or merge its inputs first, which is a
        collective, unless an earlier row has done so.

        Under FSDP2 return the DTensor itself, if the row is all of it. Other results
        may be views of the model or of gathered memory, valid until
        :meth:`release_after`.
        """
        name = row.inputs[0]
        if row.same and self._unit(name) is None and not self._is_merged(name):
            tensor = self._plan.state[name].detach()
            if not hasattr(self._plan.state[name], "ds_id"):
                return tensor
        return row.apply({name: self._whole(name) for name in row.inputs})

    def release_after(self, row: Arrangement) -> None:
        """Free the gathered tensors that no later row needs.

        Call it once for each row.
        """
        for key in self._keys(row):
            self._left[key] -= 1
            if not self._left[key] and key in self._open:
                self._open.pop(key)[0].close()

    def _keys(self, row: Arrangement) -> dict[object, None]:
        """Return the keys, each once, under which a row's inputs are gathered
        (:meth:`_key`)."""
        return dict.fromkeys(map(self._key, row.inputs))

    def _key(self, name: str) -> object:
        """Return a key of the tensor: tensors with equal keys are gathered or merged
        together."""
        unit = self._unit(name)
        if self._is_merged(name):
            return self._plan.merging.origins[name][0]  # type: ignore[union-attr]  # it is merged
        return name if unit is None else id(unit.module)

    def _is_merged(self, name: str) -> bool:
        """Return True if the merge of an adapter changes the tensor in memory called
        ``name``."""
        return self._plan.merging is not None and name in self._plan.merging.origins

    def _unit(self, name: str) -> Unit | None:
        """Return FSDP1's wrapper and name of a flattened tensor, or None if it is not
        one."""
        return self._plan.units.get(id(self._plan.state[name]))

    def _whole(self, name: str) -> torch.Tensor:
        """Return the whole tensor of this name.

        If it is not there yet, gather or merge first all tensors that share its key
        (a collective), and keep them until :meth:`release_after`.
        """
        key = self._key(name)
        if key not in self._open:
            with contextlib.ExitStack() as stack:
                tensors = self._opened(name, stack)
                self._open[key] = stack.pop_all(), tensors
        unit = self._unit(name)
        inner = name if unit is None else unit.name
        if self._is_merged(name):
            inner = self._plan.merging.origins[name][1]  # type: ignore[union-attr]  # it is merged
        return self._open[key][1][inner]

    def _opened(self, name: str, stack: contextlib.ExitStack) -> dict[str, torch.Tensor]:
        """Gather or merge all tensors that have the same key as ``name`` (a
        collective).

        Return them by their names in FSDP1's unit, or by those that the merge gives.

        :param stack: gets the contexts that release the tensors.
        """
        tensor, unit, merging = self._plan.state[name], self._unit(name), self._plan.merging
        if merging is not None and name in merging.origins:
            group = merging.origins[name][0]
            with _gathered(merging.tensors(group)):
                return merging.merge(group, _private)
        if unit is not None:
            from torch.distributed.fsdp import FullyShardedDataParallel

            stack.enter_context(
                FullyShardedDataParallel.summon_full_params(unit.module, recurse=False, writeback=False)
            )
            return {_clean(inner): value.detach() for inner, value in unit.module.named_parameters()}
        stack.enter_context(_gathered([tensor]))
        return {name: _full(tensor)}


def _clean(name: str) -> str:
    """Return a parameter's name without the parts that FSDP1's wrappers add."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    return clean_tensor_name(name)


def _gathered(tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[object]:
    """Return a context manager in whose block the tensors of ZeRO-3 are whole.

    Entering it is a collective, unless none of these ``tensors`` is sharded by ZeRO-3.
    """
    sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    return cast("contextlib.AbstractContextManager[object]", deepspeed.zero.GatheredParameters(sharded))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, detached; gather a DTensor (a collective).

    Any other tensor shares its memory with the result.
    """
    given: Any = tensor.detach()
    return cast("torch.Tensor", given.full_tensor()) if is_dtensor(tensor) else given


def _private(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new whole copy that a merge may write to.

    Gather a DTensor (a collective).
    """
    whole = _full(tensor).clone()
    return nn.Parameter(whole, requires_grad=False) if isinstance(tensor, nn.Parameter) else whole

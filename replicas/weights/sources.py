"""The accepted forms of weights, each as one stream of names and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from replicas.errors import ManifestMismatch
from replicas.messages.bounds import plain, shown
from replicas.weights.dtensor import is_dtensor

__all__ = ["Declared", "Ties", "can_be_walked", "declared", "known_values", "streamed_values", "unwrapped"]

Declared = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor before it is produced."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel or torch.compile: unprefixed names."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def known_values(weights: object) -> dict[str, object] | None:
    """The values of a module (parameters, persistent buffers) or mapping; else None."""
    if isinstance(weights, torch.nn.Module):
        state = unwrapped(weights).state_dict(keep_vars=True)
        return {name: value for name, value in state.items() if name.rpartition(".")[2] != "_extra_state"}
    if isinstance(weights, Mapping):
        return dict(weights) if type(weights) is dict else dict(weights.items())
    return None


def can_be_walked(weights: object) -> bool:
    """Whether ``weights`` is a module, a mapping or another iterable but a tensor."""
    return isinstance(weights, (torch.nn.Module, Iterable)) and not isinstance(weights, torch.Tensor)


def streamed_values(weights: object) -> Iterator[tuple[str, object]]:
    """The pairs of an iterable, one by one."""
    return iter(cast("Iterable[tuple[str, object]]", weights))


def declared(weights: object) -> list[Declared] | None:
    """The rows of ``metadata()``: what the object's iteration will give; else None.

    ``metadata()`` gives a mapping of names to tensors (meta tensors will do) or
    ``(dtype, shape)``, or an iterable of ``(name, tensor)``, ``(name, dtype, shape)``
    or objects with these three as attributes (vLLM's ``ParamMeta``).
    """
    metadata = getattr(weights, "metadata", None)
    if isinstance(weights, (torch.nn.Module, Mapping)) or not callable(metadata):
        return None
    described: Any = metadata()
    rows = described.items() if isinstance(described, Mapping) else described
    return [_declared_row(row) for row in rows]


def _declared_row(row: object) -> Declared:
    match (row.name, row) if hasattr(row, "name") else tuple(row) if isinstance(row, Iterable) else ():
        case (
            (str(name), torch.dtype() as dtype, shape)
            | (str(name), (torch.dtype() as dtype, shape))
            | (str(name), object(dtype=torch.dtype() as dtype, shape=shape))
        ):
            return plain(name), dtype, tuple(int(extent) for extent in shape)
        case _:
            raise ManifestMismatch(
                f"metadata() gave {shown(row)}",
                hint="give a mapping of names to (dtype, shape), or rows with name, dtype and shape",
            )


class Ties:
    """Finds tensors that share one storage.

    Only for values that all exist at once: a stream may reuse memory.
    """

    def __init__(self) -> None:
        self._first: dict[object, str] = {}

    def alias(self, name: str, value: object) -> str | None:
        """The first name of this same tensor, if it came before; equal on all ranks."""
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            return None
        if is_dtensor(value):
            key = (tuple(value.shape), str(value.placements), self._key(value.to_local()))
        elif value.numel() and value.layout is torch.strided and not value.is_meta:
            key = ((), "", self._key(value))
        else:
            return None
        first = self._first.setdefault(key, name)
        return first if first != name else None

    @staticmethod
    def _key(tensor: torch.Tensor) -> object:
        # The storage object, not its address: a rank whose shard is empty must see the
        # tie, too.
        storage = tensor.untyped_storage()._cdata
        lazy = tensor.is_conj(), tensor.is_neg()
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazy

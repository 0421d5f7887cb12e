"""Copy the module tree of a model, not its tensors, and leave out the wrappers.

:func:`unwrap` leaves out DistributedDataParallel, ``torch.compile``, activation
    checkpointing, FSDP1 and DeepSpeed's engine; under FSDP2 a module gets its original
    class back. So names, class and attributes of the copy are those of the model before
    it was wrapped, and a function that replaces modules (``unload`` of PEFT) changes
    the copy alone.

A parameter that FSDP1 has flattened has no tensor of its own until its unit is
gathered: a meta tensor of its shape stands in for it, and :class:`Unwrapped` keeps the
unit.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from replicas.weights.copies.tensors import is_dtensor

__all__ = ["Unit", "Unwrapped", "copy_modules", "is_whole", "memory_of", "unwrap"]

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)
"""Not copied: hooks are bound to the module for which they were registered."""


_CONTAINERS = (dict, OrderedDict, list, set)
_WRAPPERS = (
    ("torch.nn", "DataParallel", "module"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch._dynamo", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
    ("deepspeed", "DeepSpeedEngine", "module"),
)
"""Classes that wrap a module, and the attribute that has it."""


class Unit(NamedTuple):
    """Where to find a parameter that FSDP1 has flattened.

    :ivar module: the wrapper. :ivar name: of the parameter within the wrapped module.
    """

    module: Any
    name: str


class Unwrapped(NamedTuple):
    """A model without its wrappers.

    :ivar module: the copy of its module tree.
    :ivar origins: the model's own modules, by the id of their copy.
    :ivar units: FSDP1's parameters, by the id of the meta tensor that stands in.
    """

    module: Any
    origins: dict[int, nn.Module]
    units: dict[int, Unit]


def unwrap(model: nn.Module) -> Unwrapped:
    """Copy the module tree of ``model`` without wrappers and hooks; tensors are
    shared."""
    found = Unwrapped(None, {}, {})
    module = _Copier(found, lambda tensor: tensor).copy(model)
    return found._replace(module=module)


def copy_modules(module: nn.Module, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a module tree without wrappers and hooks; return the copied root.

    A tensor that is shared in ``module`` is shared in the copy.

    :param tensor: returns the parameter or buffer to use in place of the given one.
    """
    return _Copier(Unwrapped(None, {}, {}), tensor).copy(module)


class _Copier:
    """Copies one module tree; shared modules and tied tensors stay shared."""

    def __init__(self, found: Unwrapped, tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Begin with nothing copied.

        :param found: filled with the original of each copied module, and the parameters
            that FSDP1 has flattened.
        :param tensor: called once for each tensor; returns what replaces it in the
            copy.
        """
        self._found = found
        self._tensor = tensor
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[object, torch.Tensor] = {}

    def copy(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module, without wrappers.

        The first call for a module copies it with all modules below it; later calls
        return the same copy.
        """
        inner = _wrapped(module)
        if inner is not None:
            made = self.copy(inner)
            if getattr(module, "_handle", None) is not None:
                self._place_flat(module, made)
            return made
        if id(module) not in self._modules:
            made = self._modules[id(module)] = object.__new__(_own_class(type(module)))
            self._found.origins[id(made)] = module
            self._fill(made, module)
        return self._modules[id(module)]

    def _fill(self, made: nn.Module, module: nn.Module) -> None:
        """Give the copy ``made`` the attributes of ``module``, except hooks.

        Its tensors and submodules are copied, too.
        """
        for name, value in module.__dict__.items():
            # what a method of the copy adds to a container must not change the model's
            made.__dict__[name] = value.copy() if type(value) in _CONTAINERS else value
        for name in ("_parameters", "_buffers", "_modules"):
            made.__dict__[name] = {}  # ZeRO-3's own kind of dict belongs to its module
        for name in _HOOKS:
            made.__dict__[name].clear()
        made._parameters.update({name: self._copy_tensor(value) for name, value in module._parameters.items()})
        made._buffers.update({name: self._copy_tensor(value) for name, value in module._buffers.items()})
        made._modules.update(
            {name: None if value is None else self.copy(value) for name, value in module._modules.items()}
        )

    def _copy_tensor(self, value: Any) -> Any:
        """Return the copy of a tensor, the same one for all tied tensors; None if given
        None."""
        if value is None:
            return None
        key = memory_of(value)
        if key not in self._tensors:
            self._tensors[key] = self._tensor(value)
        return self._tensors[key]

    def _place_flat(self, wrapper: Any, made: nn.Module) -> None:
        """In the copy, put meta tensors in place of the parameters that FSDP1 has
        flattened, and record their units.

        :param wrapper: FSDP1's wrapper. :param made: the copy of the module inside it.
        """
        flat = wrapper._handle.flat_param
        for name in [name for name, one in made._parameters.items() if one is flat]:
            del made._parameters[name]
        for name, shape in zip(flat._fqns, flat._shapes, strict=True):
            stand_in = nn.Parameter(torch.empty(shape, dtype=flat.dtype, device="meta"), flat.requires_grad)
            self._found.units[id(stand_in)] = Unit(wrapper, name)
            _set(made, name, stand_in)
        for name, owner, _, first, first_owner, _ in flat._shared_param_infos:
            stand_in = self._modules[id(first_owner)]._parameters[first]  # type: ignore[assignment]
            self._modules[id(owner)]._parameters[name] = stand_in


def is_whole(tensor: torch.Tensor) -> bool:
    """Return True if the tensor is not a shard: neither a DTensor nor ZeRO-3's."""
    return not is_dtensor(tensor) and not hasattr(tensor, "ds_id")


def memory_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tied tensors: views of the same memory with the
    same shape, strides and dtype."""
    if not is_whole(tensor) or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return id(tensor)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the parameter of a dotted ``name`` below ``module``, in place."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._parameters[last] = parameter


def _wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper such as DDP, FSDP1 or ``torch.compile``.
    Return None if ``module`` is not a wrapper."""
    for library, name, attribute in _WRAPPERS:
        kind = getattr(sys.modules.get(library), name, None)  # None if not imported
        if kind is not None and isinstance(module, kind):
            return getattr(module, attribute)  # type: ignore[no-any-return]
    return None


def _own_class(kind: type) -> type:
    """Return the class ``kind`` itself, or the original from which FSDP2 derived it."""
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind if fsdp is None else next(base for base in kind.__mro__ if not issubclass(base, fsdp))

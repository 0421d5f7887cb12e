"""Record how a function rearranges tensors, and replay it on other tensors, one at a
time.

Theory of operation
===================

transformers converts a whole ``state_dict`` in one call (``revert_weight_conversion``).
:func:`record` makes that call once on meta tensors, which have shapes and no memory,
and records each operation of torch. The outcome is one :class:`Arrangement` for each
tensor that the call returns:

- a *view*, if the result is a part of one input in place: only its sizes, strides and
  offset are kept. (An operation that only copies, such as ``contiguous()``, is left
  out.)
- a *computation*: the operations that lead from the inputs to the result.

So a tensor of a checkpoint is made of its inputs alone, without a second model. A view
can be written through: data copied into it lands in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from replicas import errors

__all__ = ["Arrangement", "Form", "record"]

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operations that return a tensor with the values of their first argument."""
_IN_MEMORY = "publish(model) sends it under the names that it has in memory"
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""These return a view of a contiguous copy, but may fail on its original: reshape
then."""


@dataclass(frozen=True)
class Form:
    """Dtype, shape and strides of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of this tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    def meta(self) -> torch.Tensor:
        """Return a new meta tensor (without memory) of this dtype, shape and
        strides."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True, eq=False)
class _Step:
    """An operation, and the index of the result that is meant (None: its only one)."""

    operation: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    result: int | None


@dataclass(frozen=True, eq=False)
class Arrangement:
    """How one tensor is made of others.

    :ivar inputs: names of the tensors from which it is made.
    :ivar form: dtype and shape of the result.
    :ivar offset: of a view: its first element, counted from that of its only input, in
        elements; its strides are those of ``form``. None: a computation.
    :ivar same: whether the result is its only input, unchanged.
    """

    inputs: tuple[str, ...]
    form: Form
    offset: int | None
    same: bool
    _strides: tuple[int, ...]
    """Of the first input."""
    _step: _Step | str

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor: the input itself or a view of it where that is possible,
        else the result of the recorded operations, replayed.

        :param tensors: the inputs by name: whole tensors of any strides.
        """
        first = tensors[self.inputs[0]]
        if self.same:
            return first
        if self.offset is not None and first.stride() == self._strides:
            return first.as_strided(self.form.shape, self.form.strides, first.storage_offset() + self.offset)
        made: torch.Tensor = _replayed(self._step, tensors, {})
        return made


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Records the operations of torch in the block, by the tensors that they return."""

    def __init__(self) -> None:
        """Begin without steps; recording begins with the ``with`` block."""
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.steps: dict[int, _Step | str] = {}
        """The step that made each tensor, by its id; a text is the name of an input."""
        self._alive: list[object] = []

    def name(self, tensor: torch.Tensor, step: _Step | str) -> None:
        """Record that ``step`` made a tensor, unless a step is recorded for it already.

        The tensor is kept alive, as its id is unique only while it lives.

        :param step: an operation, or the name of an input.
        """
        self.steps.setdefault(id(tensor), step)
        self._alive.append(tensor)  # its id is unique only while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of torch, record it and return its result; torch calls it.

        :raises replicas.errors.UsageError: the operation writes in place.
        """
        # a replay runs on the device of its tensors
        options = {name: one for name, one in (kwargs or {}).items() if name != "device" or str(one) != "meta"}
        if func._schema.is_mutable:
            raise errors.UsageError(
                f"the conversion of this model writes in place ({func}), which is not supported", hint=_IN_MEMORY
            )
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) not in self.steps and not args[0].is_meta:
            self.name(found, _Step(_COPIES[0], (args[0],), {}, None))  # a constant, e.g. indices
            return found
        given, named = tree_map_only(torch.Tensor, self._taken, (args, options))
        for number, tensor in enumerate(found if isinstance(found, (tuple, list)) else ()):
            self.name(tensor, _Step(func, given, named, number))
        if isinstance(found, torch.Tensor):
            self.name(found, _Step(func, given, named, None))
        return found

    def _taken(self, tensor: torch.Tensor) -> object:
        """Return what replaces a tensor in the recorded arguments of a step.

        It is a reference to the step that made the tensor, or a constant: the tensor
        itself.

        :raises replicas.errors.UsageError: the constant is a meta tensor, without
            values.
        """
        if id(tensor) in self.steps:
            return _StepResult(self.steps[id(tensor)])
        if tensor.is_meta:  # e.g. made of a list of indices, whose values are lost
            text = "the conversion of this model computes with constants on the device of its tensors"
            raise errors.UsageError(f"{text}, which is not supported", hint=_IN_MEMORY)
        return tensor


@dataclass(frozen=True, eq=False)
class _StepResult:
    """Stands in the arguments of a step for the tensor that another step made."""

    step: _Step | str


def record(
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]], given: Mapping[str, Form]
) -> dict[str, Arrangement]:
    """Run ``convert`` once on meta tensors; return how it makes each tensor, by name.

    :param given: forms of the tensors that ``convert`` gets.
    :raises replicas.errors.UsageError: ``convert`` writes in place, or a result is not
        made of the given tensors.
    """
    recorder = _Recorder()
    metas = {name: form.meta() for name, form in given.items()}
    for name, tensor in metas.items():
        recorder.name(tensor, name)
    with recorder:
        found = dict(convert(dict(metas)))
    storages = {tensor.untyped_storage()._cdata: name for name, tensor in metas.items()}
    known: dict[int, Any] = {}
    return {
        name: _arranged(recorder.steps[id(tensor)], metas, storages, known)
        if id(tensor) in recorder.steps
        else _raise_not_made(name)
        for name, tensor in found.items()
    }


def _raise_not_made(name: str) -> Arrangement:
    """Raise UsageError, always: the conversion's result ``name`` is not made of the
    given tensors. The declared result only lets it stand where a value is needed."""
    raise errors.UsageError(
        f"the conversion of this model returns {name!r}, which is not made of its tensors", hint=_IN_MEMORY
    )


def _arranged(
    step: _Step | str, metas: Mapping[str, torch.Tensor], storages: Mapping[int, str], known: dict[int, Any]
) -> Arrangement:
    """Return how a step's result is made: as a view of one input, or by replayed steps.

    :param metas: the inputs by name, meta tensors on which the step is replayed.
    :param storages: names of the inputs by the address of their storage, from which a
        view of an input is recognised.
    :param known: results so far by operation; new ones are added.
    :raises replicas.errors.UsageError: the result is not made of the given tensors.
    """
    inputs = tuple(dict.fromkeys(_inputs(step)))
    if not inputs:
        raise errors.UsageError(
            "the conversion of this model returns a tensor that is not made of its tensors", hint=_IN_MEMORY
        )
    result = _replayed(step, metas, known)
    form = Form.of(result)
    view = (
        len(inputs) == 1
        and result.dtype == metas[inputs[0]].dtype
        and storages.get(result.untyped_storage()._cdata) == inputs[0]
    )
    same = view and form == Form.of(metas[inputs[0]])
    offset = result.storage_offset() if view else None
    return Arrangement(inputs, form, offset, same, metas[inputs[0]].stride(), step)


def _inputs(step: _Step | str) -> list[str]:
    """Return the names of the inputs from which a step's result is made, maybe
    repeated.

    :param step: an operation, or the name of an input itself.
    """
    if isinstance(step, str):
        return [step]
    found: list[str] = []
    tree_map_only(_StepResult, lambda taken: found.extend(_inputs(taken.step)), (step.arguments, dict(step.options)))
    return found


def _replayed(step: _Step | str, tensors: Mapping[str, torch.Tensor], known: dict[int, Any]) -> Any:
    """Run a recorded step, and the steps before it, on other tensors.

    Return its result.

    :param step: an operation, or the name of an input.
    :param tensors: the inputs by name.
    :param known: results so far by operation; new ones are added.
    """
    if isinstance(step, str):
        return tensors[step]
    key = id(step.arguments)  # shared by the results of one operation
    if key not in known:
        take = lambda taken: _replayed(taken.step, tensors, known)  # noqa: E731
        arguments, options = tree_map_only(_StepResult, take, (step.arguments, dict(step.options)))
        if step.operation in _COPIES:
            known[key] = arguments[0]
        elif step.operation in _RESHAPES:
            known[key] = arguments[0].reshape(arguments[1])
        else:
            known[key] = step.operation(*arguments, **options)
    found = known[key]
    return found if step.result is None else found[step.result]

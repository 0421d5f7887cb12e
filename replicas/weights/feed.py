"""One pass over the user's weights; user errors are kept apart from library errors.

A pass may run collectives of the user's own group: a generator that gathers, or
``DTensor.full_tensor()`` here. So every rank must walk to the end, in the same order,
also when the library fails. A :class:`Feed` therefore tells two failures apart: after
an exception of the user's code nothing is left to walk; after an error of the library,
:meth:`Feed.drain` walks to the end and discards the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from replicas.core.versions.manifest import PartManifest, TensorSpec
from replicas.errors import ManifestMismatch, ReplicasError, UsageError
from replicas.messages import arguments
from replicas.messages.bounds import plain
from replicas.weights.dtensor import Box, is_dtensor, local_box
from replicas.weights.layout import Entry, layout
from replicas.weights.sources import Declared, Ties, can_be_walked, declared, known_values, streamed_values
from replicas.weights.streaming import Addresses
from replicas.weights.tensors import dtype_name, is_castable

__all__ = ["Feed", "Mode", "Shard", "Sources"]

Mode = Literal["image", "parts"]


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a tensor, for sources with ``ranks = "all"``.

    :param tensor: the local elements, a box of the global tensor; any dtype, strides
        and device.
    :param offsets: where the box starts, one number a dimension.
    :param shape: shape of the global tensor.
    :raises UsageError: the box does not lie in the tensor.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or is_lazy(self.tensor):
            raise UsageError(f"Shard: tensor must be a tensor that has a shape, not a {type(self.tensor).__name__}")
        object.__setattr__(self, "offsets", arguments.integers("Shard: offsets", self.offsets))
        object.__setattr__(self, "shape", arguments.integers("Shard: shape", self.shape))
        inside = len(self.offsets) == len(self.shape) == self.tensor.ndim and all(
            offset >= 0 and offset + extent <= limit
            for offset, extent, limit in zip(self.offsets, self.tensor.shape, self.shape, strict=True)
        )
        if not inside:
            raise UsageError(
                f"a Shard of shape {list(self.tensor.shape)} at offsets {list(self.offsets)} does not lie in a tensor "
                f"of shape {list(self.shape)}"
            )


@dataclass(frozen=True, eq=False)
class Sources:
    """The tensors to copy at once, in the order of their bytes.

    :ivar addresses: the start of each tensor's bytes, when all are contiguous and need
        no cast; None: some must be gathered or cast.
    """

    tensors: list[torch.Tensor]
    addresses: Addresses | None


class Feed:
    """Walks a set of weights once, in order.

    :param weights: a module, a mapping, an iterable of pairs, or an object with
        ``metadata()`` and iteration; values are Tensor, DTensor, :class:`Shard`, or
        None (skipped).
    :param dtype: cast plain floating tensors (float16, bfloat16, float32, float64) to
        this; others stay as they are.
    :param mode: ``"image"``: DTensors are gathered, Shards refused. ``"parts"``: the
        rank's own pieces, no communication.
    :ivar finished: the end was reached, or the user's code raised: there is nothing
        left to drain.
    :ivar user_failed: the user's own code raised. (The exception is not kept: its
        frames hold this feed, and slots.)
    :ivar device: device type of the tensors seen so far; ``"cpu"`` while all were on
        the CPU.
    :ivar sources: all tensors to copy, in the order of their bytes, when a
        :class:`~replicas.weights.packing.Packer` found that all exist already.
    """

    def __init__(self, weights: object, *, dtype: torch.dtype | None = None, mode: Mode = "image") -> None:
        self.mode: Mode = mode
        self.dtype: torch.dtype | None = None
        self.finished = False
        self.user_failed = False
        self.device = "cpu"
        self.sources: Sources | None = None
        self.weights = weights
        self._known: dict[str, object] | None = None
        self._source: Iterator[Any] | None = None
        self._ties: Ties | None = None
        self.cast_to(dtype)

    def cast_to(self, dtype: torch.dtype | None) -> None:
        """Cast plain floating tensors to ``dtype``; None: they stay as they are.

        :raises UsageError: ``dtype`` is no plain floating dtype.
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and is_castable(dtype)):
            raise UsageError(f"publish cannot cast to {dtype}", hint="name a plain floating dtype, e.g. torch.bfloat16")
        self.dtype = dtype

    def plan(self) -> PartManifest | None:
        """The manifest of the walk, without walking; None for a plain iterable.

        :raises ManifestMismatch: a value cannot be published. The feed still has to be
            drained.
        """
        entries = self.known_entries()
        if entries is not None:
            return layout(entries, self.mode)
        rows = self._declared() if self.mode == "image" else None
        if rows is None:
            return None
        return PartManifest(tuple(TensorSpec(name, self._published(dtype), shape) for name, dtype, shape in rows))

    def _declared(self) -> list[Declared] | None:
        try:
            return declared(self.weights)
        except ManifestMismatch:  # invalid rows
            raise
        except BaseException:  # metadata() itself raised
            self._end(failed=True)
            raise

    def known(self) -> dict[str, object] | None:
        """All names and values of a module or a mapping; None for a stream."""
        self._open()
        return self._known

    def known_entries(self) -> list[Entry] | None:
        """The values of :meth:`known` as entries, without gathers.

        The ``tensor`` of a DTensor may be missing.

        :raises ManifestMismatch: a value cannot be published. The feed still has to be
            drained.
        """
        known = self.known()
        if known is None:
            return None
        ties = Ties()
        return [self._entry(name, value, ties, gather=False) for name, value in known.items() if value is not None]

    def take_known(self) -> None:
        """End the walk: all known values were copied at once."""
        self._end(failed=False)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries.

        Raises the exceptions of the user's code, and :class:`ManifestMismatch` for a
        value that cannot be published.
        """
        while True:
            step = self._step()
            if step is None:
                return
            name, value = step
            if value is not None:
                yield self._entry(name, value, self._ties, gather=True)

    def drain(self) -> None:
        """Walk to the end and discard everything, taking part in gathers.

        Raises only the exceptions of the user's code.
        """
        try:
            while (step := self._step()) is not None:
                name, value = step
                if self.mode == "image" and is_dtensor(value) and self._tied(name, value) is None:
                    self._gather(value)
        except UsageError:
            if self.user_failed:
                raise
            return  # weights that cannot be walked

    def _tied(self, name: Any, value: Any) -> str | None:
        return self._ties.alias(name, value) if self._ties is not None else None

    def _open(self) -> None:
        if self._source is None:
            if not can_be_walked(self.weights):
                self._end(failed=False)
                raise UsageError(
                    f"publish cannot take a {type(self.weights).__name__}",
                    hint="give a module, a mapping, or an iterable of (name, tensor)",
                )
            try:
                self._known = known_values(self.weights)
                self._source = iter(self._known.items()) if self._known is not None else streamed_values(self.weights)
            except BaseException:
                self._end(failed=True)
                raise
            self._ties = Ties() if self._known is not None else None

    def _step(self) -> tuple[Any, Any] | None:
        if self.finished:
            return None
        self._open()
        assert self._source is not None
        try:
            step = next(self._source)
        except StopIteration:
            self._end(failed=False)
            return None
        except BaseException:
            self._end(failed=True)
            raise
        if not isinstance(step, (tuple, list)) or len(step) != 2:
            return None, step
        return step[0], step[1]

    def _end(self, *, failed: bool) -> None:
        self.finished, self.user_failed = True, failed

    def _gather(self, value: Any) -> torch.Tensor:
        """Gather a DTensor by a collective of the user's own group.

        Its failure is the user's error, and ends the walk.
        """
        try:
            with torch.no_grad():
                gathered: torch.Tensor = value.detach().full_tensor()
        except BaseException:
            self._end(failed=True)
            raise
        return gathered

    def _entry(self, name: Any, value: Any, ties: Ties | None, *, gather: bool) -> Entry:
        """One value as an entry.

        The gather comes before any check: this rank's peers are in it already.
        """
        try:
            alias = ties.alias(name, value) if ties is not None else None
            gathered = None
            if gather and alias is None and self.mode == "image" and is_dtensor(value):
                gathered = self._gather(value)
            return self._described(name, value, alias, gathered)
        except (torch.OutOfMemoryError, torch.AcceleratorError, ReplicasError):
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # torch's errors for odd tensors
            if self.user_failed:
                raise
            raise ManifestMismatch(
                f"tensor {name!r} cannot be published: {type(error).__name__}: {error}",
                hint="publish dense tensors that have values",
            ) from error

    def _described(self, name: Any, value: Any, alias: str | None, gathered: torch.Tensor | None) -> Entry:
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, Shard)):
            given = type(value).__name__ if name is None else f"({name!r}, {type(value).__name__})"
            raise ManifestMismatch(
                f"publish was given {given}", hint="give pairs of a name and a tensor, Shard or None"
            )
        name = plain(name)
        device = (value.tensor if isinstance(value, Shard) else value).device.type
        if device != "cpu":
            self.device = device
        if isinstance(value, Shard):
            return self._shard_entry(name, value)
        shape, dtype = tuple(value.shape), self._published(value.dtype)
        if alias is not None:
            return Entry(name, None, dtype, shape, None, alias)
        box: Box | None = ((0,) * len(shape), shape) if all(shape) else None
        if is_dtensor(value):
            if self.mode == "image":
                return Entry(name, gathered, dtype, shape, box)
            box = local_box(value, name)
            return Entry(name, value.to_local().detach() if box else None, dtype, shape, box)
        _check_plain(name, value)
        return Entry(name, value.detach(), dtype, shape, box)

    def _shard_entry(self, name: str, value: Shard) -> Entry:
        if self.mode == "image":
            raise ManifestMismatch(
                f"tensor {name!r} is a Shard, but only the leader of this source carries bytes",
                hint='set ranks = "all" for the source, or publish whole tensors',
            )
        _check_plain(name, value.tensor)
        box = (value.offsets, tuple(value.tensor.shape)) if value.tensor.numel() else None
        return Entry(name, value.tensor.detach(), self._published(value.tensor.dtype), value.shape, box)

    def _published(self, dtype: torch.dtype) -> str:
        return dtype_name(self.dtype if self.dtype is not None and is_castable(dtype) else dtype)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
        raise ManifestMismatch(f"tensor {name!r} {kind}", hint="publish dense tensors that have values")

"""One pass over the user's weights: sources, shards, ties, and two kinds of errors.

A pass may run collectives of the user's own group: a generator that gathers, or
``DTensor.full_tensor()`` here. So every rank must walk to the end, in the same order,
even if the library fails. A :class:`Feed` therefore distinguishes two failures: after
an exception of the user's code the walk is over; after an error of the library,
:meth:`Feed.drain` walks to the end and discards the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.nn.parameter import is_lazy

from replicas.core.base.manifest import PartManifest, TensorSpec
from replicas.errors import ManifestMismatch, ReplicasError, UsageError
from replicas.messages import arguments
from replicas.messages.bounds import plain, shown, text_of
from replicas.weights.copies.host_copies import Found, unusable
from replicas.weights.copies.passes import with_passes
from replicas.weights.copies.tensors import (
    PLAIN,
    Box,
    alias_of,
    bits,
    dtype_name,
    is_castable,
    is_copied,
    is_dtensor,
    local_box,
    why_unusable,
)
from replicas.weights.layout import Entry, layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
        """Make offsets and shape tuples; raise UsageError if a field is not valid."""
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


class Ties:
    """Finds tensors that share one storage.

    Works only for values that all exist at the same time: a stream may reuse memory.
    """

    def __init__(self) -> None:
        """Begin without tensors; no tensor is kept."""
        self._first: dict[object, str] = {}

    def alias(self, name: str, value: object) -> str | None:
        """Remember a tensor under ``name``. Return the first name that came with the
        same tensor, or None if it is new. Other values are ignored, and get None."""
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            return None
        try:
            key = self._key(value)
        except Exception:  # noqa: BLE001  # a tensor's own code may raise; _entry() reports it
            key = None
        if key is None:
            return None
        first = self._first.setdefault(key, name)
        return first if first != name else None

    def _key(self, value: torch.Tensor) -> object:
        """Return a key, equal for tied tensors; None without dense elements."""
        if type(value) in PLAIN:
            dense = value.numel() and value.layout is torch.strided and not value.is_meta
            return ((), "", self._place(value)) if dense else None
        if is_dtensor(value):
            return tuple(value.shape), str(value.placements), self._place(value.to_local())
        return ((), "", self._place(taken)) if (taken := alias_of(value)).numel() else None

    @staticmethod
    def _place(tensor: torch.Tensor) -> object:
        """Return a key of the tensor's storage, offset, shape, strides and dtype."""
        # The storage object, not its address, so that a rank with an empty shard also
        # sees the tie.
        storage = tensor.untyped_storage()._cdata
        lazy = tensor.is_conj(), tensor.is_neg()
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazy


class Feed:
    """Walks the weights of one publish once, in order, and checks them.

    :ivar finished: nothing is left to drain.
    :ivar user_failed: the user's own code raised. (The exception is not kept, as its
        frames hold this feed, and slots.)
    :ivar device: device type of the tensors seen so far.
    :ivar sources: set if a :class:`~replicas.weights.packing.Packer` found that all
        tensors exist already.
    """

    def __init__(self, weights: object, *, dtype: torch.dtype | None = None, mode: Mode = "image") -> None:
        """Keep the weights, to walk them later.

        :param weights: a module, a mapping, an iterable of pairs, an object with
            ``metadata()`` and iteration, or vLLM's ``WeightSource``; values are Tensor,
            DTensor, :class:`Shard`, or None (skipped).
        :param dtype: to publish plain floating tensors in, except scales; None: keep
            all.
        :param mode: ``"image"`` gathers DTensors and refuses Shards; ``"parts"`` takes
            the rank's own pieces, without communication.
        """
        self.mode: Mode = mode
        self.finished = False
        self.user_failed = False
        self.device = "cpu"
        self.sources: Found | None = None
        self.weights = with_passes(weights, mode, Shard)
        self._known: dict[str, object] | None = None
        self._source: Iterator[Any] | None = None
        self._ties: Ties | None = None
        self.cast_to(dtype)

    def cast_to(self, dtype: torch.dtype | None) -> None:
        """Set the dtype to publish plain floating tensors in; None keeps all dtypes.

        Scales (:func:`is_scale`) keep theirs: rounding one would change every element
        of a quantised weight. So do tensors for which the source's ``keeps_dtype(name,
        dtype)`` returns true.

        :raises UsageError: ``dtype`` is not a plain floating dtype (float16, bfloat16,
            float32, float64).
        """
        if dtype is not None and not (isinstance(dtype, torch.dtype) and is_castable(dtype)):
            raise UsageError(f"publish cannot cast to {dtype}", hint="name a plain floating dtype, e.g. torch.bfloat16")
        self.dtype = dtype

    def plan(self) -> PartManifest | None:
        """Return the manifest (names, dtypes, shapes, offsets) of all weights, without
        walking them; None for a plain iterable.

        :raises ManifestMismatch: a value cannot be published; then call :meth:`drain`.
        """
        entries = self.known_entries()
        if entries is not None:
            return layout(entries, self.mode)
        specs = self._declared() if self.mode == "image" else None
        if specs is None:
            return None
        manifest = PartManifest(specs)
        manifest.validate()
        return manifest

    def _declared(self) -> tuple[TensorSpec, ...] | None:
        """Return the specs that the object's ``metadata()`` declares; None without it.

        Its errors end the walk. It gives a mapping of names to tensors (even meta
        tensors) or ``(dtype, shape)``, or an iterable of ``(name, tensor)``, ``(name,
        dtype, shape)`` or objects with these attributes (vLLM's ``ParamMeta``)."""
        try:
            metadata = getattr(self.weights, "metadata", None)
            if isinstance(self.weights, (torch.nn.Module, Mapping)) or not callable(metadata):
                return None
            described: Any = metadata()
            rows = described.items() if isinstance(described, Mapping) else described
            return tuple(map(self._declared_row, rows))
        except ManifestMismatch:  # invalid rows
            raise
        except BaseException:  # metadata() itself raised
            self._end(failed=True)
            raise

    def _declared_row(self, row: object) -> TensorSpec:
        """Return the spec in a row of ``metadata()``, or raise ManifestMismatch."""
        match (row.name, row) if hasattr(row, "name") else tuple(row) if isinstance(row, Iterable) else ():
            case (
                (str(name), torch.dtype() as dtype, shape)
                | (str(name), (torch.dtype() as dtype, shape))
                | (str(name), object(dtype=torch.dtype() as dtype, shape=shape))
            ):
                return TensorSpec(plain(name), self._published(name, dtype), _extents(name, shape))
            case _:
                text = f"metadata() gave {shown(row)}"
                hint = "give a mapping of names to (dtype, shape), or rows with name, dtype and shape"
                raise ManifestMismatch(text, hint=hint)

    def known(self) -> dict[str, object] | None:
        """Begin the walk unless begun; return all values by name, unchecked, or None if
        the weights must be iterated over, as :func:`known_values` does."""
        self._open()
        return self._known

    def known_entries(self) -> list[Entry] | None:
        """Return an entry (checked tensor or tie) for each value of a module or
        mapping; None for a stream. Gathers nothing; raises ManifestMismatch as
        :meth:`plan`."""
        known = self.known()
        if known is None:
            return None
        ties = Ties()
        with torch.no_grad():
            return [self._entry(name, value, ties, gather=False) for name, value in known.items() if value is not None]

    def take_known(self) -> None:
        """Mark the walk as over, because all known values were copied without it."""
        self._end(failed=False)

    def __iter__(self) -> Iterator[Entry]:
        """Yield an entry for each value; gather DTensors for an image.

        :raises ManifestMismatch: a value cannot be published. The user's exceptions
            pass.
        """
        while (step := self._step()) is not None:
            name, value = step
            if value is not None:
                yield self._entry(name, value, self._ties, gather=True)

    def drain(self) -> None:
        """Walk to the end and discard the values, with all gathers (collectives), as
        the other ranks wait in these. Raise only the user's exceptions."""
        try:
            while (step := self._step()) is not None:
                name, value = step
                if self.mode == "image" and is_dtensor(value) and not (self._ties and self._ties.alias(name, value)):
                    with suppress(ManifestMismatch):
                        self._gather(name, value)
        except UsageError:
            if self.user_failed:
                raise
            return  # weights that cannot be walked

    def _open(self) -> None:
        """Begin the walk, once; raise UsageError if the weights cannot be walked."""
        if self._source is not None:
            return
        if not isinstance(self.weights, (torch.nn.Module, Iterable)) or isinstance(self.weights, torch.Tensor):
            self._end(failed=False)
            text = f"publish cannot take a {type(self.weights).__name__}"
            raise UsageError(text, hint="give a module, a mapping, or an iterable of (name, tensor)")
        try:
            self._known = known_values(self.weights)
            pairs = self._known.items() if self._known is not None else cast("Iterable[Any]", self.weights)
            self._source = iter(pairs)
        except BaseException:
            self._end(failed=True)
            raise
        self._ties = Ties() if self._known is not None else None

    def _step(self) -> tuple[Any, Any] | None:
        """Take the walk's next item. Return it as (name, value), or as (None, item) if
        it is not a pair; None at the end of the walk."""
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
        # _described() reports a step that is not a pair
        return (step[0], step[1]) if isinstance(step, (tuple, list)) and len(step) == 2 else (None, step)

    def _end(self, *, failed: bool) -> None:
        """Mark the walk as over; ``failed`` if the user's own code has raised."""
        self.finished, self.user_failed = True, failed

    def _gather(self, name: str, value: DTensor) -> torch.Tensor:
        """Gather a DTensor's whole tensor (a collective); errors there count as the
        user's. Raise ManifestMismatch if the local tensor has no memory."""
        why, value = _gatherable(value)
        try:
            with torch.no_grad():
                gathered = _full(value)
        except BaseException:
            self._end(failed=True)
            raise
        if why:
            raise unusable(name, value, why)
        return gathered

    def _entry(self, name: Any, value: Any, ties: Ties | None, *, gather: bool) -> Entry:
        """Return a value's checked entry; gather before any check, as the peers do.

        :param ties: finds earlier names of the same tensor; None in a stream.
        :param gather: gather a DTensor for an image (a collective).
        """
        try:
            alias = ties.alias(name, value) if ties is not None else None
            gathered = None
            if gather and alias is None and self.mode == "image" and is_dtensor(value):
                gathered = self._gather(name, value)
            return self._described(name, value, alias, gathered)
        except (torch.OutOfMemoryError, torch.AcceleratorError, ReplicasError):
            raise
        except Exception as error:  # torch's errors for odd tensors, and those of a tensor's own code
            if self.user_failed:
                raise
            kind = type(value).__name__
            text = f"tensor {name!r}, a {kind}, cannot be published: {type(error).__name__}: {text_of(error)}"
            raise ManifestMismatch(text, hint="publish dense tensors that have values") from error

    def _described(self, name: Any, value: Any, alias: str | None, gathered: torch.Tensor | None) -> Entry:
        """Return a value's checked entry, or raise ManifestMismatch.

        :param alias: an earlier name of the same tensor, or None.
        :param gathered: a DTensor's whole tensor, if it was gathered.
        """
        if not isinstance(name, str) or not isinstance(value, (torch.Tensor, Shard)):
            given = type(value).__name__ if name is None else f"({name!r}, {type(value).__name__})"
            text = f"publish was given {given}"
            raise ManifestMismatch(text, hint="give pairs of a name and a tensor, Shard or None")
        name = plain(name)
        tensor = value.tensor if isinstance(value, Shard) else value
        if isinstance(value, Shard) and self.mode == "image":
            text = f"tensor {name!r} is a Shard, but only the leader of this source carries bytes"
            raise ManifestMismatch(text, hint='set ranks = "all" for the source, or publish whole tensors')
        dtensor = value if type(tensor) not in PLAIN and is_dtensor(value) else None
        if type(tensor) not in PLAIN and dtensor is None:  # must not run its own code
            if why := why_unusable(tensor):
                raise unusable(name, tensor, why)
            tensor = alias_of(tensor)
        if tensor.device.type != "cpu":
            self.device = tensor.device.type
        whole = value if isinstance(value, Shard) else tensor
        shape, dtype = tuple(whole.shape), self._published(name, tensor.dtype)
        if alias is not None:
            return Entry(name, None, dtype, shape, None, alias)
        box: Box | None = ((0,) * len(shape), shape) if all(shape) else None
        if dtensor is not None and self.mode == "image":
            return Entry(name, gathered, dtype, shape, box)
        if dtensor is not None:
            box = local_box(dtensor, name)
            if box is None:
                return Entry(name, None, dtype, shape, box)
            tensor = dtensor.to_local()
        elif isinstance(value, Shard):
            box = (value.offsets, tuple(tensor.shape)) if tensor.numel() else None
        taken = alias_of(tensor)
        if why := why_unusable(taken):
            raise unusable(name, tensor, why)
        return Entry(name, taken, dtype, shape, box)

    def _published(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of the dtype in which a tensor of ``dtype`` is published."""
        if self.dtype is None or not is_castable(dtype) or dtype == self.dtype or is_scale(name):
            return dtype_name(dtype)
        keeps = getattr(self.weights, "keeps_dtype", None)
        kept = callable(keeps) and not isinstance(self.weights, (torch.nn.Module, Mapping)) and keeps(name, self.dtype)
        return dtype_name(dtype if kept else self.dtype)


def is_scale(name: str) -> bool:
    """Return True for the name of a quantised weight's scale, which keeps its dtype:
    its last part has the word ``scale`` or ``scales``."""
    words = name.rpartition(".")[2].split("_")
    return "scale" in words or "scales" in words


def _extents(name: str, shape: object) -> tuple[int, ...]:
    """Return the declared shape of tensor ``name``, or raise ManifestMismatch."""
    try:
        return arguments.integers(f"metadata(): the shape of {name!r}", shape)
    except UsageError as error:
        raise ManifestMismatch(error.message, hint="") from error


def _gatherable(value: DTensor) -> tuple[str, DTensor]:
    """Return (why ``value`` cannot be gathered, or "", and the DTensor to gather). A
    local tensor without memory would end the process in torch's collective, while the
    peers wait there; so zeros replace it."""
    from torch.distributed.tensor import DTensor

    local = value.to_local()
    if not (why := why_unusable(local)):
        return "", value
    zeros = torch.zeros(local.shape, dtype=local.dtype, device=local.device)
    mesh, placements = value.device_mesh, value.placements
    return why, DTensor.from_local(zeros, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


def _full(value: DTensor) -> torch.Tensor:
    """Gather ``value`` (a collective), as integers if torch may not copy its dtype."""
    given: Any = value.detach()
    if is_copied(value.dtype):
        return cast("torch.Tensor", given.full_tensor())
    place = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    whole = type(given).from_local(bits(given.to_local()), value.device_mesh, value.placements, **place).full_tensor()
    return cast("torch.Tensor", whole.view(value.dtype))


def known_values(weights: object) -> dict[str, object] | None:
    """Return all values of ``weights`` by name: of a module its parameters and
    persistent buffers, of a mapping its items, and of an object that is neither what
    its method ``resident()`` returns. Return None if that method returns None or does
    not exist: such weights must be iterated over."""
    if isinstance(weights, torch.nn.Module):
        state = _unwrapped(weights).state_dict(keep_vars=True)
        # without a module's own data, which is not a tensor
        return {name: value for name, value in state.items() if name.rpartition(".")[2] != "_extra_state"}
    if isinstance(weights, Mapping):
        # dict() of a dict runs in C, so no other thread changes it meanwhile
        return dict(weights) if type(weights) is dict else dict(weights.items())
    resident = getattr(weights, "resident", None)
    return resident() if callable(resident) else None


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DistributedDataParallel or torch.compile, if any."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module

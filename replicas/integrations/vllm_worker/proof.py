"""Proof after a load: compare a sample of a vLLM worker's own tensors with the version.

Theory of operation
===================

A layer's parameter is made of several tensors of a version (``qkv_proj`` of three), or
of a part of one (tensor parallelism), padded, and perhaps packed for a kernel. So the
*places* are recorded when the version is tried (:mod:`.reload`): which elements of
which tensor the model's own loaders copy to which elements of which parameter. A place
counts only if it is a plain copy, and the only write to these elements: results that a
loader computes are not known.

After the load some elements of each place are compared with the model. They are read
directly if the parameter lies as its loader left it. If a CPU's layer has packed it,
the layer itself is asked: multiplied with a unit vector it returns a column of its
weight, exactly, as all other products are 0. Any other transformation of weights (a
quantized layer, padded or transposed experts) *cannot be compared*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Comparison", "CopiedRegion", "compare_sample", "first_names", "place_of"]

PLACES_MAX = 256
"""Number of places that are compared; each version gets other ones."""
NAMED = 5
ELEMENTS = 4
"""Elements compared in each place: its first and last, and some between."""
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "NoneType")
"""Methods of layers that keep a parameter as loaded, or have ``cpu_linear``."""


class CopiedRegion(NamedTuple):
    """The copy of a region of a version's tensor to a region of a model's parameter.

    :ivar tensor: the tensor's name. :ivar start: first element of the region in it.
    :ivar strides: strides of the region in the tensor.
    :ivar layer, parameter: path of the module, and the name in it.
    :ivar whole: shape of the whole parameter when it was loaded.
    :ivar offset, shape, parameter_strides: the region in the parameter.
    """

    tensor: str
    start: int
    strides: tuple[int, ...]
    layer: str
    parameter: str
    whole: tuple[int, ...]
    offset: int
    shape: tuple[int, ...]
    parameter_strides: tuple[int, ...]


class Comparison(NamedTuple):
    """The result of a comparison.

    :ivar wrong: names of tensors that differ, each with its parameter; sorted.
    :ivar equal, not_compared: numbers of places that are equal, or
        that cannot be compared.
    """

    wrong: list[str]
    equal: int
    not_compared: int


def place_of(
    name: str, tensor: torch.Tensor, given: torch.Tensor, written: torch.Tensor, where: tuple[str, str, tuple[int, ...]]
) -> CopiedRegion | None:
    """Return which region of a version's tensor was copied to which region of a
    parameter, or None if ``given`` is not a view of ``tensor``.

    :param name: name of ``tensor``, a tensor of the version.
    :param given: what was copied. :param written: the view of the parameter.
    :param where: layer, name and whole shape of the parameter.
    """
    start = int(given.storage_offset() - tensor.storage_offset())
    span = 1 + sum((size - 1) * step for size, step in zip(given.shape, given.stride(), strict=True))
    shares = given.untyped_storage()._cdata == tensor.untyped_storage()._cdata and given.dtype == tensor.dtype
    if not shares or not 0 <= start <= tensor.numel() - span or given.shape != written.shape or not given.numel():
        return None
    offset = int(written.storage_offset())
    return CopiedRegion(name, start, given.stride(), *where, offset, tuple(written.shape), written.stride())


def compare_sample(
    model: torch.nn.Module, places: list[CopiedRegion], weights: Mapping[str, torch.Tensor], turn: int
) -> Comparison:
    """Compare some elements of a model with a version, and return the counts; change
    neither.

    :param places: the regions that plain copies have written.
    :param weights: the version's tensors by name.
    :param turn: selects the regions; the version's number.
    """
    wrong: set[str] = set()
    equal = untold = 0
    for place in _select_places(places, turn):
        tensor = weights[place.tensor]
        source = torch.as_strided(tensor, place.shape, place.strides, tensor.storage_offset() + place.start)
        for read in _readers(model, place):
            there = None if read is None else _differs(place, source, read)
            if there is None:
                untold += 1
            elif there:
                wrong.add(f"{place.tensor} in {place.layer}.{place.parameter}")
            else:
                equal += 1
    return Comparison(sorted(wrong), equal, untold)


def _select_places(places: list[CopiedRegion], turn: int) -> list[CopiedRegion]:
    """Return every n-th of the regions ``places``, 256 at most. The first one depends
    on ``turn`` (the version's number), so that all are compared over many versions."""
    step = math.ceil(len(places) / PLACES_MAX) or 1
    return places[turn % step :: step]


def _differs(place: CopiedRegion, source: torch.Tensor, read: Callable[[list[int]], torch.Tensor]) -> bool | None:
    """Return True if some of a region's elements (its first and last, and two between)
    differ from ``source``, False if they are equal, or None if a NaN prevents the
    comparison.

    :param place: the region of the model's parameter.
    :param source: the region of the version's tensor.
    :param read: returns elements of the parameter, by their numbers in it, flattened.
    """
    last = source.numel() - 1
    at = sorted({last * part // (ELEMENTS - 1) for part in range(ELEMENTS)})
    rows = [_unravel(one, place.shape) for one in at]
    flat = [place.offset + sum(i * step for i, step in zip(row, place.parameter_strides, strict=True)) for row in rows]
    there = read(flat).cpu()
    wanted = torch.stack([source[row] for row in rows]).cpu().to(there.dtype)
    if (there.isnan() & ~wanted.isnan()).any():  # a NaN elsewhere in the layer may have spread
        return None
    return bool(((there != wanted) & ~wanted.isnan()).any())


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of an element of this shape, by its number in row-major
    order."""
    found = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        found.append(rest)
    return tuple(reversed(found))


def _readers(model: torch.nn.Module, place: CopiedRegion) -> Iterator[Callable[[list[int]], torch.Tensor] | None]:
    """Yield, for each layer that computes with the parameter of ``place``, a function
    that reads the parameter's elements by their numbers in it, flattened, or None if
    the layer cannot be read. Tied layers share one parameter."""
    layer: Any = model.get_submodule(place.layer)
    parameter = layer._parameters.get(place.parameter)
    tied = [one for one in model.modules() if parameter is not None and one._parameters.get("weight") is parameter]
    for one in tied if len(tied) > 1 else [layer]:
        yield _reader(one, parameter, place)


def _reader(
    layer: Any, parameter: torch.Tensor | None, place: CopiedRegion
) -> Callable[[list[int]], torch.Tensor] | None:
    """Return a function that reads elements of a layer's parameter by their numbers in
    it, flattened, or None if the layer keeps them in an unknown form.

    :param parameter: the layer's own tensor, or None if it no longer has one.
    :param place: the region that is compared: its parameter's name and shape when
        loaded.
    """
    method = getattr(layer, "quant_method", None)
    if parameter is None or type(method).__name__ not in _PLAIN:
        return None
    if place.parameter == "weight" and hasattr(layer, "cpu_linear"):  # a CPU computes with a packed copy
        return _columns(layer, method, parameter, place.whole) if len(place.whole) == 2 else None
    if tuple(parameter.shape) != place.whole or not parameter.is_contiguous():
        return None
    return lambda flat: parameter.detach().view(-1)[torch.tensor(flat, device=parameter.device)]


def _columns(
    layer: Any, method: Any, parameter: torch.Tensor, whole: tuple[int, ...]
) -> Callable[[list[int]], torch.Tensor]:
    """Return a function that reads elements of a weight that a CPU's layer has packed:
    the layer is computed with unit vectors.

    :param method: the layer's vLLM method, whose ``apply`` computes the layer.
    :param parameter: gives dtype and device of the unit vectors.
    :param whole: shape of the weight, (rows, columns).
    """

    def read(flat: list[int]) -> torch.Tensor:
        """Return the weight's elements with these numbers in row-major order."""
        rows, columns = zip(*(divmod(one, whole[1]) for one in flat), strict=True)
        units = torch.zeros(len(flat), whole[1], dtype=parameter.dtype, device=parameter.device)
        units[range(len(flat)), columns] = 1
        with torch.no_grad():
            return method.apply(layer, units)[range(len(flat)), list(rows)]  # type: ignore[no-any-return]  # vLLM's

    return read


def first_names(names: list[str]) -> str:
    """Return the first five of these names as a text, with "..." if there are more."""
    return f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"

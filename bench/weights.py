"""Weights of a rank: a set of tensors of random values, all within one block of memory.

Each tensor has a storage of its own, as a model's parameters have, but they lie one
behind the other: so the same memory can be broadcast as one flat buffer and moved
tensor by tensor, and nobody's copy is colder than another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import prod

import numpy
import torch
import xxhash

from bench.shapes import ITEM_NBYTES, SETS

__all__ = ["Weights", "first_values", "placed"]

FILL_NBYTES = 64 << 20
FINITE = 0xBFFFBFFFBFFFBFFF
"""Without the highest bit of its exponent a bfloat16 is a finite number below 2."""


class Weights:
    """
    :ivar flat: all bytes.
    :ivar tensors: the same by name; only for memory that stays where it is (torchft
        moves it).
    """

    def __init__(self, what: str, seed: int) -> None:
        self._shapes = list(SETS[what]())
        sizes = [prod(shape) for _, shape in self._shapes]
        self.flat = torch.empty(sum(sizes) * ITEM_NBYTES, dtype=torch.uint8)
        self._starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        words = self.flat.numpy().view(numpy.uint64)
        self._generator = generator = numpy.random.Generator(numpy.random.SFC64(seed))
        for begin in range(0, len(words), FILL_NBYTES // 8):
            part = words[begin : begin + FILL_NBYTES // 8]
            part[:] = generator.integers(0, 1 << 64, len(part), dtype=numpy.uint64)
        words &= numpy.uint64(FINITE)

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return placed(self.flat, self._shapes)

    def change(self, share: float = 0.0) -> None:
        """Another value at the start of each tensor, and of this share of the others;
        each is the next one, above or below."""
        values = self.flat.view(torch.int16)
        if share >= 1.0:
            values ^= 1
        elif share:
            places = self._generator.integers(0, len(values), round(share * len(values)))
            values[torch.from_numpy(places)] ^= 1
        values[self._starts] += 1

    def digest(self) -> str:
        """Of all bytes, in the order of the tensors."""
        return xxhash.xxh3_128_hexdigest(self.flat.numpy().data)


def placed(flat: torch.Tensor, shapes: list[tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes one behind the other in ``flat`` (uint8), each with a
    storage of its own."""
    memory = flat.numpy().data
    found: dict[str, torch.Tensor] = {}
    begin = 0
    for name, shape in shapes:
        count = prod(shape)
        found[name] = torch.frombuffer(memory, dtype=torch.bfloat16, count=count, offset=begin).view(shape)
        begin += count * ITEM_NBYTES
    return found


def first_values(tensors: Mapping[str, torch.Tensor]) -> list[float]:
    """Read the first value of each: who can do that has them all."""
    return [float(tensor.view(-1)[0]) for tensor in tensors.values()]

"""Check that targets of a load that share memory get the same values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replicas.errors import ManifestMismatch
from replicas.weights.copies.tensors import span_nbytes

_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets, each with the elements to write there."""


def check_shared(pairs: _Pairs, names: Sequence[str]) -> None:
    """Check that targets that share memory would get the same values; write to none.

    :param pairs: (target, elements to write there) tensors.
    :param names: of the targets, for the error.
    :raises ManifestMismatch: two of them would get different values.
    """
    spans = [
        (str(one.device), one.data_ptr(), one.data_ptr() + span_nbytes(one), number)
        for number, (one, _) in enumerate(pairs)
        if one.numel()
    ]
    spans.sort()
    group: list[int] = []
    device, behind = "", 0
    for where, start, end, number in spans:
        if where != device or start >= behind:
            _check_group(group, pairs, names)
            group, device, behind = [], where, 0
        group.append(number)
        behind = max(behind, end)
    _check_group(group, pairs, names)


def _check_group(group: Sequence[int], pairs: _Pairs, names: Sequence[str]) -> None:
    """Check that targets whose memory overlaps would get the same values.

    Writes to a private copy of that memory's layout on the CPU, not to them.

    :param group: indices of these targets in ``pairs`` and ``names``.
    :raises ManifestMismatch: two of them would get different values.
    """
    distinct: dict[object, int] = {}
    for number in group if len(group) > 1 else ():
        one = pairs[number][0]
        first = distinct.setdefault((one.data_ptr(), one.shape, one.stride(), one.itemsize), number)
        if first != number and not torch.equal(_stored(*pairs[first]), _stored(*pairs[number])):
            raise _differing(names[first], names[number])
    if len(distinct) < 2:
        return
    # Write all to a copy of their layout: then each target must still have its values.
    numbers = list(distinct.values())
    targets = {number: pairs[number][0] for number in numbers}
    base = min(one.data_ptr() for one in targets.values())
    end = max(one.data_ptr() + span_nbytes(one) for one in targets.values())
    memory = torch.empty(end - base, dtype=torch.uint8, device="cpu")

    def place(number: int) -> torch.Tensor:
        """Return the bytes of target ``number``, a view of the private copy of the
        memory."""
        one = targets[number]
        strides = *(stride * one.itemsize for stride in one.stride()), 1
        return memory.as_strided((*one.shape, one.itemsize), strides, one.data_ptr() - base)

    for number in numbers:
        place(number).copy_(_stored(*pairs[number]))
    for number in numbers:
        given = _stored(*pairs[number])
        if torch.equal(place(number), given):
            continue
        for other in numbers[numbers.index(number) + 1 :]:
            place(number).copy_(given)
            place(other).copy_(_stored(*pairs[other]))
            if not torch.equal(place(number), given):
                raise _differing(names[number], names[other])


def _stored(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the bytes that ``target`` will store for each element of ``source``.

    They are a CPU tensor, uint8 of shape ``[*target.shape, target.itemsize]``.
    """
    given = source.to(device="cpu", dtype=target.dtype)
    if target.is_neg():
        given = -given
    return given.reshape(-1).view(torch.uint8).view(*given.shape, given.itemsize)


def _differing(one: str, other: str) -> ManifestMismatch:
    """Return the error for two targets, given by name, that share memory and differ."""
    text = f"{one!r} and {other!r} share memory in the model, and their values in the version differ"
    return ManifestMismatch(text, hint="load into tensors of their own, or publish them tied")

"""A slot that a trainer fills in place, so that publishing it copies nothing.

Theory of operation
===================

A :class:`WritableSlot` is a mapping of names to tensors that are views of a free slot.
It is *open* until it is *taken* by a publish or *dropped*. Its bytes are whatever the
slot held before: all of them must be written each time.

Once taken it is read by others, and must not be written any more. What the kernel
offers for that was measured for 269 MB and left out: to protect the pages
(``mprotect``) takes 15-40 ms twice for each publish and ends a trainer that writes late
by SIGSEGV; to put a copy-on-write mapping in their place takes 40 ms and then 150 ms to
fault the pages in again. Both cost more than the copy (20 ms) that is saved. Instead
the tensors themselves are emptied: a late write through one of them is an error of
shape, in Python, and reading the mapping is a UsageError. Views that the trainer made
of them (slices, ``param.data``) are out of reach: they must not be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Literal

import torch

from replicas.core.versions.manifest import PartManifest
from replicas.errors import UsageError
from replicas.weights.devices.device_copies import Begun
from replicas.weights.memory.arena import Slot
from replicas.weights.packing import Packing, packing_of
from replicas.weights.places import Places
from replicas.weights.tensors import torch_dtype

__all__ = ["WritableSlot"]


class WritableSlot(Mapping[str, torch.Tensor]):
    """Names and tensors to write, of published dtypes and undefined contents: on the
    CPU, or where the channel has ``staging = "device"`` on its GPU. Use it in a
    ``with`` block.

    Write every tensor, then pass it to ``publish`` of the same channel, inside the
    block. From then on its tensors are empty; leaving the block without a publish frees
    the slot. Do not keep views of its tensors, nor make parameters of them.

    :param slot: a slot that is being filled, of which ``manifest`` is the manifest.
    :param drop: gives the slot back; again, it does nothing.
    :ivar holder: lives as long as this does, by which the slot is known to be lent.
    """

    def __init__(self, slot: Slot, manifest: PartManifest, drop: Callable[[], None], holder: object = None) -> None:
        self.manifest = manifest
        self.holder = holder
        self.slot = slot
        self._drop = drop
        self._state: Literal["open", "taken", "dropped"] = "open"
        self._tensors = _tensors(slot, manifest)
        self._names = [*self._tensors, *(alias for alias, _ in manifest.aliases)]
        self._aliases = dict(manifest.aliases)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor called ``name``; tied names have the same one.

        :raises UsageError: it was published, or its block was left.
        """
        self.check_open()
        return self._tensors[self._aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<WritableSlot {self._state} tensors={len(self)}>"

    def __enter__(self) -> WritableSlot:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """Give the slot back, unless it was published.

        In this order: wherever an interrupt comes in between, the slot is back, or this
        can be said again.
        """
        if self._state == "open":
            self._drop()
            self._close("dropped")

    def check_open(self) -> None:
        """:raises UsageError: it was published before, or its block was left."""
        if self._state != "open":
            what = "was published" if self._state == "taken" else "was given back when its block was left"
            raise UsageError(f"this writable slot {what}", hint="call arena_like again for the next version")

    def taken(self) -> None:
        """The slot is a publish's from now on."""
        self._close("taken")

    def digest(self, begun: Begun = lambda copies: None) -> Packing:
        """For the publish: the digest of what was written, once taken; returns at once.
        See :func:`packing_of`."""
        return packing_of(self.slot, begun)

    def _close(self, state: Literal["taken", "dropped"]) -> None:
        self._state = state
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[call-overload]  # the stub lacks this form
        self._tensors.clear()


def _tensors(slot: Slot, manifest: PartManifest) -> dict[str, torch.Tensor]:
    """A view for each tensor: whole in an image, and the rank's own piece of it in a
    part."""
    places = Places(manifest)
    views = dict(zip(places.order, places.views(slot.data, as_bits=False), strict=True))
    numbers = {number: number for number in range(len(manifest.tensors))}
    if manifest.pieces is not None:
        numbers = {piece.tensor: number for number, piece in enumerate(manifest.pieces)}
        if len(numbers) < len(manifest.pieces):
            raise UsageError("arena_like cannot hold several pieces of one tensor", hint="publish them as Shards")
    found: dict[str, torch.Tensor] = {}
    for number, spec in enumerate(manifest.tensors):
        view = views.get(numbers.get(number, -1))
        shape = spec.shape if manifest.pieces is None else (0,)
        if view is None:
            view = torch.empty(shape, dtype=torch_dtype(spec.dtype), device=slot.data.device)
        found[spec.name] = view
    return found

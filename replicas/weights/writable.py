"""Slots that a trainer fills in place, so that publishing copies nothing.

Theory of operation
===================

A :class:`WritableSlot` maps names to tensors that are views of a free slot. It is
*open* until a publish *takes* it or it is *dropped*. It starts with whatever bytes the
slot held before: all of them must be written each time.

Once taken, others read it, and it must no longer be written. The kernel's
protections cost more than the copy that is saved (20 ms for 269 MB): ``mprotect`` takes
15-40 ms twice for each publish, a copy-on-write mapping 190 ms. Instead, the tensors
themselves are emptied: a late write through one of them is a Python error of shape, and
reading the mapping is a UsageError. Views that the trainer made of them (slices,
``param.data``) cannot be emptied: they must not be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch

from replicas.core.base.manifest import PartManifest
from replicas.errors import UsageError
from replicas.weights.devices.device_copies import Begun
from replicas.weights.loading import named_views
from replicas.weights.memory.arena import Slot
from replicas.weights.packing import Packing, packing_of


class WritableSlot(Mapping[str, torch.Tensor]):
    """Names and tensors to write in place; use it in a ``with`` block.

    The tensors have the published dtypes and undefined contents. They are on the CPU,
    or with ``staging = "device"`` on the channel's GPU.

    Write every tensor, then pass this to ``publish`` of the same channel, inside the
    block. From then on its tensors are empty; leaving the block without a publish frees
    the slot. Do not keep views of its tensors, nor make parameters of them.

    :param slot: a slot that is being filled, with ``manifest`` as its manifest.
    :param drop: gives the slot back; a second call does nothing.
    :ivar holder: lives as long as this; while it lives the slot counts as lent.
    """

    def __init__(self, slot: Slot, manifest: PartManifest, drop: Callable[[], None], holder: object = None) -> None:
        self.manifest = manifest
        self.holder = holder
        self.slot = slot
        self._drop = drop
        self._state: Literal["open", "taken", "dropped"] = "open"
        if manifest.pieces is not None and len({piece.tensor for piece in manifest.pieces}) < len(manifest.pieces):
            raise UsageError("arena_like cannot hold several pieces of one tensor", hint="publish them as Shards")
        self._tensors = named_views(slot.data, manifest)
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

    def __exit__(self, *error: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Give the slot back, unless it was published."""
        if self._state == "open":
            self._drop()  # first: after an interrupt it is back, or this can be called again
            self._close("dropped")

    def check_open(self) -> None:
        """Raise UsageError if it was published, or its block was left."""
        if self._state != "open":
            what = "was published" if self._state == "taken" else "was given back when its block was left"
            raise UsageError(f"this writable slot {what}", hint="call arena_like again for the next version")

    def taken(self) -> None:
        self._close("taken")

    def digest(self, begun: Begun = lambda copies: None) -> Packing:
        """Start the digest of what was written, once taken; see :func:`packing_of`."""
        return packing_of(self.slot, begun)

    def _close(self, state: Literal["taken", "dropped"]) -> None:
        self._state = state
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[call-overload]  # the stub lacks this form
        self._tensors.clear()

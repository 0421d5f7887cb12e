"""Slots that a trainer fills in place, so that publishing copies nothing.

Theory of operation
===================

A :class:`WritableSlot` maps names to tensors that are views of a free slot. It is
*open* until a publish *takes* it or it is *dropped*. It starts with the bytes that the
slot held before, so the trainer must write every tensor each time.

Once it is taken, others read it, and the trainer must not write to it. Protection by
the kernel costs more than the copy that is saved (20 ms for 269 MB): ``mprotect`` takes
15-40 ms twice for each publish, a copy-on-write mapping 190 ms. Instead, the tensors
are emptied: a late write through one of them is a Python error of shape, and reading
the mapping is a UsageError. Views that the trainer made of them (slices,
``param.data``) cannot be emptied and must not be kept.
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
    """Names and tensors of a version's memory, to fill in place in a ``with`` block.

    The tensors have the published dtypes and undefined contents. They are on the CPU,
    or with ``staging = "device"`` on the channel's GPU.

    Write every tensor, then pass this to ``publish`` of the same channel, inside the
    block. From then on its tensors are empty; leaving the block without a publish frees
    the slot. Do not keep views of its tensors, nor make parameters of them.

    :param slot: a slot that is being filled, with ``manifest`` as its manifest.
    :param drop: gives the slot back; a second call does nothing.
    :ivar holder: an object that keeps the slot lent as long as it lives.
    """

    def __init__(self, slot: Slot, manifest: PartManifest, drop: Callable[[], None], holder: object = None) -> None:
        """Make the tensors, as views of the slot's memory.

        :param slot: memory of a version that is being filled. :param manifest: its
            layout.
        :param drop: gives the slot back. :param holder: an object to keep alive with
            this one.
        :raises UsageError: the layout has several pieces of one tensor.
        """
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
        """Return the tensor called ``name``; tied names have the same tensor.

        :raises UsageError: the slot was published, or its block was left.
        """
        self.check_open()
        return self._tensors[self._aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        """Return an iterator of all names, those of tied tensors included."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<WritableSlot {self._state} tensors={len(self)}>"

    def __enter__(self) -> WritableSlot:
        """Return this object; raise UsageError if it was published or given back."""
        self.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the slot back, unless it was published."""
        self.drop()

    def drop(self) -> None:
        """Give the slot back and empty the tensors, unless it was published.

        A second call does nothing.
        """
        if self._state == "open":
            self._drop()  # first, so that drop() can be called again after an interrupt
            self._close("dropped")

    def check_open(self) -> None:
        """Raise UsageError if the slot was published, or its block was left."""
        if self._state != "open":
            what = "was published" if self._state == "taken" else "was given back when its block was left"
            raise UsageError(f"this writable slot {what}", hint="call arena_like again for the next version")

    def mark_taken(self) -> None:
        """Note that the slot was published, and empty the tensors.

        From then on the publish gives the slot back; :meth:`drop` does nothing.
        """
        self._close("taken")

    def digest(self, begun: Begun = lambda copies: None) -> Packing:
        """Start to compute the digest of the published bytes; do not wait for it.

        :param begun: called with the object that does the work, before it begins.
        :returns: the digest to come.
        """
        return packing_of(self.slot, begun)

    def _close(self, state: Literal["taken", "dropped"]) -> None:
        """Set the state, and make all tensors empty.

        A later write to one of them raises an error.
        """
        self._state = state
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.set_(torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[call-overload]  # the stub lacks this form
        self._tensors.clear()

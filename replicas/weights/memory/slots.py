"""A slot: one part of an arena, for one version."""

from __future__ import annotations

import torch

from replicas.core.membership import SlotState
from replicas.core.versions.manifest import Manifest, PartManifest
from replicas.messages import SlotPlace
from replicas.weights.digest import DigestKind
from replicas.weights.memory.buffers import Buffer

__all__ = ["Slot"]


class Slot:
    """One slot of an arena, which alone changes its fields, under its lock.

    :ivar state: ``free``, ``filling``, ``held``, ``leaving`` or ``closed``.
    :ivar foreign: it is the memory of another member of this host.
    :ivar manifest: of an image (:class:`Manifest`, or a :class:`PartManifest` without
        pieces), or of a packed part.
    :ivar digest: of the data, once held.
    :ivar sharing: how many processes of this host are known to have received its
        version together.
    """

    def __init__(self, index: int, state: SlotState = "free", *, foreign: bool = False) -> None:
        self.index = index
        self.state: SlotState = state
        self.foreign = foreign
        self.version = 0
        self.manifest: Manifest | PartManifest | None = None
        self.digest = ""
        self.pins = 0
        self.sharing = 1
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """The memory of a slot that is not free."""
        if self._buffer is None:
            raise ValueError(f"slot {self.index} has no buffer")
        return self._buffer

    @property
    def image(self) -> Manifest | None:
        """The manifest of the whole image in it; None for a packed part."""
        if isinstance(self.manifest, PartManifest):
            return self.manifest.whole if self.manifest.pieces is None else None
        return self.manifest

    @property
    def data(self) -> torch.Tensor:
        """The data section of an image, or a whole packed part: uint8, shared.

        It is on a GPU if the slot is. Writing to a foreign slot's is a SIGSEGV.
        """
        image = self.image
        return self.buffer.readable()[image.data_offset if image else 0 :]

    @property
    def digest_kind(self) -> DigestKind:
        """The kind of its data's digest: by device or host memory."""
        return "device" if self.buffer.device else "host"

    @property
    def place(self) -> SlotPlace:
        """The place by which others of this host can open it, while it is held."""
        return self.buffer.place

    def __repr__(self) -> str:
        kind = "foreign " if self.foreign else ""
        return f"<Slot {self.index} {kind}{self.state} version={self.version} pins={self.pins}>"

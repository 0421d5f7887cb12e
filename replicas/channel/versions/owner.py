"""The interface that an update uses of its receiver."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from replicas.channel.session.held_versions import Holder
from replicas.channel.versions.lockstep_wait import LockstepWait
from replicas.core.base.manifest import Manifest
from replicas.errors import ReplicasError
from replicas.messages import SlotPlace
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.buffers import Buffer


class Base(NamedTuple):
    """The version that was loaded last; its memory may have been reused since."""

    version: int
    manifest_hash: str
    place: SlotPlace


class UpdateOwner(Protocol):
    """Receives the reports of an update."""

    @property
    def lockstep(self) -> LockstepWait: ...

    def loaded(self, version: int, load_s: float, base: Base | None) -> None: ...

    def look_at(self, base: Base) -> Buffer: ...  # without a lock

    def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None: ...

    def touched(self, version: int) -> None: ...

    def let_go(self, holder: Holder, slot: Slot) -> None: ...  # a second call does nothing


def open_base(owner: UpdateOwner, base: Base | None, manifest: Manifest) -> Buffer | None:
    """Open the memory of the version that was loaded last, without a lock.

    Return None if there is none with this manifest.
    """
    if base is None or base.manifest_hash != manifest.hash or base.place.device:
        return None
    try:
        buffer = owner.look_at(base)
        buffer.readable()
    except ReplicasError:  # the memory is gone, or cannot be mapped
        return None
    return buffer

"""The owner of updates, which gets their reports, and keeps the version before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from replicas import errors
from replicas.channel.session.held_versions import Holder
from replicas.channel.session.pending import Pending, Promise
from replicas.core.base.manifest import Manifest
from replicas.messages import SlotPlace
from replicas.messages.version_orders import Steered
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer

Tell = Callable[[errors.ReplicasError | None], None]
Score = Callable[[int, dict[str, float]], Pending[Steered]]


class Base(NamedTuple):
    """The version that was loaded last; its memory may have been reused since.

    ``content``: the version whose bytes it has.
    """

    version: int
    content: int
    manifest_hash: str
    place: SlotPlace


class Owner:
    """The object that gets the reports of updates, and has the version before.

    This one has no coordinator: it keeps what was loaded last, and reports nothing.

    :ivar score: reports scores of a version, by name.
    """

    def __init__(self, arena: Callable[[], Arena], score: Score) -> None:
        """Begin with nothing loaded.

        :param arena: returns the arena with the slots of the updates, once there is
            one. :param score: as :attr:`score`.
        """
        self.arena, self.score = arena, score
        self._base: Base | None = None

    @property
    def base(self) -> Base | None:
        """The version that was loaded last, and is served; None without one."""
        return self._base

    @property
    def together(self) -> bool:
        """True if all targets load a version, or none does (``adopt_together``)."""
        return False

    def await_decision(self, version: int, whole: bool, tell: Tell) -> Promise[None]:
        """Return a decision that has been made: the version may be loaded."""
        pending: Promise[None] = Promise(f"adoption of version {version}")
        pending.resolve(None)
        return pending

    def touched(self, version: int) -> None:
        """Do nothing. The caller has begun to use the update."""

    def open_base(self, base: Base | None, manifest: Manifest) -> Buffer | None:
        """Map the memory of ``base`` (the version loaded last), to compare with it.

        It takes no lock: the memory may be refilled while the caller reads it.

        :param manifest: of the version that is compared with it.
        :returns: a buffer that the caller closes; None if there is no base, it has
            another manifest or is on a GPU, or its memory is gone.
        """
        if base is None or base.manifest_hash != manifest.hash or base.place.device:
            return None
        try:
            buffer = self.arena().borrow(base.place, base.content, lock=False)
            buffer.readable()
        except errors.ReplicasError:  # the memory is gone, or cannot be mapped
            return None
        return buffer

    def loaded(self, version: int, load_s: float, base: Base | None) -> None:
        """Keep where the version is, to find the changes of the next one.

        :param load_s: seconds of the load. :param base: its memory, or None.
        """
        self._base = base

    def failed(self, version: int, error: BaseException, *, kept: bool = False) -> None:
        """Forget what was loaded before, unless it is still served (``kept``)."""
        self._base = self._base if kept else None

    def let_go(self, holder: Holder, slot: Slot) -> None:
        """Unpin the slot of an update that has ended.

        :param holder: of the update.
        """
        self.arena().unpin(slot)

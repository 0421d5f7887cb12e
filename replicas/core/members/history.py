"""The history of a channel's identities, kept after their members have gone."""

from __future__ import annotations

from collections import deque

from replicas.messages.identity import Member

FLAP_WINDOW_S = 60.0


class History:
    """Joins and ends by the name of an identity.

    :ivar joined: every identity that ever joined.
    :ivar left: by replica and rank: generation and time of orderly leaves, until the
        rank's next join.
    :ivar unloaded: why replicas failed to load since the last receipt, by their name.
    """

    def __init__(self) -> None:
        self.joined: set[str] = set()
        self.left: dict[tuple[str, int], dict[int, tuple[int, float]]] = {}
        self.unloaded: dict[str, str] = {}
        self._losses: dict[str, deque[float]] = {}

    def note_join(self, member: Member) -> None:
        """Note that a rank has joined; forget that it had left."""
        self.joined.add(member.name)
        self.left.get((member.group, member.replica), {}).pop(member.rank, None)

    def note_left(self, member: Member, generation: int, now: float) -> None:
        """Note that a rank has left in good order, so that it is not missed."""
        self.left.setdefault((member.group, member.replica), {})[member.rank] = (generation, now)

    def note_loss(self, name: str, now: float) -> None:
        """Note that a rank was lost without an orderly leave.

        :param name: ``group/replica/rank``.
        """
        self._losses = {known: at for known, at in self._losses.items() if now - at[-1] <= FLAP_WINDOW_S}
        self._losses.setdefault(name, deque(maxlen=16)).append(now)  # 16: by then delays are as long as they get

    def losses(self, name: str, now: float) -> int:
        """Return how often the rank of this name was lost within the last minute."""
        return sum(now - at <= FLAP_WINDOW_S for at in self._losses.get(name, ()))

    def take_unloaded(self) -> dict[str, str]:
        """Return why replicas failed to load since the last call, by replica.

        Forget it.
        """
        found, self.unloaded = self.unloaded, {}
        return found

"""The history of a channel's identities, kept after their members have gone."""

from __future__ import annotations

from collections import deque

from replicas.messages.identity import Member

FLAP_WINDOW_S = 60.0


class History:
    """A channel's memory of ranks after they have gone: their joins, leaves and losses.

    :ivar joined: names of all ranks that ever joined.
    :ivar left: by replica and rank: generation and time of orderly leaves, until the
        rank's next join.
    :ivar unloaded: why replicas failed to load a version, by their name, since the last
        receipt of a committed publish.
    """

    def __init__(self) -> None:
        """Start without any rank."""
        self.joined: set[str] = set()
        self.left: dict[tuple[str, int], dict[int, tuple[int, float]]] = {}
        self.unloaded: dict[str, str] = {}
        self._losses: dict[str, deque[float]] = {}

    def note_join(self, member: Member) -> None:
        """Add a rank to those that ever joined; remove its earlier leave."""
        self.joined.add(member.name)
        self.left.get((member.group, member.replica), {}).pop(member.rank, None)

    def note_left(self, member: Member, generation: int, now: float) -> None:
        """Record that a rank has left in good order, so that its replica does not wait
        for it.

        :param generation: the replica's generation that left.
        :param now: when it left.
        """
        self.left.setdefault((member.group, member.replica), {})[member.rank] = (generation, now)

    def note_loss(self, name: str, now: float) -> None:
        """Count a loss of a rank, one that has not left in good order, for
        :meth:`losses`.

        :param name: ``group/replica/rank``.
        :param now: when it was lost.
        """
        self._losses = {known: at for known, at in self._losses.items() if now - at[-1] <= FLAP_WINDOW_S}
        self._losses.setdefault(name, deque(maxlen=16)).append(now)  # 16: by then delays are as long as they get

    def losses(self, name: str, now: float) -> int:
        """Return how often a rank was lost within the minute before ``now``.

        :param name: ``group/replica/rank``.
        """
        return sum(now - at <= FLAP_WINDOW_S for at in self._losses.get(name, ()))

    def take_unloaded(self) -> dict[str, str]:
        """Return why replicas failed to load a version, by their name, and forget that.

        So each failure is in the receipt of one committed publish only.
        """
        found, self.unloaded = self.unloaded, {}
        return found

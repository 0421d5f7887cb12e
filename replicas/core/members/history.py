"""The history of a channel's identities, kept after their members have gone."""

from __future__ import annotations

from collections import deque

FLAP_WINDOW_S = 60.0
ISOLATION_WINDOW_S = 600.0
"""For this long, a quarantine makes the next one of the same identity longer."""


class History:
    """Joins, ends and quarantines by the name of an identity.

    :ivar joined: every identity that ever joined.
    :ivar left: generation and time of orderly leaves, until the next join.
    :ivar unloaded: why replicas failed to load since the last receipt, by their name.
    """

    def __init__(self) -> None:
        self.joined: set[str] = set()
        self.left: dict[str, tuple[int, float]] = {}
        self.unloaded: dict[str, str] = {}
        self._losses: dict[str, deque[float]] = {}
        self._isolations: dict[str, deque[float]] = {}
        self._isolated: dict[str, str] = {}

    def note_join(self, name: str) -> None:
        self.joined.add(name)
        self.left.pop(name, None)

    def forget_left(self, group: str, replica: int) -> None:
        """Forget which ranks of the replica left in good order; expect them again."""
        for name in [name for name in self.left if name.startswith(f"{group}/{replica}/")]:
            del self.left[name]

    def note_loss(self, name: str, now: float) -> None:
        """Note that the identity was lost, without an orderly leave."""
        self._losses.setdefault(name, deque(maxlen=16)).append(now)  # 16: by then delays are as long as they get

    def losses(self, name: str, now: float) -> int:
        """Return how often the identity was lost within :data:`FLAP_WINDOW_S`."""
        return sum(now - at <= FLAP_WINDOW_S for at in self._losses.get(name, ()))

    def note_isolation(self, name: str, now: float) -> int:
        """Count a quarantine of the identity; return the count of recent ones."""
        times = self._isolations.setdefault(name, deque(maxlen=16))
        times.append(now)
        return len(times)

    def note_isolated(self, name: str, why: str) -> None:
        """Note that the identity was lost while it was in quarantine."""
        self._isolated[name] = why

    def was_isolated(self, name: str) -> str:
        """Return why the identity was in quarantine when it was lost, and forget it."""
        return self._isolated.pop(name, "")

    def take_unloaded(self) -> dict[str, str]:
        """Return, by name, why replicas failed to load since the last call."""
        found, self.unloaded = self.unloaded, {}
        return found

    def forget_old(self, now: float) -> None:
        """Forget losses and quarantines outside their windows."""
        for known, window_s in ((self._losses, FLAP_WINDOW_S), (self._isolations, ISOLATION_WINDOW_S)):
            for name, times in list(known.items()):
                while times and now - times[0] > window_s:
                    times.popleft()
                if not times:
                    del known[name]

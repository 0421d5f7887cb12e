"""High-water marks: the newest step and version that each replica reached.

They outlast its generations: a replica that is restarted from a checkpoint repeats old
steps, which is no progress. Operations without a ``step=`` tag have no number to
compare, so each of them counts.
"""

from __future__ import annotations

from replicas.messages.identity import Member

__all__ = ["HighWaterMarks"]


class HighWaterMarks:
    """The marks of one channel. A mark never gets smaller."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], tuple[int, int, int]] = {}

    def step(self, member: Member, step: int) -> None:
        """Note a step that a rank has reported, or posted with an operation."""
        self._note(member.group, member.replica, step=step)

    def version(self, group: str, replica: int, version: int) -> None:
        """Note a version that it has published or loaded."""
        self._note(group, replica, version=version)

    def operation(self, member: Member, step: int | None) -> None:
        """Note an operation that it takes part in."""
        if step is None:
            self._note(member.group, member.replica, operations=1)
        else:
            self.step(member, step)

    def of(self, group: str, replica: int) -> tuple[int, int, int]:
        """Return newest step (-1: none), newest version, operations without a step."""
        return self._marks.get((group, replica), (-1, 0, 0))

    def forget(self, group: str, replicas: int) -> None:
        """Forget the replicas of the group from index ``replicas`` on."""
        self._marks = {key: marks for key, marks in self._marks.items() if key[0] != group or key[1] < replicas}

    def _note(self, group: str, replica: int, *, step: int = -1, version: int = 0, operations: int = 0) -> None:
        known = self.of(group, replica)
        self._marks[group, replica] = max(known[0], step), max(known[1], version), known[2] + operations

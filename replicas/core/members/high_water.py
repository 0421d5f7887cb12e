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
        self._steps: dict[tuple[str, int], int] = {}
        self._versions: dict[tuple[str, int], int] = {}
        self._operations: dict[tuple[str, int], int] = {}

    def step(self, member: Member, step: int) -> None:
        """Note a step that a rank has reported, or posted with an operation."""
        self._raise(self._steps, member.group, member.replica, step)

    def version(self, group: str, replica: int, version: int) -> None:
        """Note a version that it has published or loaded."""
        self._raise(self._versions, group, replica, version)

    def operation(self, member: Member, step: int | None) -> None:
        """Note an operation that it takes part in."""
        if step is None:
            key = (member.group, member.replica)
            self._operations[key] = self._operations.get(key, 0) + 1
        else:
            self.step(member, step)

    def of(self, group: str, replica: int) -> tuple[int, int, int]:
        """Return newest step (-1: none), newest version, operations without a step."""
        key = (group, replica)
        return self._steps.get(key, -1), self._versions.get(key, 0), self._operations.get(key, 0)

    def forget(self, group: str, replicas: int) -> None:
        """Forget the replicas of the group from index ``replicas`` on."""
        for marks in (self._steps, self._versions, self._operations):
            for key in [key for key in marks if key[0] == group and key[1] >= replicas]:
                del marks[key]

    @staticmethod
    def _raise(marks: dict[tuple[str, int], int], group: str, replica: int, number: int) -> None:
        marks[group, replica] = max(number, marks.get((group, replica), -1))

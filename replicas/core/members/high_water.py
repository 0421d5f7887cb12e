"""How far each replica has ever come on a channel: its newest step and version, kept
over its generations.

A replica that is started again from a checkpoint repeats old steps: that is no
progress. Operations without a ``step=`` tag have no number that could be compared, so
that each of them counts.
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
        """A rank of it said so, or posted an operation with this tag."""
        self._raise(self._steps, member.group, member.replica, step)

    def version(self, group: str, replica: int, version: int) -> None:
        """It has published, or loaded, this version."""
        self._raise(self._versions, group, replica, version)

    def operation(self, member: Member, step: int | None) -> None:
        """It takes part in an operation."""
        if step is None:
            key = (member.group, member.replica)
            self._operations[key] = self._operations.get(key, 0) + 1
        else:
            self.step(member, step)

    def of(self, group: str, replica: int) -> tuple[int, int, int]:
        """Newest step (-1: none), newest version, number of operations without a
        step."""
        key = (group, replica)
        return self._steps.get(key, -1), self._versions.get(key, 0), self._operations.get(key, 0)

    def forget(self, group: str, replicas: int) -> None:
        """The group has only so many replicas from now on."""
        for marks in (self._steps, self._versions, self._operations):
            for key in [key for key in marks if key[0] == group and key[1] >= replicas]:
                del marks[key]

    @staticmethod
    def _raise(marks: dict[tuple[str, int], int], group: str, replica: int, number: int) -> None:
        marks[group, replica] = max(number, marks.get((group, replica), -1))

"""Recommits: commit an older version's content again, under a new number.

Theory of operation
===================

Version numbers only grow on a target (I2). To go back, the coordinator commits a new
version whose content is that of an older one. No source publishes it, and no bytes
move to hosts that hold the content; the others are caught up
(:mod:`replicas.core.versions.catch_up`).

A recommit takes its number when it is asked for. Publishes with lower numbers end
first, by their own deadlines; those with higher numbers begin to move after it. So a
trainer that publishes all the time does not delay it, and it overtakes no publish.
There is at most one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replicas import errors
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.versions.publishes import Publishes


@dataclass(frozen=True, slots=True, eq=False)
class Recommit:
    """A version that waits for its turn.

    ``number``: its own. ``version``: the one whose content it gets. ``on_end`` is
    called with None when it is committed, or with the error.
    """

    number: int
    version: int
    content: int
    on_end: Callable[[errors.ReplicasError | None], None]


class Recommits:
    """Commits the bytes of an older version again, under a new number; one at a time.

    :param commit: commits it; returns False while the manifest is not known here.
    """

    def __init__(self, context: ChannelContext, publishes: Publishes, commit: Callable[[Recommit], bool]) -> None:
        """Start with none under way.

        :param publishes: give out version numbers.
        :param commit: commits a Recommit; returns False while the manifest of its
            content is not known here.
        """
        self._context, self._publishes, self._commit = context, publishes, commit
        self.waiting: Recommit | None = None

    def begin(self, version: int, on_end: Callable[[errors.ReplicasError | None], None]) -> int:
        """Give the version's content a new number, under which it will be committed.

        Return that number. :meth:`advance` commits it in its turn.

        :param version: an older version, whose bytes the new one has.
        :param on_end: called with None when it is committed, or with the error.
        :raises errors.Busy: another one is under way.
        :raises errors.Gone: no member holds its content.
        """
        if self.waiting is not None:
            text = f"an earlier order is not done: version {self.waiting.number} with the content of {self.waiting.version}"
            raise errors.Busy(text, hint="try again when that version is committed")
        content = self._context.ledger.content(version)
        if not self._context.roster.holders.of(content):
            raise errors.Gone(f"no replica has version {version} now", version=version, hint="publish again")
        number = self._publishes.take_number()
        self.waiting = Recommit(number, version, content, on_end)
        return number

    def blocks(self, number: int) -> bool:
        """Return True if a publish with this number must wait for the recommit."""
        return self.waiting is not None and number > self.waiting.number

    def advance(self) -> None:
        """Commit the waiting version when all publishes with lower numbers have ended.

        Give it up if no member holds its content now. In both cases call ``on_end``.
        Otherwise it keeps waiting.
        """
        one = self.waiting
        if one is None or any(publish.version < one.number for publish in self._publishes.without_verdict()):
            return
        error: errors.ReplicasError | None = None
        if not self._context.roster.holders.of(one.content):
            error = errors.Gone(f"no replica has version {one.version} now", version=one.version, hint="publish again")
        elif not self._commit(one):
            return
        self.waiting = None
        one.on_end(error)

"""What became of operations whose outcome a member could not learn.

Theory of operation
===================

A member whose operation ended without a verdict, after it had said *done*, names its
ref in ``unsettled`` of its later posts; every post names in ``applied`` the newest refs
whose results were written there. When the next collective of a domain has all its
posts, the answer is: applied, if this coordinator gave that verdict itself or if any of
those that take part has applied it. Else nobody has, and as the operation's coordinator
is gone, nobody ever will. That is certain only when everyone who was there before has
spoken: a member from before that cannot take part yet is waited for.

A member that has missed a result must not go on without it: its post is refused with
``Gone``, which names the earlier operation, and the others wait for its next one. It
was told before, and the result is kept there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from replicas import errors
from replicas.messages import OperationPost

__all__ = ["Settling"]

KEPT = 256


class Settling:
    """Verdicts of this term, the newest few, by ref."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[str, bool] = OrderedDict()

    def record(self, ref: str, applied: bool) -> None:
        self._verdicts[ref] = applied
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)

    def answers(self, message: OperationPost, posts: Iterable[OperationPost]) -> dict[str, bool | None]:
        """Whether each unsettled operation of ``message`` was applied; None: nobody
        here knows of it.

        :param posts: all of a collective that is complete.
        """
        applied = {ref for post in posts for ref in post.applied}
        return {ref: self._verdicts.get(ref, True if ref in applied else None) for ref in message.unsettled}

    @staticmethod
    def missed(name: str, refs: Iterable[str]) -> errors.ReplicasError:
        """Why the post of a member that has missed results is refused."""
        listed = ", ".join(refs)
        return errors.Gone(
            f"an earlier operation of {name} ({listed}), whose outcome was unknown there, did succeed for the others",
            phase="wait",
            members=[name],
            hint="wait for its Pending again: its results are kept; or bring this peer to the present state; then call again",
        )

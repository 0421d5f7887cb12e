"""Tell members the outcome of operations that ended for them without a verdict.

A member whose operation ended without a verdict, after it had reported *done*, names
its ref in ``unsettled`` of its later posts; every post names in ``applied`` the newest
refs whose results were written there. When the next collective of a domain has all its
posts, the operation counts as applied if this coordinator gave that verdict itself, or
if any participant has applied it. Otherwise no member has, and none ever will: its
coordinator is gone. That is certain only when every earlier member has posted.

A member that has missed a result must not go on without it: its post is refused with
``Gone``, which names the earlier operation, and the others wait for its next post.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from replicas import errors
from replicas.messages import OperationPost

__all__ = ["Settling"]

KEPT = 256


class Settling:
    """The newest verdicts of this term, by ref."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[str, bool] = OrderedDict()

    def record(self, ref: str, applied: bool) -> None:
        self._verdicts[ref] = applied
        if len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)

    def answers(self, message: OperationPost, posts: Iterable[OperationPost]) -> dict[str, bool | None]:
        """Return whether each unsettled operation was applied, by ref; None: unknown.

        :param posts: all posts of a complete collective.
        """
        applied = {ref for post in posts for ref in post.applied}
        return {ref: self._verdicts.get(ref, True if ref in applied else None) for ref in message.unsettled}

    @staticmethod
    def missed(name: str, refs: Iterable[str]) -> errors.ReplicasError:
        """Return the error that refuses a post after missed results."""
        listed = ", ".join(refs)
        return errors.Gone(
            f"an earlier operation of {name} ({listed}), whose outcome was unknown there, did succeed for the others",
            phase="wait",
            members=[name],
            hint="wait for its Pending again: its results are kept; or bring this peer to the present state; then call again",
        )

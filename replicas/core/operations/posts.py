"""One member's part of an operation, and the checks that parts fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas import errors
from replicas.messages import OperationPost
from replicas.messages.identity import Member

__all__ = ["PAIRWISE", "Post", "disagreement", "miscount", "show"]

PAIRWISE = ("send", "recv")


@dataclass(slots=True, eq=False)
class Post:
    """One member's part.

    :ivar view: the live members of its domain when it came.
    """

    member: Member
    message: OperationPost
    posted_at: float
    deadline: float
    view: tuple[Member, ...] = ()
    started: bool = False

    @property
    def pairwise(self) -> bool:
        return self.message.kind in PAIRWISE


def disagreement(heads: Sequence[Post]) -> errors.ReplicasError | None:
    """Return the error for posts of one collective that disagree, or None."""
    first = heads[0].message
    ragged = first.kind in ("all_gather", "gather", "scatter")
    for post in heads[1:]:
        message = post.message
        same = (message.kind, message.reduce_op, message.root, message.step) == (
            first.kind,
            first.reduce_op,
            first.root,
            first.step,
        )
        if not same or (not ragged and message.segments != first.segments):
            return errors.RanksDisagree(
                f"peers posted different operations: {heads[0].member} {show(heads[0])}, {post.member} {show(post)}",
                phase="wait",
                members=[heads[0].member.name, post.member.name],
            )
    return None


def miscount(heads: Sequence[Post], root: int, first: Sequence[Member]) -> errors.ReplicasError | None:
    """Return the error for a list that lacks one tensor for each member, or None."""
    kind = heads[0].message.kind
    if kind not in ("scatter", "reduce_scatter"):
        return None
    giving = heads if kind == "reduce_scatter" else [heads[root]]
    for post in giving:
        if len(post.message.segments) != len(first):
            return errors.UsageError(
                f"{kind} over {len(first)} members needs {len(first)} tensors, "
                f"{post.member} gave {len(post.message.segments)}",
                phase="wait",
            )
    return None


def show(post: Post) -> str:
    """Return the call as text, for messages."""
    message = post.message
    parts = [f"{segment.dtype}{list(segment.shape)}" for segment in message.segments[:3]]
    more = f" and {len(message.segments) - 3} more" if len(message.segments) > 3 else ""
    root = f" {message.root}" if message.root else ""
    step = f" step={message.step}" if message.step is not None else ""
    op = f" op={message.reduce_op}" if message.kind in ("all_reduce", "reduce", "reduce_scatter") else ""
    return f"{message.kind}({', '.join(parts)}{more}{root}{op}{step})"

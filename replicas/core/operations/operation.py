"""One operation between peers: its current attempt, messages and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from replicas import errors
from replicas.core.moving.lanes import Lane
from replicas.core.operations.pairing import Due
from replicas.core.operations.posts import PAIRWISE, Post
from replicas.messages import OperationGo, ReceiptData
from replicas.messages.identity import Member

__all__ = ["Operation"]


@dataclass(slots=True, eq=False)
class Operation:
    """One operation.

    :ivar posts: of the current participants.
    :ivar left_out: reasons by name.
    :ivar gone: the attempt has been sent.
    :ivar failures: number of failed attempts with these members.
    :ivar problem: message of the last failure.
    :ivar apart: a pair that does not use the lane of its whole domain.
    """

    number: int
    ref: str
    channel: str
    due: Due
    posts: tuple[Post, ...]
    deadline: float
    posted_at: float
    started_at: float
    attempt_at: float
    attempt: int = 1
    gone: bool = False
    parked: bool = False
    ran_at: float = 0.0
    failures: int = 0
    problem: str = ""
    apart: bool = False
    lane: Lane | None = None
    done: set[Member] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.due.kind

    @property
    def pairwise(self) -> bool:
        return self.kind in PAIRWISE

    @property
    def participants(self) -> tuple[Member, ...]:
        return tuple(post.member for post in self.posts)

    @property
    def root(self) -> int:
        """Index of the root among the posts; -1: it has none, or runs without it."""
        return self.posts.index(self.due.posts[self.due.root]) if self._has_root else -1

    @property
    def _has_root(self) -> bool:
        return self.due.root >= 0 and self.due.posts[self.due.root] in self.posts

    @property
    def phase(self) -> str:
        return "transfer" if self.gone else "form"

    def can_do_without(self, member: Member) -> bool:
        """Return whether the others can do it without this member."""
        root = self.due.posts[self.due.root].member if self.due.root >= 0 else None
        return not self.pairwise and member != root and len(self.posts) > 1

    def go(self, post: Post, lane: Lane, now: float) -> OperationGo:
        """Return the message that starts one member's attempt."""
        members = self.participants
        segments = tuple(post.message.segments for post in self.posts)
        if self.pairwise:
            sent = self.posts[self.root].message.segments
            segments = (sent, sent)
        return OperationGo(
            post=post.message.post,
            operation=self.number,
            lane=lane.name,
            participants=members,
            lane_ranks=tuple(lane.ranks[member] for member in members),
            segments=segments,
            root=self.root,
            deadline_s=max(0.0, self.deadline - now),
            ref=self.ref,
            attempt=self.attempt,
            places=tuple(self.due.first.index(member) for member in members),
        )

    def receipt(self, epoch: int, now: float) -> ReceiptData:
        """Return the receipt of a success at ``now``."""
        phases = {
            "wait": self.started_at - self.posted_at,
            "form": self.ran_at - self.attempt_at,
            "run": now - self.ran_at,
        }
        if self.attempt > 1 or self.left_out:
            phases["retry"] = self.attempt_at - self.started_at
        return ReceiptData(
            epoch=epoch,
            members=self.participants,
            lost=tuple(self.left_out),
            nbytes=0,
            seconds=now - self.posted_at,
            phases=phases,
            reasons=dict(self.left_out),
        )

    def error(
        self,
        kind: type[errors.ReplicasError],
        text: str,
        *,
        members: Sequence[str] | None = None,
        phase: str | None = None,
        hint: str | None = None,
    ) -> errors.ReplicasError:
        """Return an error for all participants."""
        return kind(
            f"{self.kind} {text}",
            channel=self.channel,
            phase=phase or self.phase,
            members=[member.name for member in self.participants] if members is None else members,
            hint=hint or None,
        )

    def overdue(self) -> errors.ReplicasError:
        """Return the error of a passed deadline: the phase, and the missing members."""
        what, answered = "did not end", self.done
        if not self.gone:
            what = "had no process group"
            answered = self.lane.formed_by if self.lane is not None else set()
        missing = [member.name for member in self.participants if member not in answered]
        before = f"; the attempt before failed: {self.problem}" if self.problem else ""
        text = f"{what} by its deadline: no answer from {', '.join(missing)}{before}"
        return self.error(errors.DeadlineExceeded, text, members=missing)

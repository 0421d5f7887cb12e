"""One operation between peers: its posts, current attempt, messages and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from replicas import errors
from replicas.core.base.membership import OPERATION, OperationEvent, OperationState
from replicas.core.members.roster import Roster
from replicas.core.moving.lanes import Lane, Probe
from replicas.messages import OperationGo, OperationPost, ReceiptData
from replicas.messages.bounds import texts_of
from replicas.messages.identity import Member

PAIRWISE = ("send", "recv")

ATTEMPT_MIN_S = 0.2
"""With less time than this left, a failed attempt is the last one."""


@dataclass(slots=True, eq=False)
class Post:
    """One member's call of an operation.

    :ivar view: the live members of its domain at the call.
    :ivar missed: the error to reply, when it is due: the others ran without this call.
    """

    member: Member
    message: OperationPost
    posted_at: float
    deadline: float
    view: tuple[Member, ...] = ()
    started: bool = False
    missed: errors.ReplicasError | None = None

    @property
    def pairwise(self) -> bool:
        return self.message.kind in PAIRWISE


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, from the moment when it can start.

    Its states are the table :data:`replicas.core.base.membership.OPERATION`.

    :ivar posts: of the current participants.
    :ivar root_post: the root's post, or None without a root.
    :ivar first: the members that the posts expect, in order.
    :ivar number: of the current attempt. ``ref`` names the operation.
    :ivar left_out: reasons by name.
    :ivar failures: number of failed attempts with these members.
    :ivar problem: message of the last failure.
    """

    kind: str
    posts: tuple[Post, ...]
    root_post: Post | None
    domain: int
    first: tuple[Member, ...]
    channel: str
    number: int = 0
    ref: str = ""
    started_at: float = 0.0
    attempt_at: float = 0.0
    attempt: int = 1
    state: OperationState = "due"
    ran_at: float = 0.0
    failures: int = 0
    problem: str = ""
    lane: Lane | None = None
    probes: int = 0
    probe: Probe | None = None
    done: set[Member] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    deadline: float = field(init=False)
    posted_at: float = field(init=False)

    def __post_init__(self) -> None:
        # the verdict is common: the earliest deadline counts for all
        self.deadline = min(post.deadline for post in self.posts)
        self.posted_at = min(post.posted_at for post in self.posts)

    def step(self, event: OperationEvent) -> None:
        """Change the state by the table."""
        self.state = OPERATION.next(self.state, event)

    @property
    def ended(self) -> bool:
        return OPERATION.final(self.state)

    @property
    def pairwise(self) -> bool:
        return self.kind in PAIRWISE

    @property
    def participants(self) -> tuple[Member, ...]:
        return tuple(post.member for post in self.posts)

    @property
    def awaited(self) -> list[Member]:
        """Participants that have not reported done."""
        return [member for member in self.participants if member not in self.done]

    @property
    def root(self) -> int:
        """Index of the root among the posts, or -1 without a root."""
        return self.posts.index(self.root_post) if self.root_post in self.posts else -1

    @property
    def phase(self) -> str:
        return "transfer" if self.state == "running" else "form"

    def can_do_without(self, member: Member) -> bool:
        """Return True if the others can end the operation without this member."""
        root = self.root_post.member if self.root_post is not None else None
        return not self.pairwise and member != root and len(self.posts) > 1

    def go(self, post: Post, lane: Lane, now: float) -> OperationGo:
        """Return the message that starts one member's attempt."""
        members = self.participants
        segments = tuple(post.message.segments for post in self.posts)
        if self.pairwise:
            segments = (self.posts[self.root].message.segments,) * 2  # a recv may have no segments
        return OperationGo(
            post=post.message.post,
            operation=self.number,
            lane=lane.name,
            participants=members,
            # a pair may run in a larger lane, with other numbers
            lane_ranks=tuple(lane.ranks[member] for member in members),
            segments=segments,
            root=self.root,
            deadline_s=max(0.0, self.deadline - now),
            ref=self.ref,
            attempt=self.attempt,
            # indices in the first attempt: members may have been left out since
            places=tuple(self.first.index(member) for member in members),
        )

    def receipt(self, epoch: int, now: float) -> ReceiptData:
        """Return the receipt of a success at ``now``."""
        phases = {
            "wait": self.started_at - self.posted_at,
            "form": self.ran_at - self.attempt_at,
            "run": now - self.ran_at,
        }
        if self.attempt > 1 or self.left_out:
            phases["retry"] = self.attempt_at - self.started_at  # the earlier attempts
        return ReceiptData(
            epoch=epoch,
            members=self.participants,
            lost=tuple(self.left_out),
            nbytes=0,
            seconds=now - self.posted_at,
            phases=phases,
            reasons=texts_of(self.left_out),
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
        """Return the error of a passed deadline, with phase and missing members."""
        what, answered = "did not end", self.done
        if self.state != "running":
            what = "had no process group"
            answered = self.lane.formed_by if self.lane is not None else set()
        missing = [member.name for member in self.participants if member not in answered]
        before = f"; the previous attempt failed: {self.problem}" if self.problem else ""
        text = f"{what} by its deadline: no answer from {', '.join(missing)}{before}"
        return self.error(errors.DeadlineExceeded, text, members=missing)


class Faults:
    """Decides how to continue when an operation fails with all its members alive."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._proven: set[Member] = set()
        """Members that took part in a successful collective."""

    def succeeded(self, operation: Operation) -> None:
        if not operation.pairwise and len(operation.posts) > 1:
            self._proven.update(operation.participants)

    def lost(self, member: Member) -> None:
        self._proven.discard(member)

    def order_by_importance(self, operation: Operation) -> list[Member]:
        """Return the participants: root first, then proven members, then the rest."""
        root = operation.participants[operation.root] if operation.root >= 0 else None
        # False sorts before True
        return sorted(operation.participants, key=lambda member: (member != root, not self._has_worked(member)))

    def _has_worked(self, member: Member) -> bool:
        """Return True if the member has worked, or may have before this coordinator."""
        state = self._roster.get(member)
        return member in self._proven or (state is not None and state.from_before)

    def judge_failure(
        self, operation: Operation, lane: Lane | None, error: errors.ReplicasError, now: float, *, final: bool = False
    ) -> tuple[Literal["again", "stuck", "end"], errors.ReplicasError]:
        """Judge a failure in ``lane``, which is counted already.

        ``final``: another attempt with the same group would fail in the same way.

        :returns: (next step, error to end with). ``again`` tries another lane,
            ``stuck`` finds the culprit or ends, ``end`` ends.
        """
        refused = isinstance(error, (errors.UsageError, errors.WorldError)) or error.phase == "go"
        parted = lane is not None and isinstance(error, errors.Preflight) and self._link_broke(operation, lane, error)
        if refused and not parted:
            return "end", error
        if operation.deadline - now < ATTEMPT_MIN_S:
            text = f"did not end by its deadline: {error.message}"
            members = error.members or None
            return "end", operation.error(errors.DeadlineExceeded, text, members=members, phase=error.phase)
        if parted:
            return "stuck", error
        if operation.failures > 1 or (final and not operation.pairwise):
            times = "twice" if operation.failures > 1 else "and was not retried,"
            text = f"failed {times} with all its members alive: {error.message}"
            kind = errors.InternalError if isinstance(error, errors.InternalError) else errors.SyncError
            return "stuck", operation.error(kind, text, phase=error.phase, hint=error.hint)
        return "again", error

    def _link_broke(self, operation: Operation, lane: Lane, error: errors.ReplicasError) -> bool:
        """Return True if members of the lane can no longer reach each other.

        A group that never worked is a configuration error instead.
        """
        if operation.pairwise or {member.name for member in lane.members}.isdisjoint(error.members):
            return False
        return self._roster.config.on_lost != "raise" and sum(map(self._has_worked, lane.members)) > 1

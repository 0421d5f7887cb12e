"""One operation between peers: its posts, current attempt, messages and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicas import errors
from replicas.common.sizes import count_text
from replicas.core.base.membership import OPERATION, OperationEvent, OperationState
from replicas.core.members.roster import Roster
from replicas.core.operations.lanes import Lane
from replicas.messages import OperationGo, OperationPost, ReceiptData
from replicas.messages.bounds import texts_of
from replicas.messages.identity import Member

PAIRWISE = ("send", "recv")

ATTEMPT_MIN_S = 0.2
"""With less time than this left, a failed attempt is the last one."""
RESYNC_HINT = "load the others' present state into this peer, then go on: its next call meets the others' next call"
LINK_HINT = "check the network between the hosts of these members: all TCP ports must be open, both ways"


@dataclass(slots=True, eq=False)
class Post:
    """One member's call of an operation: a collective, ``send`` or ``recv``.

    :ivar view: the live members of its domain at the call.
    """

    member: Member
    message: OperationPost
    posted_at: float
    deadline: float
    view: tuple[Member, ...] = ()
    started: bool = False

    @property
    def pairwise(self) -> bool:
        """True for a ``send`` or a ``recv``, which concern two members only."""
        return self.message.kind in PAIRWISE


@dataclass(slots=True, eq=False)
class Operation:
    """One operation (a collective, a ``send`` with its ``recv``, or the broadcast of a
    version), from the moment when it can start.

    Its states are the table :data:`replicas.core.base.membership.OPERATION`.

    :ivar posts: the calls of the current participants, one of each member.
    :ivar root_post: the root's post, or None without a root.
    :ivar first: the members that the posts expect, in order.
    :ivar number: of the current attempt. ``ref`` names the operation.
    :ivar left_out: reasons by name.
    :ivar failures: number of failed attempts with these members, without lanes that did
        not form in time.
    :ivar problem: message of the last failure.
    :ivar transfer: number of a transfer's attempt if it broadcasts a version, else 0:
        all of its members are needed, and it is tried once.
    :ivar on_end: called at the end of such a broadcast, with its error or None, the
        time that its group took to form, and the time.
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
    transfer: int = 0
    on_end: Callable[[errors.ReplicasError | None, float, float], None] | None = None
    done: set[Member] = field(default_factory=set)
    left_out: dict[str, str] = field(default_factory=dict)
    deadline: float = field(init=False)
    posted_at: float = field(init=False)

    def __post_init__(self) -> None:
        """Set ``deadline`` and ``posted_at`` to the earliest of the posts, which count
        for all."""
        # the verdict is common: the earliest deadline counts for all
        self.deadline = min(post.deadline for post in self.posts)
        self.posted_at = min(post.posted_at for post in self.posts)

    def step(self, event: OperationEvent) -> None:
        """Change the state by the table ``OPERATION``; send nothing.

        :raises replicas.common.table.InvalidStep: ``event`` cannot happen now.
        """
        self.state = OPERATION.next(self.state, event)

    @property
    def ended(self) -> bool:
        """True if the operation is done or failed."""
        return OPERATION.final(self.state)

    @property
    def pairwise(self) -> bool:
        """True for a ``send`` with its ``recv``."""
        return self.kind in PAIRWISE

    @property
    def participants(self) -> tuple[Member, ...]:
        """The members that take part, without those that were left out; each once.

        In the order of :attr:`posts`, which are their calls of the operation: by group,
        replica and rank; in a version's broadcast the holder first.
        """
        return tuple(post.member for post in self.posts)

    @property
    def awaited(self) -> list[Member]:
        """Participants that have not reported that the operation has run."""
        return [member for member in self.participants if member not in self.done]

    @property
    def root(self) -> int:
        """Index of the root among :attr:`participants`, or -1 without a root."""
        return self.posts.index(self.root_post) if self.root_post in self.posts else -1

    @property
    def phase(self) -> str:
        """Present phase, for errors: ``transfer`` if it runs, else ``form``."""
        return "transfer" if self.state == "running" else "form"

    def can_do_without(self, member: Member) -> bool:
        """Return True if the others can end the operation without this member.

        Return False for the root, for both members of a ``send`` and ``recv``, for each
        member of a version's broadcast, and for the last member.
        """
        root = self.root_post.member if self.root_post is not None else None
        return not (self.pairwise or self.transfer) and member != root and len(self.posts) > 1

    def go(self, post: Post, lane: Lane, now: float) -> OperationGo:
        """Return the message that starts the attempt on one member; send nothing.

        :param post: the member's post, whose number the message names.
        :param lane: the formed process group in which it runs.
        """
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
            transfer=self.transfer,
        )

    def receipt(self, epoch: int, now: float) -> ReceiptData:
        """Return the receipt of a success at ``now``, the same for all participants.

        :param epoch: number of the present membership.
        """
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
        """Return (do not raise) an error whose text begins with the operation.

        :param kind: class of the error.
        :param members: names that it concerns; default: all participants.
        :param phase: default: the present one.
        :param hint: what the caller can do about it.
        """
        return kind(
            f"{self.kind} {text}",
            channel=self.channel,
            phase=phase or self.phase,
            members=[member.name for member in self.participants] if members is None else members,
            hint=hint or None,
        )

    def final_error(self, error: errors.ReplicasError, now: float) -> errors.ReplicasError | None:
        """Return the error with which the operation must end after a failed attempt.

        Return None if it may be tried again. Nothing is changed: the caller has counted
        the failure in :attr:`failures`.

        :param error: why the attempt failed.
        """
        if isinstance(error, (errors.UsageError, errors.WorldError)) or error.phase == "go":
            return error
        kind: type[errors.ReplicasError] = errors.SyncError
        text = f"failed twice, though all its members live: {error.message}"
        if self.deadline - now < ATTEMPT_MIN_S:
            kind, text = errors.DeadlineExceeded, f"did not end by its deadline: {error.message}"
        elif self.failures < 2:
            return None
        elif isinstance(error, errors.InternalError):
            kind = errors.InternalError
        return self.error(kind, text, members=error.members or None, phase=error.phase, hint=error.hint)

    def overdue_error(self) -> errors.ReplicasError:
        """Return (do not raise) the error of an operation past its deadline.

        It names the members that have not answered.
        """
        what, answered = "did not end", self.done
        if self.state != "running":
            what = "had no process group"
            answered = self.lane.formed_by if self.lane is not None else set()
        missing = [member.name for member in self.participants if member not in answered]
        before = f"; an earlier attempt failed ({self.problem})" if self.problem else ""
        text = f"{what} by its deadline: no answer from {', '.join(missing)}{before}"
        return self.error(errors.DeadlineExceeded, text, members=missing)


def missed(text: str, member: Member, phase: str = "wait", *, hint: str = RESYNC_HINT) -> errors.Gone:
    """Return (do not raise) the error of a member that missed what the others have
    done.

    :param text: the whole message.
    :param phase: the member's phase at that time.
    :param hint: what the member can do about it.
    """
    return errors.Gone(text, phase=phase, members=[member.name], hint=hint)


def never_joined(name: str, roster: Roster) -> str:
    """Return a note for an error if the peer called ``name`` has never joined; else "".

    :param name: ``group/replica/rank``, which may have a wrong number.
    """
    shape = roster.groups.get(name.partition("/")[0])
    size = f"; its group has {count_text(shape.replicas, 'replica')}" if shape is not None else ""
    return "" if name in roster.history.joined else f" (it has never joined{size})"

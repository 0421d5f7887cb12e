"""Operations between peers: pairing what they posted, running it, and one verdict for all.

Theory of operation
===================

A *domain* is the set of peers that form one process group: all leaders (``ranks = "leader"``), all ranks of one number
(``"each"``) or everybody (``"all"``). Each member's posts form one ordered stream. A collective is due when it is the
oldest unstarted post of every live member of the domain, they agree on it, and no peer that the config promises has yet to
join for the first time. ``send`` and ``recv`` are due when the oldest unstarted ones of that pair meet; those to or from
different peers do not wait for each other, but none overtakes a collective.

A due operation gets a number, runs in the domain's lane, and is over when every participant has said *done* (then all are
told to write their results) or one has failed, died or the deadline has passed (then nobody writes anything, and the lane
is dead: bytes may have moved in it).

``step`` tags: a collective pairs equal tags only. A member that posts a tag that the stream has passed gets ``Gone``,
members that post different new tags get ``RanksDisagree``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicas import errors
from replicas.core.effects import Effect, Emit, OperationEnded, Send
from replicas.core.identity import Member
from replicas.core.lanes import Lane, Lanes
from replicas.core.roster import MemberState, Roster
from replicas.messages import (
    Backend,
    OperationEnd,
    OperationGo,
    OperationPost,
    ReceiptData,
    Segment,
    WireError,
)

__all__ = ["Operation", "Operations"]

PAIRWISE = ("send", "recv")


@dataclass(slots=True, eq=False)
class Post:
    """One member's part. ``operation``: its number once started."""

    member: Member
    message: OperationPost
    posted_at: float
    deadline: float
    operation: int = 0


@dataclass(slots=True, eq=False)
class Operation:
    number: int
    kind: str
    posts: tuple[Post, ...]
    root: int
    domain: int
    deadline: float
    posted_at: float
    gone: bool = False
    lane: Lane | None = None
    started_at: float = 0.0
    done: set[Member] = field(default_factory=set)

    @property
    def participants(self) -> tuple[Member, ...]:
        return tuple(post.member for post in self.posts)


class Operations:
    """All operations of one channel of peers."""

    def __init__(self, roster: Roster, lanes: Lanes, out: Callable[[Effect], None], next_id: Callable[[], int]) -> None:
        self._roster = roster
        self._lanes = lanes
        self._out = out
        self._next_id = next_id
        self._streams: dict[Member, list[Post]] = {}
        self._running: dict[int, Operation] = {}
        self._domain_lanes: dict[tuple[int, Backend], Lane] = {}
        self._steps: dict[int, int] = {}
        self.lost_names: set[str] = set()
        self.totals: dict[str, int] = {}
        self.retired: list[Lane] = []

    # ------------------------------------------------------------ domains

    def domain_of(self, member: Member) -> int:
        """Number of the member's domain: its rank with ``ranks = "each"``, else 0."""
        return member.rank if self._ranks == "each" else 0

    @property
    def _ranks(self) -> str:
        return self._roster.config.peers[0].ranks if self._roster.config.peers else "leader"

    def _live(self, domain: int) -> list[MemberState]:
        peers = [state for state in self._roster.live if state.is_peer and state.carries]
        return [state for state in peers if self.domain_of(state.member) == domain]

    def _awaited(self, domain: int) -> list[str]:
        """Names that the config promises in this domain and that never joined."""
        names = []
        for party in self._roster.config.peers:
            shape = self._roster.shape(party.group)
            for replica in range(shape.replicas):
                if self._ranks == "all":
                    ranks: Sequence[int] = range(shape.world_size)
                elif self._ranks == "each":
                    ranks = [domain] if domain < shape.world_size else []
                else:
                    ranks = [0]
                names += [f"{party.group}/{replica}/{rank}" for rank in ranks]
        return [name for name in names if name not in self._roster.seen]

    @property
    def running_collective(self) -> bool:
        return any(operation.kind not in PAIRWISE for operation in self._running.values())

    def posted(self, member: Member) -> bool:
        """Whether the member waits for an operation."""
        return bool(self._streams.get(member))

    # ------------------------------------------------------------ posting and pairing

    def post(self, member: Member, message: OperationPost, now: float) -> None:
        state = self._roster.get(member)
        if state is None:
            return
        post = Post(member, message, now, now + message.deadline_s)
        if not state.carries:
            error: errors.ReplicasError = errors.UsageError(
                f"{member} takes no part in operations of this channel: only leaders do",
                hint='set ranks = "each" or "all" for the peers of the channel',
            )
            self._reply(post, error)
            return
        if message.step is not None and message.kind not in PAIRWISE:
            passed = self._steps.get(self.domain_of(member), -1)
            if message.step <= passed:
                hint = "bring this peer to the present state, then go on with the others' next step"
                error = errors.Gone(f"step {message.step} has passed: the others have done step {passed}", hint=hint)
                self._reply(post, error)
                return
        self._streams.setdefault(member, []).append(post)
        if message.kind in PAIRWISE and (peer := self._peer_problem(member, message)) is not None:
            self._refuse(post, peer)

    def _peer_problem(self, member: Member, message: OperationPost) -> errors.ReplicasError | None:
        name = self._full_name(message.root)
        if name == member.name:
            return errors.UsageError(f"{message.kind}: {message.root} is this member itself")
        known = {f"{party.group}/" for party in self._roster.config.peers}
        if not any(name.startswith(group) for group in known):
            return errors.UsageError(f"{message.kind}: {message.root!r} names no peer of this channel")
        if name in self.lost_names and self._roster.holder_of(name) is None:
            return errors.PeersLost(
                f"{name} is lost", members=[name], hint="it can be reached when it has joined again"
            )
        return None

    @staticmethod
    def _full_name(name: str, rank: int = 0) -> str:
        return name if name.count("/") >= 2 else f"{name}/{rank}"

    def _name(self, root: str, member: Member) -> str:
        return self._full_name(root, member.rank if self._ranks == "each" else 0)

    def advance(self, now: float) -> None:
        """Start everything that is due."""
        for domain in sorted({self.domain_of(member) for member in self._streams}):
            self._start_pairs(domain, now)
            self._start_collective(domain, now)
        for operation in list(self._running.values()):
            self._run(operation, now)

    def _unstarted(self, member: Member) -> list[Post]:
        return [post for post in self._streams.get(member, []) if not post.operation]

    def _pairable(self, member: Member) -> list[Post]:
        """Unstarted sends and receives before the first unstarted collective."""
        posts = []
        for post in self._unstarted(member):
            if post.message.kind not in PAIRWISE:
                break
            posts.append(post)
        return posts

    def _start_pairs(self, domain: int, now: float) -> None:
        live = [state.member for state in self._live(domain)]
        by_name = {member.name: member for member in live}
        for receiver in live:
            for want in [post for post in self._pairable(receiver) if post.message.kind == "recv"]:
                sender = by_name.get(self._name(want.message.root, receiver))
                if sender is None:
                    continue
                give = next(
                    (
                        post
                        for post in self._pairable(sender)
                        if post.message.kind == "send" and self._name(post.message.root, sender) == receiver.name
                    ),
                    None,
                )
                if give is not None:
                    self._start_pair(domain, give, want, now)

    def _start_pair(self, domain: int, give: Post, want: Post, now: float) -> None:
        if want.message.segments and want.message.segments != give.message.segments:
            text = f"{give.member} sends {_show(give)}, {want.member} expects {_show(want)}"
            for post in (give, want):
                self._refuse(post, errors.RanksDisagree(text))
            return
        posts = tuple(sorted((give, want), key=lambda post: post.member))
        self._start("send", posts, posts.index(give), domain, now)

    def _start_collective(self, domain: int, now: float) -> None:
        live = [state.member for state in self._live(domain)]
        heads: list[Post] = []
        for member in live:
            unstarted = self._unstarted(member)
            if not unstarted or unstarted[0].message.kind in PAIRWISE:
                return
            heads.append(unstarted[0])
        if not heads or self._awaited(domain):
            return
        problem = self._disagreement(heads)
        root = self._root_of(heads[0], live) if problem is None else -1
        if problem is None and heads[0].message.root and root < 0:
            name = heads[0].message.root
            kind: type[errors.ReplicasError] = errors.UsageError
            if any(lost == name or lost.startswith(f"{name}/") for lost in self.lost_names):
                kind = errors.PeersLost
            problem = kind(f"{heads[0].message.kind}: {name} is not a live member of this channel", members=[name])
        if problem is not None:
            for post in heads:
                self._refuse(post, problem)
            return
        self._start(heads[0].message.kind, tuple(heads), root, domain, now)

    def _root_of(self, post: Post, live: Sequence[Member]) -> int:
        if not post.message.root:
            return -1
        name = self._name(post.message.root, post.member)
        return next((i for i, member in enumerate(live) if member.name == name), -1)

    def _disagreement(self, heads: Sequence[Post]) -> errors.ReplicasError | None:
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
                    f"peers posted different operations: {heads[0].member} {_show(heads[0])}, {post.member} {_show(post)}",
                    members=[heads[0].member.name, post.member.name],
                )
        if first.kind in ("scatter", "reduce_scatter"):
            for post in heads:
                is_root = first.kind == "reduce_scatter" or self._name(first.root, post.member) == post.member.name
                if is_root and len(post.message.segments) != len(heads):
                    return errors.UsageError(
                        f"{first.kind} over {len(heads)} members needs {len(heads)} tensors, "
                        f"{post.member} gave {len(post.message.segments)}"
                    )
        return None

    # ------------------------------------------------------------ running

    def _start(self, kind: str, posts: tuple[Post, ...], root: int, domain: int, now: float) -> None:
        number = self._next_id()
        operation = Operation(
            number=number,
            kind=kind,
            posts=posts,
            root=root,
            domain=domain,
            deadline=min(post.deadline for post in posts),
            posted_at=min(post.posted_at for post in posts),
            started_at=now,
        )
        for post in posts:
            post.operation = number
            if kind not in PAIRWISE and post.message.step is not None:
                self._steps[domain] = post.message.step
        self._running[number] = operation

    def _lane_for(self, operation: Operation, now: float) -> Lane:
        backend = self._backend(operation)
        key = (operation.domain, backend)
        states = self._live(operation.domain)
        members = tuple(state.member for state in states)
        lane = self._domain_lanes.get(key)
        if lane is None or lane.state == "dead" or lane.members != members:
            if lane is not None and lane.state != "dead":
                self.retired.append(lane)
            effects: list[Effect] = []
            timeout_s = max(0.001, operation.deadline - now)
            lane = self._lanes.open(self._roster.epoch, states, backend, now, timeout_s, effects)
            for effect in effects:
                self._out(effect)
            self._domain_lanes[key] = lane
        return lane

    def _backend(self, operation: Operation) -> Backend:
        wanted = self._roster.config.backend
        if wanted != "auto":
            return wanted
        cuda = all(post.message.device == "cuda" for post in operation.posts)
        devices = [s.hello.cuda_devices[0] for s in self._live(operation.domain) if s.hello.cuda_devices]
        distinct = len(set(devices)) == len(self._live(operation.domain))
        return "nccl" if cuda and distinct else "gloo"

    def _run(self, operation: Operation, now: float) -> None:
        """Send the operation into its lane, once that has formed."""
        if operation.gone:
            return
        if operation.lane is None:
            operation.lane = self._lane_for(operation, now)
        lane = operation.lane
        if lane.state != "formed":
            return
        operation.gone = True
        lane_ranks = tuple(lane.rank(member) for member in operation.participants)
        segments: tuple[tuple[Segment, ...], ...] = tuple(post.message.segments for post in operation.posts)
        if operation.kind in PAIRWISE:
            sent = operation.posts[operation.root].message.segments
            segments = (sent, sent)
        for post in operation.posts:
            go = OperationGo(
                post=post.message.post,
                operation=operation.number,
                lane=lane.name,
                participants=operation.participants,
                lane_ranks=lane_ranks,
                segments=segments,
                root=operation.root,
                deadline_s=max(0.0, operation.deadline - now),
            )
            self._out(Send(post.member, go))

    def done(self, member: Member, number: int, now: float) -> None:
        operation = self._running.get(number)
        if operation is None or member not in operation.participants or not operation.gone:
            return
        operation.done.add(member)
        if len(operation.done) == len(operation.posts):
            self._finish(operation, None, now)

    def failed(self, member: Member, number: int, error: errors.ReplicasError, now: float) -> None:
        operation = self._running.get(number)
        if operation is not None and member in operation.participants:
            self._fail(operation, error, now)

    def _fail(self, operation: Operation, error: errors.ReplicasError, now: float) -> None:
        """Bytes may have moved: the lane is dead, and with it everything else that runs in it."""
        lane = operation.lane
        self._finish(operation, error, now)
        if lane is not None and operation.gone:
            self.lane_failed(lane, error, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        effects: list[Effect] = []
        gone = frozenset(member for member in lane.members if member not in self._roster)
        self._lanes.close(lane, effects, gone=gone, reason="lost" if isinstance(error, errors.PeersLost) else "failed")
        for effect in effects:
            self._out(effect)
        self._domain_lanes = {key: kept for key, kept in self._domain_lanes.items() if kept is not lane}
        self.retired = [kept for kept in self.retired if kept is not lane]
        for operation in [op for op in self._running.values() if op.lane is lane]:
            self._finish(operation, error, now)

    def _finish(self, operation: Operation, error: errors.ReplicasError | None, now: float) -> None:
        del self._running[operation.number]
        seconds = now - operation.posted_at
        receipt = None
        if error is None:
            receipt = ReceiptData(
                epoch=self._roster.epoch,
                members=operation.participants,
                lost=(),
                nbytes=0,
                seconds=seconds,
                phases={"wait": operation.started_at - operation.posted_at, "run": now - operation.started_at},
            )
        for post in operation.posts:
            self._reply(post, error, receipt)
            self._streams[post.member] = [kept for kept in self._streams.get(post.member, []) if kept is not post]
        outcome = "ok" if error is None else type(error).__name__
        self.totals[outcome] = self.totals.get(outcome, 0) + 1
        self._out(Emit(OperationEnded(self._roster.config.name, operation.kind, outcome, seconds)))

    def _reply(self, post: Post, error: errors.ReplicasError | None = None, receipt: ReceiptData | None = None) -> None:
        if post.member in self._roster:
            wire = WireError.of(error) if error is not None else None
            self._out(Send(post.member, OperationEnd(post.message.post, receipt, wire)))

    def _refuse(self, post: Post, error: errors.ReplicasError) -> None:
        """End a post that never started."""
        self._streams[post.member] = [kept for kept in self._streams[post.member] if kept is not post]
        self._reply(post, error)

    # ------------------------------------------------------------ losses and time

    def joined(self, member: Member) -> None:
        self.lost_names.discard(member.name)

    def lost(self, member: Member, now: float) -> None:
        """The member is gone (already out of the roster): fail what it took part in, and what waits for it."""
        self.lost_names.add(member.name)
        self._streams.pop(member, None)
        error = errors.PeersLost(f"{member} was lost", members=[member.name], channel=self._roster.config.name)
        for operation in list(self._running.values()):
            if operation.number in self._running and member in operation.participants:
                self._fail(operation, error, now)
        for operation in list(self._running.values()):
            if not operation.gone:
                operation.lane = None
        for lane in [
            lane for lane in self._domain_lanes.values() if member in lane.members and lane.state == "forming"
        ]:
            self.lane_failed(lane, error, now)
        for posts in list(self._streams.values()):
            for post in [post for post in posts if not post.operation]:
                waits = post.message.kind in PAIRWISE and self._name(post.message.root, post.member) == member.name
                if waits or (self._roster.config.on_lost == "raise" and post.message.kind not in PAIRWISE):
                    self._refuse(post, error)

    def store_moved(self, now: float) -> None:
        """Lanes that are forming over the old store never will: operations that wait for one get another."""
        for lane in [lane for lane in self._domain_lanes.values() if lane.state == "forming"]:
            for operation in self._running.values():
                if operation.lane is lane:
                    operation.lane = None
            self.lane_failed(lane, errors.SyncError("the store was replaced", phase="form"), now)

    def tick(self, now: float) -> None:
        for operation in list(self._running.values()):
            if operation.number in self._running and now > operation.deadline:
                missing = ", ".join(str(m) for m in operation.participants if m not in operation.done)
                self._fail(operation, errors.DeadlineExceeded(f"{operation.kind}: no answer from {missing}"), now)
        for member in list(self._streams):
            for post in [post for post in self._streams[member] if not post.operation and now > post.deadline]:
                self._refuse(post, self._late(post))
        self._close_retired()

    def _late(self, post: Post) -> errors.ReplicasError:
        kind = post.message.kind
        if kind in PAIRWISE:
            waits_for = [post.message.root]
        else:
            domain = self.domain_of(post.member)
            live = [state.member for state in self._live(domain)]
            waits_for = [m.name for m in live if not self._unstarted(m)] + self._awaited(domain)
        return errors.DeadlineExceeded(f"{kind}: waited for {', '.join(waits_for)}", phase="wait", members=waits_for)

    def _close_retired(self) -> None:
        busy = {operation.lane.name for operation in self._running.values() if operation.lane is not None}
        live = {state.member for state in self._roster.live}
        for key, lane in list(self._domain_lanes.items()):
            if lane.state == "dead" or not set(lane.members) <= live:
                del self._domain_lanes[key]
                self.retired.append(lane)
        for lane in [lane for lane in self.retired if lane.name not in busy]:
            effects: list[Effect] = []
            self._lanes.close(lane, effects, gone=frozenset(m for m in lane.members if m not in self._roster))
            self.retired.remove(lane)
            for effect in effects:
                self._out(effect)


def _show(post: Post) -> str:
    message = post.message
    parts = [f"{segment.dtype}{list(segment.shape)}" for segment in message.segments[:3]]
    more = f" and {len(message.segments) - 3} more" if len(message.segments) > 3 else ""
    root = f" {message.root}" if message.root else ""
    step = f" step={message.step}" if message.step is not None else ""
    op = f" op={message.reduce_op}" if message.kind in ("all_reduce", "reduce", "reduce_scatter") else ""
    return f"{message.kind}({', '.join(parts)}{more}{root}{op}{step})"

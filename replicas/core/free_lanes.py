"""Free lanes: collectives that run ahead of the coordinator's word.

Theory of operation
===================

Two round trips to the coordinator cost more than a small collective itself. So when the members of a domain have done a few
in a row in one lane, with nothing else going on, the lane is set *free*: its members run collectives of simple kinds in it
without asking, one *turn* each, in the order of their calls. The lane itself does what the coordinator did:

1. each sidecar runs the operation into its outputs, and notes in memory that it shares with its rank that it is *ready*;
2. all sidecars *vote*: one tiny exchange (:mod:`replicas.sidecar.mesh`), in which they also compare what they were asked to
   do. A member that has everybody's vote knows that all were ready, and writes its results: it has *applied* the turn.

Nobody can have applied a turn for which any member was not ready. That is all that the coordinator needs when something
goes wrong: it asks the members that are left how far they were.

* Somebody applied the turn: then all were ready, and those that do not know it are told that it succeeded.
* Somebody was not ready: nobody has applied it, and it is run (again) as any other post, from the inputs as they were.
* All were ready and none has applied it: it succeeded, if it is known what every member of the lane was asked to do;
  a member that is gone may have had something else in mind, and then it is run again without it.

**What the coordinator hears.** Nothing of a turn that is quickly over; one that takes longer is posted, with its freedom and
turn, so that it is seen who waits for whom. :class:`~replicas.messages.OperationRan` tells the end of a turn that was posted
or that failed. Once in a while the first rank counts (:class:`~replicas.messages.LaneUsed`).

**Recall.** A free lane is recalled before anything else can happen to its domain: a member posts something that does not run
ahead (another kind, tensors on a GPU, a call that came before the freedom), somebody waits to join, a member is lost or
left behind, the lane breaks. From its answer on a member asks again. When all that are awaited have answered, and told how
their turns ended, what failed is put back into the stream of posts, in order, and the domain goes on as ever. If some have
begun a turn that others never will, the lane is closed, which ends those turns. Whoever owes an answer for too long is
left behind. A lane that had to be recalled for a post becomes free later each time (:data:`STREAK`).

Members that were not awaited (silent, behind) tell later how their turns ended: by :attr:`_Ended.applied` they are told of a
success, or get what any late post gets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from replicas import errors
from replicas.core.effects import Effect, Send
from replicas.core.identity import Member
from replicas.core.lanes import Lane
from replicas.core.operation import Operation
from replicas.core.pairing import Pairing
from replicas.core.posts import Post, disagreement
from replicas.core.roster import MemberState, Roster
from replicas.core.settling import Settling
from replicas.messages import LaneFree, LaneRecall, LaneUsed, OperationPost, OperationRan, ReceiptData

__all__ = ["FREE_KINDS", "FreeLanes", "Shell"]

FREE_KINDS = frozenset(("all_reduce", "broadcast", "reduce", "barrier"))
"""Collectives for which a member knows what the others give: the same as itself."""
STREAK = 8
"""So many collectives in a row, in one lane, before it is set free; twice as many after each recall for a post."""
STREAK_MAX = 256
ANSWER_S = 8.0
"""A member that can be heard, and does not say for so long how its turns ended, is left behind. (A kill may take 5 s.)"""
LATE_S = 3.0
"""A turn ends by itself at its deadline; its lane is closed when it has not by so much later."""
ENDED = 8
STRAYS = 64


class Shell(Protocol):
    """What free lanes need of the operations of their channel."""

    def close_lane(self, lane: Lane, reason: str, now: float) -> None: ...

    def reply(self, post: Post, error: errors.ReplicasError | None, receipt: ReceiptData | None) -> None: ...

    def leave(self, state: MemberState, why: str, reason: str, now: float) -> None: ...

    def count(self, outcome: str, number: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Turn:
    """A member's part of a turn that was posted. ``outcome``: empty until it has told."""

    post: Post
    outcome: Literal["", "ready", "failed"] = ""

    @property
    def number(self) -> int:
        return self.post.message.turn


@dataclass(slots=True, eq=False)
class _Free:
    """A lane that is free, or being recalled. ``used``: the last turn of those that have answered.

    ``gone``: why, by name, of members that were lost or put aside. ``excused``: silent, and not awaited.
    """

    name: str
    lane: Lane
    domain: int
    turns: list[_Turn] = field(default_factory=list)
    used: dict[Member, int] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    excused: set[Member] = field(default_factory=set)
    recalled_at: float | None = None
    broken_at: float | None = None
    applied: int = 0

    def of(self, member: Member) -> list[_Turn]:
        return [turn for turn in self.turns if turn.post.member == member]


@dataclass(slots=True)
class _Ended:
    """What is remembered of a lane that was free. ``applied``: the last turn that somebody has applied."""

    members: tuple[Member, ...]
    applied: int


class FreeLanes:
    """Of one channel of peers: at most one for each domain."""

    def __init__(
        self,
        roster: Roster,
        pairing: Pairing,
        settling: Settling,
        shell: Shell,
        out: Callable[[Effect], None],
        *,
        term: int,
    ) -> None:
        self._roster = roster
        self._pairing = pairing
        self._settling = settling
        self._shell = shell
        self._out = out
        self._term = term
        self._count = 0
        self._free: dict[int, _Free] = {}
        self._streaks: dict[int, int] = {}
        self._patience: dict[int, int] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._strays: OrderedDict[tuple[Member, int], Post] = OrderedDict()

    @property
    def domains(self) -> frozenset[int]:
        """In which nothing but turns may begin."""
        return frozenset(self._free)

    @property
    def lanes(self) -> set[str]:
        return {free.lane.name for free in self._free.values()}

    def waits(self, member: Member) -> bool:
        """Whether the member has posted a turn that is not known to be over."""
        return any(free.of(member) for free in self._free.values())

    def undecided(self, ref: str) -> bool:
        return any(self._ref(free, turn.number) == ref for free in self._free.values() for turn in free.turns)

    def _ref(self, free: _Free, turn: int) -> str:
        return f"{self._term}.{free.name}.{turn}"

    def _awaited(self, free: _Free) -> list[Member]:
        """Those whose answers are needed."""
        live = {state.member for state in self._roster.live}
        return [member for member in free.lane.members if member in live and member not in free.excused]

    # ------------------------------------------------------------ becoming free

    def succeeded(self, operation: Operation, now: float, *, busy: bool) -> None:
        """A collective has just ended well. ``busy``: something else runs in its domain."""
        domain = operation.due.domain
        plain = operation.kind in FREE_KINDS and all(post.message.device == "cpu" for post in operation.posts)
        steady = plain and operation.attempt == 1 and not operation.left_out
        self._streaks[domain] = self._streaks.get(domain, 0) + 1 if steady else 0
        lane = operation.lane
        if lane is None or busy or domain in self._free or self._streaks[domain] < self._patience.get(domain, STREAK):
            return
        members = [state.member for state in self._pairing.live(domain)]
        formed = lane.state == "formed" and lane.backend == "gloo" and list(lane.members) == members
        if not formed or len(members) < 2 or not self._pairing.quiet(domain, now):
            return
        self._count += 1
        free = self._free[domain] = _Free(f"{lane.name}.{self._count}", lane, domain)
        message = LaneFree(lane.name, free.name, lane.members, self._pairing.step(domain))
        for member in members:
            self._out(Send(member, message))

    # ------------------------------------------------------------ what members say

    def post(self, member: Member, message: OperationPost, now: float) -> None:
        """A turn that takes long, or has failed."""
        view = tuple(state.member for state in self._pairing.live(self._pairing.domain_of(member)))
        post = Post(member, message, now, now + message.deadline_s, view)
        free = self._named(message.free)
        if free is None or member not in free.lane.members:
            self._strays[member, message.post] = post
            while len(self._strays) > STRAYS:
                self._strays.popitem(last=False)
            return
        free.turns.append(_Turn(post))
        if disagreement([turn.post for turn in free.turns if turn.number == message.turn]) is not None:
            self._break(free, "failed", now)

    def ran(self, member: Member, message: OperationRan, now: float) -> None:
        """How a turn ended that was posted."""
        for free in list(self._free.values()):
            for turn in free.of(member):
                if turn.post.message.post == message.post:
                    self._told(free, turn, message.outcome, now)
                    self._end_if_told(free, now)
                    return
        stray = self._strays.pop((member, message.post), None)
        if stray is not None:
            self._judge(stray, message.outcome, now)

    def _told(self, free: _Free, turn: _Turn, outcome: Literal["applied", "ready", "failed"], now: float) -> None:
        if outcome != "applied":
            turn.outcome = outcome
            self._break(free, "failed", now)
            return
        free.turns.remove(turn)
        free.applied = max(free.applied, turn.number)
        self._settling.record(self._ref(free, turn.number), True)

    def used(self, member: Member, message: LaneUsed, now: float) -> None:
        free = self._named(message.free)
        if free is None or member not in free.lane.members:
            return
        if member == free.lane.members[0] and message.done:
            self._shell.count("ok", message.done)
        if message.step is not None:
            self._pairing.passed(free.domain, message.step)
        if message.recalled:
            free.used[member] = message.turn
            self._end_if_told(free, now)

    def _named(self, name: str) -> _Free | None:
        return next((free for free in self._free.values() if free.name == name), None)

    # ------------------------------------------------------------ recall

    def advance(self, now: float) -> None:
        """Recall what has to be, and end what can be."""
        for free in list(self._free.values()):
            if free.recalled_at is None and self._pairing.wants(free.domain):
                patience = self._patience.get(free.domain, STREAK)
                self._patience[free.domain] = min(STREAK_MAX, 2 * patience)
                self._recall(free, now)
            elif free.recalled_at is None and self._pairing.joins_wait(now):
                self._recall(free, now)
            self._end_if_told(free, now)

    def leaving(self, member: Member, now: float) -> None:
        """The member is being ended: it must be known what it does."""
        for free in self._free.values():
            if member in free.lane.members:
                self._recall(free, now)

    def engages(self, member: Member) -> bool:
        """Whether a free lane has the member."""
        return any(member in free.lane.members for free in self._free.values())

    def _recall(self, free: _Free, now: float) -> None:
        if free.recalled_at is None:
            free.recalled_at = now
            for member in free.lane.members:
                if member in self._roster:
                    self._out(Send(member, LaneRecall(free.name)))

    def _break(self, free: _Free, reason: str, now: float) -> None:
        """Its turns are to end now, one way or the other."""
        self._recall(free, now)
        if free.broken_at is None:
            free.broken_at = now
            self._shell.close_lane(free.lane, reason, now)

    def lane_failed(self, lane: Lane, now: float) -> None:
        """A member says so."""
        for free in self._free.values():
            if free.lane is lane:
                self._break(free, "failed", now)

    def without(self, member: Member, why: str, reason: str, now: float) -> None:
        """The member was lost, or is not live any more."""
        if member not in self._roster:
            for key in [key for key in self._strays if key[0] == member]:
                del self._strays[key]
        for free in self._free.values():
            if member in free.lane.members:
                free.gone[member.name] = why
                self._break(free, reason, now)

    # ------------------------------------------------------------ the end of a free lane

    def _end_if_told(self, free: _Free, now: float) -> None:
        awaited = self._awaited(free)
        if free.recalled_at is None or any(member not in free.used for member in awaited):
            return
        if len({free.used[member] for member in awaited}) > 1:
            self._break(free, "recalled", now)  # some have begun what the others never will
        if any(not turn.outcome and turn.post.member in awaited for turn in free.turns):
            return
        del self._free[free.domain]
        self._streaks[free.domain] = 0
        self._decide(free, awaited, now)
        self._ended[free.name] = _Ended(free.lane.members, free.applied)
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)
        for turn in [
            turn for turn in free.turns if turn.post.member not in awaited and turn.post.member in self._roster
        ]:
            self._strays[turn.post.member, turn.post.message.post] = turn.post
            if turn.outcome:
                self._judge(self._strays.pop((turn.post.member, turn.post.message.post)), turn.outcome, now)

    def _decide(self, free: _Free, awaited: list[Member], now: float) -> None:
        """What becomes of the turns that failed somewhere, in order."""
        for member in awaited:
            open_turns = {turn.number for turn in free.of(member)}
            last = free.used[member]
            while last in open_turns:
                last -= 1
            free.applied = max(free.applied, last)
        mine = [turn for turn in free.turns if turn.post.member in awaited]
        failed = False
        back: list[Post] = []
        for number in sorted({turn.number for turn in mine}):
            parts = [turn for turn in mine if turn.number == number]
            failed = failed or not self._succeeded(free, number, parts, awaited)
            self._settling.record(self._ref(free, number), not failed)
            if failed:
                back += [turn.post for turn in parts]
                continue
            free.applied = max(free.applied, number)
            self._pairing.passed(free.domain, parts[0].post.message.step)
            self._shell.count("ok", 1)
            for turn in parts:
                self._shell.reply(turn.post, None, self._receipt(free.lane.members, turn.post, now))
        self._put_back(free, back, now)

    def _succeeded(self, free: _Free, number: int, parts: list[_Turn], awaited: list[Member]) -> bool:
        """``parts``: of those awaited that have not applied it."""
        others = [member for member in awaited if member not in {turn.post.member for turn in parts}]
        if any(turn.outcome != "ready" for turn in parts) or any(free.used[member] < number for member in others):
            return False
        posts = [turn.post for turn in free.turns if turn.number == number]
        known = {post.member for post in posts}.union(others)
        if disagreement(posts) is not None:
            return False
        return free.applied >= number or known >= set(free.lane.members)

    def _put_back(self, free: _Free, posts: list[Post], now: float) -> None:
        """They are ordinary posts from now on, before anything that their members have posted since."""
        raising = self._roster.config.on_lost == "raise"
        ordinary: list[Post] = []
        for post in posts:
            message = msgspec.structs.replace(post.message, free="", turn=0)
            if raising and free.gone:
                text = ", ".join(f"{name} ({why})" for name, why in free.gone.items())
                error = errors.PeersLost(
                    f"{message.kind} cannot end without {text}",
                    channel=self._roster.config.name,
                    phase="transfer",
                    members=list(free.gone),
                )
                self._shell.reply(post, error, None)
                continue
            ordinary.append(
                Post(post.member, message, post.posted_at, post.deadline, post.view, left_out=dict(free.gone))
            )
        self._pairing.adopt(ordinary)

    def _judge(self, post: Post, outcome: Literal["applied", "ready", "failed"], now: float) -> None:
        """The end of a turn of a member that was not waited for."""
        if outcome == "applied":
            return
        ended = self._ended.get(post.message.free)
        if outcome == "ready" and ended is not None and post.message.turn <= ended.applied:
            self._shell.reply(post, None, self._receipt(ended.members, post, now))
            return
        message = msgspec.structs.replace(
            post.message, free="", turn=0, deadline_s=post.message.deadline_s - (now - post.posted_at)
        )
        self._pairing.post(post.member, message, now)

    def _receipt(self, members: tuple[Member, ...], post: Post, now: float) -> ReceiptData:
        seconds = now - post.posted_at
        return ReceiptData(self._roster.epoch, members, (), 0, seconds, {"run": seconds})

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Members that are silent, or owe an answer; turns that should have ended."""
        for free in list(self._free.values()):
            awaited = self._awaited(free)
            states = [state for member in awaited if (state := self._roster.get(member)) is not None]
            silent = [state for state in states if self._roster.suspect(state, now)]
            if silent and free.turns and len(silent) < len(states) and self._roster.config.on_lost != "raise":
                for state in silent:
                    self._shell.leave(state, f"silent for {now - state.last_seen:.0f} s", "frozen", now)
            elif silent and free.recalled_at is not None:
                free.excused |= {state.member for state in silent}
                self._break(free, "frozen", now)
            if any(not turn.outcome and now > turn.post.deadline + LATE_S for turn in free.turns):
                self._break(free, "failed", now)
            self._leave_who_owes(free, now)

    def _leave_who_owes(self, free: _Free, now: float) -> None:
        asked = free.broken_at if free.broken_at is not None else free.recalled_at
        if asked is None or now - asked < ANSWER_S:
            return
        for member in self._awaited(free):
            state = self._roster.get(member)
            untold = free.broken_at is not None and any(not turn.outcome for turn in free.of(member))
            if state is not None and (untold or member not in free.used):
                why = f"it did not say for {ANSWER_S:.0f} s how far it was"
                self._shell.leave(state, why, "failed", now)

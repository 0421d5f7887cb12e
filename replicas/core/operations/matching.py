"""Match the posts of peers that form one operation.

Theory of operation
===================

A *domain* is the set of peers that form one process group: all leaders
(``ranks = "leader"``), all ranks of one number (``"each"``) or all ranks (``"all"``).
Each member's posts form one ordered stream. A collective is due when it is the oldest
unstarted post of every live member of the domain, they agree on it, and every peer that
the config promises has joined at least once. ``send`` and ``recv`` are due when each is
the oldest unstarted one of that pair; those to or from different peers do not wait for
each other, but none overtakes a collective.

``step`` tags: a collective matches equal tags only. A member that posts a tag that the
stream has passed gets ``Gone``; members that post different new tags get
``RanksDisagree``.

The others do not wait for a member that is behind; with ``on_lost = "drop"`` nor for a
silent member when they all wait for its call (:meth:`Matching.silent_blockers`). The
member misses the operations that the others run without it: its own post for them, or
else its next post without a tag, gets ``Gone``, once. Its post after that is matched
with the others' next operation. So no earlier post is ever matched with a later post of
the others.

Before a collective starts, operations that ended for a member without a verdict are
*settled*, by the ``unsettled`` and ``applied`` of all its posts
(:mod:`replicas.messages`): an operation counts as applied if this coordinator gave that
verdict itself, or if any participant has applied it. Otherwise none has or will, which
is certain once every earlier member has posted. A member that missed a result gets
``Gone``, which names the earlier operation, and the others wait for its next post.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import takewhile

import msgspec

from replicas import errors
from replicas.common.sizes import list_text
from replicas.core.members.member_state import MemberState
from replicas.core.moving.channel_context import ChannelContext
from replicas.core.operations.operation import Operation, Post, missed, never_joined
from replicas.messages import OperationPost, OperationSettled
from replicas.messages.identity import Member

KEPT_VERDICTS = 256
POSTS_MAX = 4096
SEGMENTS_MAX = 500_000
"""Limits for the waiting calls of one member, and for the tensors in them."""
_RESULT_HINT = "wait for its Pending again, which has the results, or resynchronise this peer; then call again"


class Matching:
    """The calls of operations (*posts*) of one channel's peers, until they match.

    :param reply: sends the error of a post that never started.
    :param running: returns True if the operation with this ref runs.
    """

    def __init__(
        self,
        context: ChannelContext,
        reply: Callable[[Post, errors.ReplicasError], None],
        running: Callable[[str], bool],
    ) -> None:
        """Start without posts. ``reply(post, error)`` sends the error of a post that
        never started; ``running(ref)`` returns True if that operation runs."""
        self._expects = True
        self._context, self._roster = context, context.roster
        self._verdicts: OrderedDict[str, bool] = OrderedDict()
        """True if the newest operations of this term were applied, by ref."""
        self._reply = reply
        self._running = running
        self._streams: dict[Member, list[Post]] = {}
        self._steps: dict[int, int] = {}
        self._missed: dict[Member, str] = {}
        peers = context.config.peers
        self._ranks = peers[0].ranks if peers else "leader"

    # ------------------------------------------------------------ domains

    def domain_of(self, member: Member) -> int:
        """Return the number of the member's domain (process group): its rank or 0."""
        return member.rank if self._ranks == "each" else 0

    def live(self, domain: int) -> list[MemberState]:
        """Return the live peers of a domain (those of one rank, or all), which run
        collectives, in the order of their groups, replicas and ranks."""
        return [s for s in self._roster.live if s.is_peer and s.carries and self.domain_of(s.member) == domain]

    def _peers(self, domain: int) -> list[MemberState]:
        """Return the peers of a domain (one process group), live or not."""
        return [s for s in self._roster if s.is_peer and s.carries and self.domain_of(s.member) == domain]

    def _awaited(self, domain: int) -> list[str]:
        """Return names of the config's peers of this domain that have never joined."""
        names: list[str] = []
        for party in self._roster.config.peers if self._expects else ():
            shape = self._roster.shape(party.group)
            ranks = {"leader": [0], "each": [domain], "all": range(shape.world_size)}[self._ranks]
            ranks = [rank for rank in ranks if rank < shape.world_size]
            names += [f"{party.group}/{replica}/{rank}" for replica in range(shape.replicas) for rank in ranks]
        return [name for name in names if name not in self._roster.history.joined]

    def stop_waiting_for_joins(self) -> None:
        """Stop waiting for first joins: an earlier coordinator has waited for them."""
        self._expects = False

    def _complete_root(self, message: OperationPost, member: Member) -> OperationPost:
        """Return the message, with the rank added to a root like ``group/replica``."""
        if not message.root or message.root.count("/") >= 2:  # a whole name: group/replica/rank
            return message
        rank = member.rank if self._ranks == "each" else 0
        return msgspec.structs.replace(message, root=f"{message.root}/{rank}")

    # ------------------------------------------------------------ posts

    def waits(self, member: Member) -> bool:
        """Return True if the member has posted an operation that has no verdict yet."""
        return bool(self._streams.get(member))

    def may_run(self, state: MemberState) -> bool:
        """Return True if a call of the member runs, or waits and the member is live."""
        return any(post.started or state.live for post in self._streams.get(state.member, ()))

    def post(self, state: MemberState, message: OperationPost, now: float) -> None:
        """Add a member's call of an operation to those that wait, for :meth:`due` to
        match; or refuse it: send the member an error by ``reply``, and keep nothing."""
        member = state.member
        view = tuple(peer.member for peer in self.live(self.domain_of(member)))
        post = Post(member, self._complete_root(message, member), now, now + message.deadline_s, view)
        error = self._problem(state, post)
        if error is not None:
            self._reply(post, error)
            return
        self._streams.setdefault(member, []).append(post)

    def _problem(self, state: MemberState, post: Post) -> errors.ReplicasError | None:
        """Return the error that refuses a new post, or None to accept it. Forget that
        the member has missed an operation of the others: one error tells it so."""
        message, waiting = post.message, self._streams.get(post.member, ())
        if not state.is_peer:
            name = self._roster.config.name
            text = f'channel "{name}" has no peers: {message.kind} needs a channel with peers = [...]'
            return errors.UsageError(text, channel=name)
        if len(waiting) >= POSTS_MAX or sum(len(one.message.segments) for one in waiting) > SEGMENTS_MAX:
            text = f"{message.kind}: {len(waiting)} earlier calls of {post.member} still wait for the other peers"
            return errors.Busy(text, phase="wait", hint="wait for the results of some before the next call")
        if not state.carries:
            return errors.UsageError(
                f"{post.member} cannot take part in operations of this channel: only leaders do",
                hint='set ranks = "each" or "all" for the peers of the channel',
            )
        if post.pairwise:
            return self._peer_problem(post)
        what = self._missed.pop(post.member, None)  # told once
        if message.step is not None:
            return self._step_problem(post)  # the tag identifies the operation
        return _left_out_error(post.member, what) if what else None

    def _step_problem(self, post: Post) -> errors.ReplicasError | None:
        """Return the error for a post whose ``step`` tag has passed, or None."""
        step, passed = post.message.step, self._steps.get(self.domain_of(post.member), -1)
        if step is None or step > passed:
            return None
        hint = "resynchronise this peer, then continue with the others' next step"
        return errors.Gone(f"step {step} has passed: the others have done step {passed}", phase="wait", hint=hint)

    def record_step(self, domain: int, step: int | None) -> None:
        """Record that a step has succeeded in a domain (process group): refuse posts of
        it and of earlier ones. ``step``: the tag of the operation; None for none."""
        if step is None or step <= self._steps.get(domain, -1):
            return
        self._steps[domain] = step
        for member in [member for member in self._streams if self.domain_of(member) == domain]:
            for post in [post for post in self._unstarted(member) if not post.pairwise]:
                if error := self._step_problem(post):
                    self._refuse(post, error)

    def _peer_problem(self, post: Post) -> errors.ReplicasError | None:
        """Return the error for a send or recv whose peer is unusable, or None."""
        kind, root = post.message.kind, post.message.root
        if root == post.member.name:
            return errors.UsageError(f"{kind}: {root} is this member itself", hint="name another peer")
        if not any(root.startswith(f"{party.group}/") for party in self._roster.config.peers):
            return errors.UsageError(f"{kind}: {root!r} is not a peer of this channel", hint="see channel.members")
        if root in self._roster.history.joined and self._roster.holder_of(root) is None:
            hint = "call again when it has joined again"
            return errors.PeersLost(f"{root} is lost", phase="wait", members=[root], hint=hint)
        return None  # wait for a peer that has never joined

    def end(self, post: Post) -> None:
        """Remove a post (a member's call), as it has its verdict; send nothing."""
        stream = self._streams.get(post.member)
        if stream is not None and post in stream:
            stream.remove(post)

    def _refuse(self, post: Post, error: errors.ReplicasError) -> None:
        """Remove a post, and send its member the error as its verdict."""
        self.end(post)
        self._reply(post, error)

    def _unstarted(self, member: Member) -> list[Post]:
        """Return the member's posts that may still start, oldest first."""
        return [post for post in self._streams.get(member, []) if not post.started]

    def _head(self, member: Member) -> Post | None:
        """Return the member's oldest post that has not started, or None."""
        return next(iter(self._unstarted(member)), None)

    # ------------------------------------------------------------ due operations

    def due(self, now: float, *, collective_runs: bool) -> Iterator[Operation]:
        """Yield the operations that can start now, their posts marked as started;
        refuse posts that disagree. ``collective_runs``: one runs now, so that none is
        started while newcomers wait for its end to be admitted."""
        for domain in sorted({self.domain_of(member) for member in self._streams}):
            yield from self._due_pairs(domain)
            if not (collective_runs and self._roster.waiting(now)):  # newcomers are admitted once no collective runs
                yield from self._due_collective(domain, now)

    def _pairable(self, member: Member) -> list[Post]:
        """Return unstarted sends and receives before the member's next collective."""
        return list(takewhile(lambda post: post.pairwise, self._unstarted(member)))

    def _due_pairs(self, domain: int) -> Iterator[Operation]:
        """Yield sends with their receives, marked as started; refuse mismatches."""
        live = [state.member for state in self.live(domain)]
        by_name = {member.name: member for member in live}
        for receiver in live:
            for want in [post for post in self._pairable(receiver) if post.message.kind == "recv"]:
                sender = by_name.get(want.message.root)
                sent = self._pairable(sender) if sender is not None else []
                sends = (p for p in sent if p.message.kind == "send" and p.message.root == receiver.name)
                give = next(sends, None)
                if give is None:
                    continue
                if want.message.segments and want.message.segments != give.message.segments:
                    text = f"{give.member} sends {_show(give)}, {want.member} expects {_show(want)}"
                    for post in (give, want):
                        self._refuse(post, errors.RanksDisagree(text, phase="wait"))
                    continue
                give.started = want.started = True
                posts = tuple(sorted((give, want), key=lambda post: post.member))
                first = tuple(post.member for post in posts)
                yield Operation("send", posts, give, domain, first, self._roster.config.name)

    def _due_collective(self, domain: int, now: float) -> Iterator[Operation]:
        """Yield the domain's next collective, if all live peers have called it; refuse
        its posts if they disagree. Peers that are behind miss it, and get an error."""
        firsts = [self._head(state.member) for state in self.live(domain)]
        heads = [post for post in firsts if post is not None and not post.pairwise]
        if len(heads) < len(firsts):
            return  # a live peer has yet to call
        if not heads or self._awaited(domain) or not self._settle_earlier(heads):  # _settled() last: it sends answers
            return
        name = heads[0].message.root
        root = next((i for i, head in enumerate(heads) if name and head.member.name == name), -1)
        first = self._expected_members(heads, root)
        problem = self._root_problem(heads, root) or _disagreement(heads) or _miscount(heads, root, first)
        if problem is not None:
            for post in heads:
                self._refuse(post, problem)
            return
        for post in heads:
            post.started = True
        for state in self._peers(domain):
            if state.standing != "behind":
                continue
            what = f"{heads[0].message.kind}; {state.note or 'this member did not respond'}"
            own = next((post for post in self._unstarted(state.member) if not post.pairwise), None)
            if own is not None:
                self._refuse(own, _left_out_error(state.member, what))
            else:
                self._missed[state.member] = what
        kind, root_post = heads[0].message.kind, heads[root] if root >= 0 else None
        yield Operation(kind, tuple(heads), root_post, domain, first, self._roster.config.name)

    def record_verdict(self, ref: str, applied: bool) -> None:
        """Remember whether the operation ``ref`` was applied, for members that ask."""
        self._verdicts[ref] = applied
        if len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)

    def _settle_earlier(self, heads: Sequence[Post]) -> bool:
        """Send the members of ``heads`` (posts of the next collective) the outcomes of
        earlier operations that they do not know; refuse posts of those that missed a
        success. Return False if the collective cannot start now."""
        if any(self._running(ref) for post in heads for ref in post.message.unsettled):
            return False  # the verdict will come
        ready = True
        written = {ref for post in heads for ref in post.message.applied}  # a member has applied it: it has succeeded
        found = {
            post.member: {
                ref: self._verdicts.get(ref, True if ref in written else None) for ref in post.message.unsettled
            }
            for post in heads
        }
        others = {state.member for state in self._peers(self.domain_of(heads[0].member)) if state.from_before}
        if any(None in answers.values() for answers in found.values()) and others - found.keys():
            return False  # a member of an earlier coordinator has not called
        for post in heads:
            answers = found[post.member]
            for ref, applied in answers.items():  # None: no member has applied it or ever will
                self._context.send(post.member, OperationSettled(ref, bool(applied)))
            if refs := ", ".join(ref for ref, applied in answers.items() if applied):
                text = f"operation {refs} of {post.member}, whose outcome was unknown to it, has succeeded on the other peers"
                self._refuse(post, missed(text, post.member, hint=_RESULT_HINT))
                ready = False
        return ready

    def _root_problem(self, heads: Sequence[Post], root: int) -> errors.ReplicasError | None:
        """Return the error for a root that has no post, as it is not live, or None.
        ``heads``: a post of each member; ``root``: index of the root's, or -1."""
        message = heads[0].message
        if not message.root or root >= 0 or any(post.message.root != message.root for post in heads):
            return None  # _disagreement() has the better text
        name = message.root
        known = name in self._roster.history.joined
        kind: type[errors.ReplicasError] = errors.PeersLost if known else errors.UsageError
        return kind(
            f"{message.kind}: {message.root} is not a live member of this channel",
            phase="wait",
            members=[name],
            hint="name another peer, or wait until that one has rejoined" if known else "see channel.members",
        )

    def _expected_members(self, heads: Sequence[Post], root: int) -> tuple[Member, ...]:
        """Return the members live at the root's call, or else at the first call.
        ``heads``: a post of each member; ``root``: index of the root's, or -1."""
        members = tuple(post.member for post in heads)
        decisive = heads[max(root, 0)]
        if decisive.message.kind in ("scatter", "reduce_scatter") and len(decisive.message.segments) == len(heads):
            return members  # one tensor for each present member
        return decisive.view if set(members) <= set(decisive.view) else members  # else a member has joined since

    # ------------------------------------------------------------ losses and deadlines

    def lost(self, member: Member, why: str) -> None:
        """Remove a lost member's posts. Refuse waiting sends and receives with it, and,
        if ``on_lost`` is ``"raise"``, the waiting collectives of its domain. ``why``:
        how it was lost, for the error."""
        self._streams.pop(member, None)
        self._missed.pop(member, None)
        raising = self._roster.config.on_lost == "raise"
        for other, posts in list(self._streams.items()):
            concerned = raising and self.domain_of(other) == self.domain_of(member)
            for post in [post for post in posts if not post.started]:
                kind = post.message.kind
                waits = post.pairwise and post.message.root == member.name
                if waits or (concerned and not post.pairwise):
                    text = f"{kind} did not begin: {member} was lost ({why})"
                    self._refuse(post, errors.PeersLost(text, phase="wait", members=[member.name]))

    def tick(self, now: float) -> None:
        """Refuse posts that have not started by their deadlines."""
        for posts in list(self._streams.values()):
            for post in [post for post in posts if not post.started and now > post.deadline]:
                self._refuse(post, self._overdue_error(post, now))

    def silent_blockers(self, running: Set[int], now: float) -> list[MemberState]:
        """Return silent members that have not called a collective for which all others
        of their domain wait, except its root. ``running``: domains to skip."""
        found: list[MemberState] = []
        for domain in {self.domain_of(member) for member in self._streams} - running:
            live = self.live(domain)
            silent = [s for s in live if self._roster.is_suspect(s, now) and not self._unstarted(s.member)]
            posts = [self._head(state.member) for state in live if state not in silent]
            waiting = [post for post in posts if post is not None and not post.pairwise]
            if not waiting or len(waiting) < len(posts) or self._awaited(domain):
                continue
            roots = {post.message.root for post in waiting}
            found += [state for state in silent if state.member.name not in roots]  # the root cannot be left out
        return found

    def _overdue_error(self, post: Post, now: float) -> errors.ReplicasError:
        """Return the error of a post past its deadline, naming the missing members."""
        if post.pairwise:
            names, texts = [post.message.root], [post.message.root + never_joined(post.message.root, self._roster)]
        else:
            domain = self.domain_of(post.member)
            heads = {state: self._head(state.member) for state in self.live(domain)}
            missing = [state for state, head in heads.items() if head is None]
            busy = {
                state.member.name: _show(head) for state, head in heads.items() if head is not None and head.pairwise
            }
            own = [name for state in self._roster.states([post.member]) for name in self._roster.missing_ranks(state)]
            promised = list(dict.fromkeys([*self._awaited(domain), *own]))
            names = [state.member.name for state in missing] + [*busy, *promised]
            silent = {
                s.member: f" (silent for {now - s.last_seen:.0f} s)" for s in missing if self._roster.is_suspect(s, now)
            }
            texts = [state.member.name + silent.get(state.member, "") for state in missing] + promised
            texts += [f"{name}, which waits in {what}" for name, what in busy.items()]
        text = f"{post.message.kind} did not begin in time: waited for {', '.join(texts) or 'earlier operations'}"
        hint = "call it on every peer in time, or give it a longer deadline"
        return errors.DeadlineExceeded(text, phase="wait", members=names, hint=hint)


def _left_out_error(member: Member, what: str) -> errors.ReplicasError:
    """Return the error of a member without which the others did ``what``."""
    return missed(f"the others continued without {member} ({what})", member)


def _disagreement(heads: Sequence[Post]) -> errors.ReplicasError | None:
    """Return the error if ``heads``, a post of each member, differ in kind, reduction,
    root, step or tensors; None if they agree."""
    first = heads[0].message
    ragged = first.kind in ("all_gather", "gather", "scatter")  # shapes may differ between members
    for post in heads[1:]:
        message = post.message
        fields = ("kind", "reduce_op", "root", "step") if ragged else ("kind", "reduce_op", "root", "step", "segments")
        if any(getattr(message, name) != getattr(first, name) for name in fields):
            return errors.RanksDisagree(
                f"peers posted different operations: {heads[0].member} {_show(heads[0])}, {post.member} {_show(post)}",
                phase="wait",
                members=[heads[0].member.name, post.member.name],
            )
    return None


def _miscount(heads: Sequence[Post], root: int, first: Sequence[Member]) -> errors.ReplicasError | None:
    """Return the error for a post without one tensor for each member, or None. Only
    scatter and reduce_scatter need them. ``first``: the expected members; ``root``:
    index of the root's post in ``heads``."""
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


def _show(post: Post) -> str:
    """Return a post's call with its arguments as text, for error messages."""
    message = post.message
    parts = list_text([f"{segment.dtype}{list(segment.shape)}" for segment in message.segments])
    root = f" {message.root}" if message.root else ""
    step = f" step={message.step}" if message.step is not None else ""
    op = f" op={message.reduce_op}" if message.kind in ("all_reduce", "reduce", "reduce_scatter") else ""
    return f"{message.kind}({parts}{root}{op}{step})"

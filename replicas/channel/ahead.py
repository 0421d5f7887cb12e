"""The member's side of free lanes: operations that run ahead of the coordinator's word (:mod:`replicas.core.free_lanes`).

Theory of operation
===================

All of this runs on the session thread. While there is a free lane, and nothing else is under way, a collective of a simple
kind goes straight to the lane's sidecar, as the lane's next turn. Its answer means that all members were ready: the results
are written, and nobody else is asked or told. A turn that takes longer than :data:`POST_AFTER_S` is posted, so that the
coordinator sees who waits; so are all that are under way before anything else is posted, and when the lane is recalled.

**When a turn fails**, its sidecar is made to end, and the ledger tells how far it was: *ready*, or nothing. The coordinator
is told, and from then on the call waits for its verdict or for another Go, as any other.

**A new coordinator** knows nothing of the turns of the one before, whose lanes end. A turn that was ready has an unknown
outcome then, one that was not did not happen. Calls that come before that is certain are posted after it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from replicas import errors
from replicas.channel.hub import Hub
from replicas.channel.lanes import Lane, Lanes
from replicas.channel.operation_job import Attempt, Job
from replicas.core.free_lanes import FREE_KINDS
from replicas.core.identity import Member
from replicas.messages import (
    LaneFree,
    LaneRecall,
    LaneUsed,
    OperationGo,
    OperationRan,
    ReceiptData,
)
from replicas.sidecar.client import Done, Turn
from replicas.weights.arena import Buffer

__all__ = ["Ahead", "Caller", "FreeLane"]

logger = logging.getLogger("replicas.channel")

POST_AFTER_S = 0.05
"""A turn that takes longer is posted."""
COUNT_INTERVAL_S = 1.0
LEDGER_NBYTES = 4096
_KNOWN = 8
_MARK_MASK = (1 << 62) - 1


class Caller(Protocol):
    """The operations of the channel, for which turns are run."""

    def post_ahead(self, job: Job, free: str, turn: int) -> None:
        """Post it, as a turn that is under way."""

    def applied(self, job: Job, data: ReceiptData) -> None:
        """Everyone is ready: write the results, and end it."""

    def undecided(self, job: Job, *, ready: bool) -> None:
        """It failed; the coordinator has been told."""

    def orphaned(self, job: Job, *, ready: bool) -> None:
        """It failed, and the coordinator that could have decided is gone."""

    def start_turn(self, lane: Lane, job: Job, attempt: Attempt, turn: Turn, done: Done) -> None: ...

    def stopped(self, job: Job, attempt: Attempt) -> None: ...


@dataclass(eq=False)
class FreeLane:
    """``name``: of this freedom. ``turn``: the last that began. ``done``: how many succeeded since that was last told.

    ``step``: the newest tag. ``jobs``: by turn, under way. ``posted``: of these turns the coordinator knows.
    """

    name: str
    lane: Lane
    participants: tuple[Member, ...]
    me: int
    term: int
    ledger: Buffer
    step: int | None
    turn: int = 0
    done: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    posted: set[int] = field(default_factory=set)

    @property
    def usable(self) -> bool:
        return not self.lane.ended and self.lane.sidecar is not None and self.lane.sidecar.usable


class Ahead:
    """See the module's header."""

    def __init__(self, hub: Hub, lanes: Lanes, caller: Caller) -> None:
        self._hub = hub
        self._lanes = lanes
        self._caller = caller
        self._free: FreeLane | None = None
        self._known: list[FreeLane] = []
        self._counting = False

    @property
    def likely(self) -> bool:
        """Whether the next operation may run ahead; from any thread."""
        return self._free is not None

    @property
    def orphans(self) -> bool:
        """Whether the outcome of turns under a coordinator that is gone is not certain yet."""
        return any(free.jobs and free.term != self._hub.session.term for free in self._known)

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {LaneFree: self._freed, LaneRecall: self._recalled}

    def _freed(self, message: LaneFree) -> None:
        try:
            lane = self._lanes.get(message.lane)
            ledger = Buffer.allocate(LEDGER_NBYTES, f"replicas-{self._hub.name}-ledger")
        except (errors.Gone, errors.NoCapacity) as error:
            logger.info("%s: the free lane %s is not used: %s", self._hub.name, message.lane, error)
            return
        names = [member.name for member in message.participants]
        me = names.index(self._hub.member.name)
        free = FreeLane(message.free, lane, message.participants, me, self._hub.session.term, ledger, message.step)
        self._free = free
        newest = self._known[-_KNOWN:]
        self._known = [known for known in self._known if known.jobs or known in newest] + [free]
        self._tidy()

    def _tidy(self) -> None:
        """Where no turn begins any more and none is under way, the ledger is of no more use."""
        for known in self._known:
            if known is not self._free and not known.jobs:
                known.ledger.close()

    def _recalled(self, message: LaneRecall) -> None:
        free = next((known for known in self._known if known.name == message.free), None)
        if free is None:
            self._hub.send(LaneUsed(message.free, 0, 0, None, True))
            return
        self._post_all(free)
        if self._free is free:
            self._free = None
        self._tidy()
        self._hub.send(self._used(free, recalled=True))

    def new_term(self) -> None:
        """Also when the session is over."""
        self._free = None
        self._tidy()

    def _used(self, free: FreeLane, *, recalled: bool = False) -> LaneUsed:
        done, free.done = free.done if free.me == 0 else 0, 0
        return LaneUsed(free.name, free.turn, done, free.step, recalled)

    # ------------------------------------------------------------ turns

    def begin(self, job: Job) -> bool:
        """Run it as the next turn; False: it must be posted."""
        free = self._free
        if free is not None and self._fits(free, job):
            root = self._root(free, job)
            if root is not None:
                self._begin(free, job, root)
                return True
        return False

    def post_all(self) -> None:
        """Before anything else is posted: everything that is under way has been."""
        for known in self._known:
            self._post_all(known)

    def _fits(self, free: FreeLane, job: Job) -> bool:
        operation = job.operation
        fresh = operation.step is None or free.step is None or operation.step > free.step
        return operation.kind in FREE_KINDS and operation.device == "cpu" and fresh and free.usable

    def _root(self, free: FreeLane, job: Job) -> int | None:
        """Index of the root; -1: it has none; None: it is none of the participants."""
        root = job.operation.root
        if not root:
            return -1
        rank = self._hub.member.rank if self._hub.settings.peer_ranks == "each" else 0
        name = root if root.count("/") >= 2 else f"{root}/{rank}"
        return next((index for index, member in enumerate(free.participants) if member.name == name), None)

    def _begin(self, free: FreeLane, job: Job, root: int) -> None:
        free.turn += 1
        operation = job.operation
        if operation.step is not None:
            free.step = operation.step
        size = len(free.participants)
        go = OperationGo(
            post=job.post,
            operation=0,
            lane=free.lane.name,
            participants=free.participants,
            lane_ranks=tuple(range(size)),
            segments=(operation.segments,) * size,
            root=root,
            deadline_s=max(0.0, job.deadline - time.monotonic()),
            ref=f"{free.term}.{free.name}.{free.turn}",
            attempt=0,
        )
        job.attempt = attempt = Attempt(go, free.me)
        job.running += 1
        job.ahead = True
        free.jobs[free.turn] = job
        turn = Turn(free.ledger, free.turn, self._mark(job, free.turn))
        timer = self._hub.after(POST_AFTER_S, self._post, free, free.turn)

        def ended(outcome: float | Exception) -> None:
            timer.cancel()
            if isinstance(outcome, Exception):
                logger.info("%s: turn %d of lane %s failed: %s", self._hub.name, turn.number, free.lane.name, outcome)
                self._hub.spawn(self._failed(free, job, attempt, turn), f"end of turn {turn.number}")
            else:
                self._done(free, job, turn, outcome)
                self._caller.stopped(job, attempt)

        self._caller.start_turn(free.lane, job, attempt, turn, partial(self._hub._guarded, ended))

    @staticmethod
    def _mark(job: Job, turn: int) -> int:
        """Stands for what is asked for: all members must ask for the same."""
        operation = job.operation
        what = (operation.kind, operation.reduce_op, operation.root, operation.step, turn, operation.segments)
        digest = hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=8).digest()
        return int.from_bytes(digest) & _MARK_MASK

    def _post_all(self, free: FreeLane) -> None:
        for turn in free.jobs:
            self._post(free, turn)

    def _post(self, free: FreeLane, turn: int) -> None:
        """Tell the coordinator that the turn is under way."""
        job = free.jobs.get(turn)
        if job is not None and turn not in free.posted and free.term == self._hub.session.term:
            free.posted.add(turn)
            self._caller.post_ahead(job, free.name, turn)

    def _done(self, free: FreeLane, job: Job, turn: Turn, seconds: float) -> None:
        del free.jobs[turn.number]
        job.ahead = False
        free.done += 1
        self._tidy()
        if turn.number in free.posted:
            free.posted.discard(turn.number)
            self._tell(free, job, "applied")
        total = time.monotonic() - job.began
        data = ReceiptData(self._hub.epoch, free.participants, (), 0, total, {"run": seconds})
        self._caller.applied(job, data)
        if free.me == 0 and not self._counting:
            self._counting = True
            self._hub.after(COUNT_INTERVAL_S, self._count)

    async def _failed(self, free: FreeLane, job: Job, attempt: Attempt, turn: Turn) -> None:
        """Find out how far it was, once no sidecar can change that any more, and tell."""
        if self._free is free:
            self._free = None
        gone = await free.lane.gone()
        ready = turn.ready
        self._post_all(free)
        free.jobs.pop(turn.number, None)
        free.posted.discard(turn.number)
        self._tidy()
        job.ahead = False
        if free.term == self._hub.session.term:
            self._tell(free, job, "ready" if ready else "failed")
            self._caller.undecided(job, ready=ready)
        else:
            self._caller.orphaned(job, ready=ready)
        if gone:
            self._caller.stopped(job, attempt)
        else:
            logger.warning("%s: memory of a turn is kept: its sidecar did not die", self._hub.name)

    def _tell(self, free: FreeLane, job: Job, outcome: Literal["applied", "ready", "failed"]) -> None:
        if free.term == self._hub.session.term:
            self._hub.send(OperationRan(job.post, outcome))

    def _count(self) -> None:
        """Now and then the first rank tells how many operations there were."""
        self._counting = False
        free = self._free
        if free is not None and free.done:
            self._hub.send(self._used(free))

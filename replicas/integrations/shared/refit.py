"""A channel behind the checkpoint engines of RL frameworks (verl, NeMo-RL).

Theory of operation
===================

Such a framework has one engine in each trainer and rollout worker, and a manager that
calls them all: ``prepare()`` returns metadata of each worker, every worker receives the
metadata of all, the trainers send, the rollouts receive. The framework's own engines
build a process group over all workers for each sync, in which a dead process leaves the
others waiting. Here each worker joins a channel once, and a sync is a publish.

**Seats.** :func:`seats` computes each worker's place on the channel from the list of
metadata alone, so every worker may compute it. A joined worker keeps its place when
others are added or removed; a restarted worker takes a free one.

**Which version.** A receiver must get the version of *this* sync: not that of an
aborted sync, and not that of an earlier life of the trainer, whatever its step was. So
each sync has a number, greater than all before: the largest of the numbers that the
workers know and of their clocks, incremented where several syncs share one
``prepare()``. The version carries it as ``meta["sync"]`` (and the framework's step as
``meta["step"]``), and receivers request at least that.

**No wait for dead workers.** A sender waits for live targets only, as every publish
does. A receiver gives up when no trainer has been on the channel for :data:`ALONE_S`,
when the next sync begins, or at the deadline.

A version counts as loaded when the framework ends the sync (:meth:`Refit.finalize`), or
with ``loaded_at_end`` when its last tensor has been taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

import replicas
from replicas import environ, errors
from replicas.common.logs import Log

__all__ = ["CoordinatorAddress", "Refit", "Seat", "channel_settings", "first_sync", "seats"]

TRAINERS, ROLLOUTS = "trainer", "rollout"
ALONE_S = 45.0
"""A live trainer may be absent for less: after many deaths it is on probation (30 s at
most), and it finds a new coordinator within seconds."""
DEADLINE_S = 600.0
"""Default for a publish and for a receive; both include the trainer's gathers."""
_BEAT_S = 0.25
_JOIN_S = 60.0

logger = Log("replicas.integrations")


class Seat(NamedTuple):
    """A worker's identity on the channel, as :func:`replicas.join` takes it; with
    ``replica`` -1 it does not join."""

    group: str
    replica: int
    rank: int = 0
    world_size: int = 1


class CoordinatorAddress(NamedTuple):
    """Address of a coordinator, as arguments of :func:`replicas.join`."""

    endpoint: str
    token: str
    run: str


Metadata = Mapping[str, Any]
"""The metadata of one worker, sent to all others: :meth:`Refit.prepare`."""


def channel_settings(metadata: Sequence[Metadata]) -> dict[str, Any]:
    """Return {name: settings} of the channel, for a coordinator that is started for
    these workers.

    They are the sources and targets, and the ``options`` of the first trainer.
    """
    first = metadata[0]
    sources = [{"group": TRAINERS, "ranks": first["ranks"]}]
    return {first["channel"]: {"sources": sources, "targets": [ROLLOUTS], **first["options"]}}


def first_sync(metadata: Sequence[Metadata]) -> int:
    """Return the largest ``sync`` number in the workers' metadata. The sync that begins
    gets the next number, which is above those of all earlier syncs.

    Each worker's number is at least the present time in microseconds: the result grows
    even if all workers are new and know of no earlier sync.
    """
    return max(int(one["sync"]) for one in metadata)


def seats(metadata: Sequence[Metadata], trainers: int) -> list[Seat]:
    """Return each worker's place on the channel, in the order of ``metadata``; send
    nothing.

    Each rollout worker is its own replica, even where several make one server: the
    sync's number keeps them together, and a dead worker does not cut the others off.

    :param metadata: of all workers, as :meth:`Refit.prepare` returns it.
    :param trainers: number of trainers, which come first.
    """
    if metadata[0]["ranks"] == "all":
        found = [Seat(TRAINERS, 0, rank, trainers) for rank in range(trainers)]
    else:
        found = [Seat(TRAINERS, -1 if number else 0) for number in range(trainers)]
    own = [_current_index(one) for one in metadata[trainers:]]
    free = (index for index in range(2 * len(own)) if index not in own)
    given: set[int] = set()
    for index in own:
        chosen = next(free) if index is None or index in given else index
        given.add(chosen)
        found.append(Seat(ROLLOUTS, chosen))
    return found


def _current_index(worker: Metadata) -> int | None:
    """Return the replica index with which a rollout worker has joined, or None if it
    has not joined.

    :param worker: the worker's own metadata.
    """
    seat = worker["seat"]
    return int(seat[1]) if seat is not None and seat[0] == ROLLOUTS else None


class Refit:
    """One worker's side of all syncs, which move weights from trainers to rollouts over
    a channel; it has the methods of verl's ``CheckpointEngine``.

    :param channel: name of the channel.
    :param ranks: ``"leader"``: trainer 0 publishes; ``"all"``: each trainer publishes
        its share of the tensors, all of which every trainer yields.
    :param dtype: cast plain floating tensors to it, or to the dtype of this name.
    :param deadline: seconds for a publish, and for a receive.
    :param options: further keys of the channel, such as ``slots``, for a coordinator
        that is started for the run.
    :param loaded_at_end: whether a version counts as loaded once it is read to its end.
    :raises replicas.errors.UsageError: an argument is wrong.
    """

    def __init__(
        self,
        *,
        channel: str = "policy",
        ranks: Literal["leader", "all"] = "leader",
        dtype: torch.dtype | str | None = None,
        deadline: float = DEADLINE_S,
        options: Mapping[str, Any] | None = None,
        loaded_at_end: bool = False,
    ) -> None:
        """Check the arguments; join nothing yet.

        :param channel: name of the channel.
        :param ranks: whether trainer 0 alone publishes, or each trainer its share.
        :param dtype: cast plain floating tensors to it; None: no cast.
        :param deadline: seconds for a publish, and for a receive.
        :param options: further keys of the channel, for a coordinator started for the
            run.
        :param loaded_at_end: whether a version counts as loaded once it is read to its
            end.
        """
        if ranks not in ("leader", "all"):
            raise errors.UsageError(f"ranks={ranks!r}", hint='pass "leader" or "all"')
        cast = getattr(torch, dtype.removeprefix("torch."), "") if isinstance(dtype, str) else dtype
        if not isinstance(cast, torch.dtype | None):
            raise errors.UsageError(f"{dtype!r} is not a dtype of torch", hint='pass e.g. "bfloat16"')
        self._name, self._ranks, self._dtype = channel, ranks, cast
        self._deadline_s = float(deadline)
        self._options = dict(options or {})
        self._loaded_at_end = loaded_at_end
        self._place: CoordinatorAddress | None = None
        self._seat: Seat | None = None
        self._sync = 0
        self._sync_attempts = 0
        self._update: replicas.Update | None = None
        self._read = False
        self._sending: replicas.Pending[replicas.Receipt] | None = None
        self.channel: replicas.Channel | None = None

    def prepare(self) -> dict[str, Any]:
        """Begin a sync; return the metadata that this worker sends to all others.

        A pending receive ends with an error, and an update (a received version) that
        was not finalized counts as failed.

        If the last publish is still open, and several trainers each publish a share of
        it, this trainer also leaves the channel, to join again in this sync: parts of
        the two publishes could be mixed otherwise.

        :returns: ``channel``, ``ranks`` and ``options`` as given; ``seat``, or None if
            it is not joined; ``outside``: the environment names a coordinator; and
            ``sync``: a number for :func:`first_sync`.
        """
        self._sync_attempts += 1
        self._end_update("the sync was broken off")
        if (
            self._sending is not None
            and not self._sending.done()
            and self._seat is not None
            and self._seat.world_size > 1
        ):
            self._leave()
        return {
            "channel": self._name,
            "ranks": self._ranks,
            "options": self._options,
            "seat": None if self._seat is None or not self._is_joined() else tuple(self._seat),
            "outside": environ.read().endpoint is not None,
            "sync": max(self._sync, time.time_ns() // 1_000),
        }

    def init_process_group(self, *, seat: Seat, place: CoordinatorAddress | None, sync: int) -> None:
        """Join the channel as the seat's group, replica and rank, unless this worker
        has done so; leave it first if it has another seat. Block 60 s at most.
        With a seat of replica -1 only leave.

        :param place: address of the coordinator; None: the environment has it.
        :param sync: the number from :func:`first_sync`; this sync's is one greater.
        :raises replicas.errors.ReplicasError: as :func:`replicas.join`.
        """
        self._sync = sync
        if seat.replica < 0:
            self._leave()
            self._seat = seat
            return
        if (seat, place) == (self._seat, self._place) and self._is_joined():
            return
        self._leave()
        self.channel = replicas.join(
            self._name,
            group=seat.group,
            replica=seat.replica,
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=_JOIN_S,
            **({} if place is None else place._asdict()),
        )
        self._seat, self._place = seat, place

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish if this trainer is a publisher, and wait for the commit; return the
        figures (metrics by name, ``replicas/...``) of the sync, empty for another
        trainer.

        The weights are iterated to their end in any case, because other trainers take
        part in the gathers.

        :param global_steps: the framework's step, for ``meta["step"]``.
        :raises replicas.errors.ReplicasError: as :meth:`replicas.Channel.publish`.
        :raises replicas.errors.UsageError: this worker has no seat.
        """
        self._sync += 1
        seat, channel = self._seat, self.channel
        if seat is None or channel is None:
            for _ in weights:
                pass
            if seat is None:
                raise _not_joined_error("send_weights")
            return {}
        meta = {"sync": self._sync} | ({} if global_steps is None else {"step": global_steps})
        share = _share(weights, seat) if seat.world_size > 1 else weights
        self._sending = channel.publish(
            share, dtype=self._dtype, meta=meta, deadline=self._deadline_s, new_manifest=True
        )
        receipt = await self._sending
        for name, why in receipt.not_loaded.items():
            logger.warning("going on, although %s has not loaded an earlier version: %s", name, why)
        return receipt.metrics()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for this sync's version; yield its (name, tensor) pairs, on the host
        (with ``staging = "device"`` on the GPU). An error in the loop reports the
        version as failed.

        :param global_steps: not used.
        :raises replicas.errors.SyncError: there is no trainer, or :meth:`prepare` has
            begun the next sync.
        :raises replicas.errors.DeadlineExceeded: no version came by the deadline.
        :raises replicas.errors.UsageError: this worker has not joined.
        """
        self._sync += 1
        if self.channel is None:
            raise _not_joined_error("receive_weights")
        self._end_update("the next sync began before this one had ended")
        self._update, self._read = await self._receive_or_give_up(self.channel), False
        update = self._update
        try:
            for pair in update:
                yield pair
        except BaseException as error:
            if update is self._update:
                self._end_update(f"{type(error).__name__} in the load: {error}")
            raise
        self._read = True
        if self._loaded_at_end:
            self.finalize()

    async def _receive_or_give_up(self, channel: replicas.Channel) -> replicas.Update:
        """Wait for this sync's update (its version, open for reading), and return it.

        :raises replicas.errors.SyncError: for :data:`ALONE_S` seconds no trainer was a
            member, or :meth:`prepare` has begun the next sync, or no version came by
            the deadline.
        """
        life, until = self._sync_attempts, time.monotonic() + self._deadline_s
        alone_since: float | None = None
        pending = channel.receive(at_least=("sync", self._sync), deadline=self._deadline_s)
        while True:
            try:
                async with asyncio.timeout(_BEAT_S):
                    update = await pending
                if life == self._sync_attempts:
                    return update
                update.failed("the sync was broken off")
            except TimeoutError as error:
                if isinstance(error, errors.ReplicasError):  # the receive's own deadline
                    raise
            now = time.monotonic()
            if life != self._sync_attempts:
                raise errors.SyncError("the sync was broken off", phase="receive", hint="the next one has begun")
            members = channel.members
            there = channel.member not in members  # not admitted yet: the members are unknown
            there = there or any(member.group == TRAINERS and not member.rank for member in members)
            alone_since = None if there else alone_since or now
            if (alone_since is not None and now - alone_since > ALONE_S) or now > until + _BEAT_S:
                text = f"no trainer has joined channel {self._name!r}" if not there else "no version came in time"
                raise errors.SyncError(text, phase="receive", hint="start a trainer, then sync again")

    def finalize(self) -> None:
        """End the sync: report the version as loaded if it was read to its end, else as
        failed; do nothing without an open version."""
        update, read = self._update, self._read
        if update is None:
            return
        if not read:
            self._end_update("the update was not read to its end")
            return
        self._update = None
        update.loaded()

    def close(self) -> None:
        """Report an open version as failed, and leave the channel without a wait."""
        self._end_update("the worker left")
        self._leave()

    def _is_joined(self) -> bool:
        """Return True if this worker is still a member of the channel: its session
        answers within 0.25 s."""
        if self.channel is None:
            return False
        try:
            self.channel.committed(deadline=_BEAT_S)
        except errors.ReplicasError:  # fenced, or cut off for too long
            return False
        return True

    def _end_update(self, why: str) -> None:
        """End the open update, if there is one, and report its version to the channel
        as failed; only log an error of the report.

        :param why: the reason, a clause.
        """
        update, self._update, self._read = self._update, None, False
        if update is not None:
            try:
                update.failed(why)
            except errors.ReplicasError as error:
                logger.info("going on without reporting that version %s failed: %s", update.version, error)

    def _leave(self) -> None:
        """Close the channel without a wait, and forget this worker's place on it; do
        nothing without a channel."""
        channel, self.channel, self._seat, self._place = self.channel, None, None, None
        if channel is not None:
            channel.close(wait=False)


def _not_joined_error(what: str) -> errors.UsageError:
    """Return (do not raise) the error of a call before the worker has joined.

    :param what: name of the called method.
    """
    text = f"{what}: this worker has not joined the channel; it may be a new process"
    return errors.UsageError(text, hint="a sync begins with prepare() and init_process_group() on all workers")


def _share(weights: Iterable[tuple[str, torch.Tensor]], seat: Seat) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, tensor) for each tensor that this trainer publishes, and (name,
    None) for each one that another trainer does.

    A tensor is assigned to the trainer that has the fewest bytes so far; all trainers
    see the same tensors in the same order, so all compute the same.

    :param seat: this trainer's rank, and the number of trainers.
    """
    nbytes = [0] * seat.world_size
    for name, tensor in weights:
        owner = nbytes.index(min(nbytes))
        nbytes[owner] += tensor.nbytes
        yield name, tensor if owner == seat.rank else None

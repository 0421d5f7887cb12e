"""Run one collective between peers, on byte buffers for inputs and outputs.

Data moves as bytes, so that every dtype can be moved. Reductions work on the dtype;
every participant refuses dtypes that the backend cannot reduce, before any byte is
sent. ``inputs`` are only read: after a failure the operation runs again from them, in
another group.

Large broadcasts over Gloo go along a chain: with links of 800 Mbit/s, four hosts take
1.05 times as long as two; by Gloo's own broadcast, a binary tree, they take twice as
long (docs/measurements.md). NCCL pipelines its own broadcast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod

import torch

from replicas.core.base.dtypes import item_nbytes
from replicas.core.base.manifest import segment_layout
from replicas.messages import Segment
from replicas.sidecar.groups import REDUCIBLE, CollectiveGroup, StartedWork
from replicas.sidecar.wire import CollectiveSpec
from replicas.weights.copies.tensors import torch_dtype

CHAIN_MIN_NBYTES = 8 << 20
"""Smaller broadcasts are sent as a tree by Gloo itself."""
PIECE_MIN_NBYTES = 512 << 10
PIECE_MAX_NBYTES = 4 << 20
BROADCAST_NBYTES = 32 << 20
"""Larger broadcasts that do not go along a chain are done in pieces of this size."""
AHEAD = 4
"""Pieces that a member receives, and sends, at once: each may need staging memory."""
_EMPTY = torch.empty(0, dtype=torch.uint8)


def piece_nbytes(nbytes: int, members: int) -> int:
    """Return the size, in bytes, of the pieces in which ``nbytes`` are passed along a
    chain of ``members``.

    The last member has all bytes later than the first receiver, by the time of
    (members - 2) pieces. The size is such that this delay is a 16th of the whole time
    at most, unless pieces would be smaller than :data:`PIECE_MIN_NBYTES`.
    """
    return max(PIECE_MIN_NBYTES, min(PIECE_MAX_NBYTES, nbytes // (16 * max(1, members - 2))))


def run_collective(
    group: CollectiveGroup, spec: CollectiveSpec, inputs: torch.Tensor | None, outputs: torch.Tensor | None
) -> None:
    """Run one operation of this participant; block until its results are there.

    An attempt after the loss of a member has fewer participants than the first attempt.
    ``inputs`` and ``outputs`` are uint8 tensors, laid out by
    :func:`replicas.core.base.manifest.segment_layout`:

    * all_reduce, reduce: ``outputs`` has the layout of ``inputs`` and gets the result
      (for reduce, only the root's is valid);
    * broadcast: the root's ``inputs``, the others' ``outputs``;
    * all_gather, gather (the root): ``outputs`` has the segments of every participant,
      one after another;
    * scatter: the root's ``inputs`` has one segment for each participant of the first
      attempt; ``outputs`` gets the caller's own;
    * reduce_scatter: ``inputs`` has one segment for each participant of the first
      attempt; ``outputs`` has the same layout and gets the caller's own segment,
      reduced, in its place (the rest is scratch);
    * send: ``inputs``; recv: ``outputs``; both laid out by the sender's segments;
    * barrier: neither.

    :raises ValueError: the arguments do not fit the group or each other.
    :raises RuntimeError: a peer failed, or the timeout passed.
    """
    _Operation(group, spec, inputs, outputs).run()


class _Operation:
    """One collective of this participant; a generator for each kind starts works.

    *Works* are asynchronous operations of the group. The generator yields those that it
    has not awaited, for :meth:`run` to await.
    """

    def __init__(
        self, group: CollectiveGroup, spec: CollectiveSpec, inputs: torch.Tensor | None, outputs: torch.Tensor | None
    ) -> None:
        """Check that the operation fits the group; raise ValueError otherwise.

        :param inputs: uint8 memory to read, as of :func:`run_collective`; or None.
        :param outputs: uint8 memory to write; or None.
        """
        self.group = group
        self.spec = spec
        self.inputs = _EMPTY if inputs is None else inputs
        self.outputs = _EMPTY if outputs is None else outputs
        self.deadline = time.monotonic() + spec.timeout_s
        count = len(spec.lane_ranks)
        pair = spec.kind in ("send", "recv")
        if count != len(spec.segments) or (count != 2 if pair else count != group.size):
            raise ValueError(f"{spec.kind} of {count} participants in a group of {group.size}")
        if not 0 <= spec.me < count or spec.lane_ranks[spec.me] != group.rank:
            raise ValueError(f"participant {spec.me} of {spec.lane_ranks} is not rank {group.rank} of the group")
        if len(set(spec.lane_ranks)) != count or not all(0 <= rank < group.size for rank in spec.lane_ranks):
            raise ValueError(f"lane ranks {spec.lane_ranks} do not fit a group of {group.size}")
        if spec.kind in ("broadcast", "reduce", "gather", "scatter") and not 0 <= spec.root < count:
            raise ValueError(f"{spec.kind} needs a root among its {count} participants")
        self.places = spec.places or tuple(range(count))
        if len(self.places) != count or len(set(self.places)) != count or min(self.places) < 0:
            raise ValueError(f"places {spec.places} do not fit {count} participants")

    def run(self) -> None:
        """Run the operation to its end, and divide the sums of a mean.

        Blocks until the results are in ``outputs``.

        :raises RuntimeError: a peer failed, or the timeout passed.
        """
        run = {
            "all_reduce": self._reduce,
            "broadcast": self._broadcast,
            "reduce": self._reduce,
            "all_gather": self._all_gather,
            "gather": self._gather,
            "scatter": self._scatter,
            "reduce_scatter": self._reduce_scatter,
            "send": self._send,
            "recv": self._recv,
            "barrier": self._barrier,
        }[self.spec.kind]
        for handle in list(run()):
            handle.wait()
        if self.spec.reduce_op == "mean" and self.spec.kind in ("all_reduce", "reduce", "reduce_scatter"):
            mine = [self._reduced()[self.spec.me]] if self.spec.kind == "reduce_scatter" else self._runs()
            for tensor in mine:
                tensor.div_(self.group.size)

    def _copy_inputs(self) -> None:
        """Copy this participant's segments from ``inputs`` to ``outputs``."""
        _, nbytes = segment_layout(self.spec.segments[self.spec.me])
        self._region(self.outputs, 0, nbytes).copy_(self._region(self.inputs, 0, nbytes))

    def _reduce(self) -> Iterator[StartedWork]:
        """Copy ``inputs`` to ``outputs``, and reduce there in place, to all or to the
        root.

        Starts one reduction for all tensors of one dtype that follow each other, and
        yields its work.
        """
        runs = list(self._runs())
        self._copy_inputs()
        for tensor in runs:
            if self.spec.kind == "all_reduce":
                yield self.group.all_reduce(tensor, self.spec.reduce_op, self.deadline)
            else:
                yield self.group.reduce(tensor, self._root_rank, self.spec.reduce_op, self.deadline)

    def _reduce_scatter(self) -> Iterator[StartedWork]:
        """Copy ``inputs`` to ``outputs``, and reduce there in place.

        Starts a reduction for each participant, of the segment that this participant
        gets, to its rank; yields the works.
        """
        tensors = self._reduced()
        self._copy_inputs()
        for rank, tensor in zip(self.spec.lane_ranks, tensors, strict=True):
            if tensor.numel():
                yield self.group.reduce(tensor, rank, self.spec.reduce_op, self.deadline)

    def _reduced(self) -> list[torch.Tensor]:
        """Return every participant's segment in ``outputs``, as typed tensors.

        For reduce_scatter: views, in the order of the participants.
        """
        segments = self._one_each(self.spec.me)
        offsets, _ = segment_layout(segments)
        regions = [self._region(self.outputs, offsets[place], _padded(segments[place])) for place in self.places]
        return [self._typed(region, segments[place].dtype) for region, place in zip(regions, self.places, strict=True)]

    def _broadcast(self) -> Iterator[StartedWork]:
        """Start the root's sends, or our receives, along a chain if that is faster.

        Waits for the earlier pieces of a large region, and yields the last works.
        """
        memory = self.inputs if self.spec.me == self.spec.root else self.outputs
        region = self._region(memory, 0, _unpadded(self.spec.segments[self.spec.root]))
        if self.group.backend == "gloo" and self.group.size > 2 and region.numel() > CHAIN_MIN_NBYTES:
            yield from _few_at_once(self._pass_along(region))
        elif region.numel():
            pieces = torch.split(region, BROADCAST_NBYTES)
            yield from _few_at_once(self.group.broadcast(one, self._root_rank, self.deadline) for one in pieces)

    def _pass_along(self, region: torch.Tensor) -> Iterator[StartedWork]:
        """Send the region along a chain of all members, from the root, in pieces.

        Each member receives a piece while it sends the piece before to the next member:
        so each link carries every byte once, for any number of members. Waits for its
        receives; yields the sends that it starts.
        """
        ranks, me, count = self.spec.lane_ranks, self.spec.me, self.group.size
        place = (me - self.spec.root) % count
        pieces = torch.split(region, piece_nbytes(region.numel(), count))
        receives = (self.group.receive(one, ranks[me - 1], self.deadline) for one in pieces if place)
        arriving = deque(islice(receives, AHEAD))
        for piece in pieces:
            if place:
                arriving.popleft().wait()
                arriving.extend(islice(receives, 1))
            if place + 1 < count:
                yield self.group.send(piece, ranks[(me + 1) % count], self.deadline)

    def _all_gather(self) -> Iterator[StartedWork]:
        """Start a broadcast of each participant's part; yield the works."""
        for rank, region in self._gathered():
            yield self.group.broadcast(region, rank, self.deadline)

    def _gather(self) -> Iterator[StartedWork]:
        """Start to send our part to the root, or as the root to receive all parts.

        Yields the started works.
        """
        if self.spec.me != self.spec.root:
            for region in self._whole(self.inputs, self.spec.me):
                yield self.group.send(region, self._root_rank, self.deadline)
            return
        for rank, region in self._gathered():
            if rank != self.group.rank:
                yield self.group.receive(region, rank, self.deadline)

    def _scatter(self) -> Iterator[StartedWork]:
        """Start to receive our part, or as the root to send all; yield the works."""
        segments = self._one_each(self.spec.root)
        nbytes = _padded(segments[self.places[self.spec.me]])
        mine = self._region(self.outputs, 0, nbytes)
        if self.spec.me != self.spec.root:
            if nbytes:
                yield self.group.receive(mine, self._root_rank, self.deadline)
            return
        offsets, _ = segment_layout(segments)
        for index, place in enumerate(self.places):
            region = self._region(self.inputs, offsets[place], _padded(segments[place]))
            if index == self.spec.me:
                mine.copy_(region)
            elif region.numel():
                yield self.group.send(region, self.spec.lane_ranks[index], self.deadline)

    def _send(self) -> Iterator[StartedWork]:
        """Start to send ``inputs`` to the other participant; yield the work."""
        for region in self._whole(self.inputs, self.spec.me):
            yield self.group.send(region, self.spec.lane_ranks[1 - self.spec.me], self.deadline)

    def _recv(self) -> Iterator[StartedWork]:
        """Start to receive ``outputs`` from the other participant; yield the work."""
        for region in self._whole(self.outputs, 1 - self.spec.me):
            yield self.group.receive(region, self.spec.lane_ranks[1 - self.spec.me], self.deadline)

    def _barrier(self) -> Iterator[StartedWork]:
        """Start an all-reduce of one number: it ends when all have called; yield it."""
        yield self.group.all_reduce(torch.zeros(1, dtype=torch.int32), "sum", self.deadline)

    @property
    def _root_rank(self) -> int:
        """The root's rank in the group."""
        return self.spec.lane_ranks[self.spec.root]

    def _one_each(self, participant: int) -> tuple[Segment, ...]:
        """Return ``participant``'s segments: one for each member of the first attempt,
        also for members that were lost since then.

        :raises ValueError: their number is wrong.
        """
        segments = self.spec.segments[participant]
        if len(segments) <= max(self.places) or (not self.spec.places and len(segments) != len(self.places)):
            raise ValueError(f"{self.spec.kind} has {len(segments)} segments for {len(self.places)} participants")
        return segments

    def _runs(self) -> Iterator[torch.Tensor]:
        """Yield own segments in ``outputs``: those of one dtype that follow each other
        as one flat tensor, a view of ``outputs``."""
        segments = self.spec.segments[self.spec.me]
        offsets, total = segment_layout(segments)
        first = 0
        for index, segment in enumerate(segments):
            if index + 1 == len(segments) or segments[index + 1].dtype != segment.dtype:
                end = total if index + 1 == len(segments) else offsets[index + 1]
                if end > offsets[first]:
                    yield self._typed(self._region(self.outputs, offsets[first], end - offsets[first]), segment.dtype)
                first = index + 1

    def _whole(self, memory: torch.Tensor, participant: int) -> list[torch.Tensor]:
        """Return a list with the region of a participant's segments in ``memory``.

        The list is empty if the segments have no bytes.
        """
        _, nbytes = segment_layout(self.spec.segments[participant])
        return [self._region(memory, 0, nbytes)] if nbytes else []

    def _gathered(self) -> list[tuple[int, torch.Tensor]]:
        """Copy our part to its place in ``outputs``; return all non-empty parts.

        :returns: (rank in the group, part), as views of ``outputs``.
        """
        offsets, total = segment_layout([segment for segments in self.spec.segments for segment in segments])
        bounds = [*offsets, total]
        regions: list[torch.Tensor] = []
        position = 0
        for segments in self.spec.segments:
            start, position = bounds[position], position + len(segments)
            regions.append(self._region(self.outputs, start, bounds[position] - start))
        mine = regions[self.spec.me]
        mine.copy_(self.inputs[: mine.numel()])
        return [(rank, one) for rank, one in zip(self.spec.lane_ranks, regions, strict=True) if one.numel()]

    def _region(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        """Return a view of ``memory``: ``nbytes`` from ``offset`` on.

        :raises ValueError: it is too small.
        """
        if offset + nbytes > memory.numel():
            raise ValueError(f"{self.spec.kind} needs {offset + nbytes} bytes, but its buffer has {memory.numel()}")
        return memory[offset : offset + nbytes]

    def _typed(self, region: torch.Tensor, dtype: str) -> torch.Tensor:
        """Return ``region``, bytes, as a view of this dtype.

        :raises ValueError: the group cannot reduce that dtype.
        """
        kind = torch_dtype(dtype)
        if dtype not in REDUCIBLE:
            raise ValueError(f"{self.group.backend} cannot reduce {dtype} tensors")
        if self.spec.reduce_op == "mean" and not kind.is_floating_point:
            raise ValueError(f"the mean of {dtype} tensors is not defined; use sum")
        return region.view(kind)


def _few_at_once(works: Iterator[StartedWork]) -> Iterator[StartedWork]:
    """Iterate over ``works``, which starts them, with at most a few not yet ended.

    Waits for each earlier one; yields the last few, for which the caller must wait.
    """
    under_way = deque[StartedWork]()
    for work in works:
        under_way.append(work)
        if len(under_way) > AHEAD:
            under_way.popleft().wait()
    yield from under_way


def _padded(segment: Segment) -> int:
    """Return the bytes of a segment, rounded up to its alignment."""
    return segment_layout([segment])[1]


def _unpadded(segments: Sequence[Segment]) -> int:
    """Return the number of bytes up to the end of the last segment, without the padding
    behind it."""
    offsets, _ = segment_layout(segments)
    return offsets[-1] + prod(segments[-1].shape) * item_nbytes(segments[-1].dtype) if segments else 0

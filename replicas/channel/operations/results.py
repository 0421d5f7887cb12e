"""Inputs, output layout and results of each kind of operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import prod

import msgspec
import torch

from replicas import errors
from replicas.channel.operations.scratch import call_point, copy_out, gpu_of, read_segments, segments_of
from replicas.channel.pending import Receipt
from replicas.core.versions.manifest import item_nbytes
from replicas.messages import OperationGo, OperationKind, ReceiptData, ReduceOp, Segment
from replicas.messages.identity import Member
from replicas.weights.copying import copy_elements
from replicas.weights.devices.accelerator import Event, device_of
from replicas.weights.memory.arena import Buffer
from replicas.weights.tensors import dtype_name

__all__ = ["OperationCall"]

QUICK_NBYTES = 1 << 20
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_GATHERING = ("all_gather", "gather")


@dataclass(frozen=True, eq=False)
class OperationCall:
    """One call of an operation.

    :param inputs: tensors whose values are sent; empty where this member sends none.
    :param targets: the caller's tensors to write on success; None: results go to new
        tensors.
    :param called: events that mark the work queued on the caller's stream at the call,
        if tensors are on a GPU.
    """

    kind: OperationKind
    inputs: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] | None = None
    reduce_op: ReduceOp = "sum"
    root: str = ""
    step: int | None = None
    called: list[Event] = field(default_factory=list)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments that this member posts: with inputs, also the scratch layout."""
        return segments_of(self.inputs or self.targets or ())

    @cached_property
    def device(self) -> str:
        """Device type of the tensors that take part."""
        if self.gpu:
            return device_of(self.gpu).kind
        tensors = (*self.inputs, *(self.targets or ()))
        return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")

    @cached_property
    def gpu(self) -> str:
        """UUID of the GPU that its tensors are on; empty: host memory."""
        return gpu_of((*self.inputs, *(self.targets or ())))

    def written(self, member: Member, *, each: bool) -> tuple[torch.Tensor, ...]:
        """Tensors that will be written. ``each``: a root has the caller's own rank."""
        names = {member.name, member.replica_name if each or not member.rank else ""}
        is_root = self.root in names
        match self.kind:
            case "broadcast":
                return () if is_root else self.inputs
            case "reduce":
                return self.inputs if is_root else ()
            case "all_reduce":
                return self.inputs
            case "gather" if not is_root:
                return ()
            case _:
                return self.targets or ()

    def begin(self) -> None:
        """On the caller's thread: order writes of results behind its stream's work."""
        if self.gpu:
            self.called.append(call_point(self.gpu))

    @property
    def quick(self) -> bool:
        """Whether a hop to a worker thread would take longer than the write."""
        return self.kind in ("barrier", *_IN_PLACE) and self.device == "cpu" and _nbytes(self.segments) <= QUICK_NBYTES

    def output_segments(self, go: OperationGo, me: int) -> tuple[Segment, ...]:
        """Layout of participant ``me``'s output buffer; the targets must fit."""
        self._targets(go, self._result_segments(go, me))
        if self.kind in ("all_reduce", "reduce", "reduce_scatter"):
            return go.segments[me]
        return self._result_segments(go, me)

    def _result_segments(self, go: OperationGo, me: int) -> tuple[Segment, ...]:
        match self.kind:
            case "all_reduce":
                return go.segments[me]
            case "reduce":
                return go.segments[me] if me == go.root else ()
            case "broadcast":
                return go.segments[go.root] if me != go.root else ()
            case "all_gather":
                return tuple(segment for segments in go.segments for segment in segments)
            case "gather":
                return tuple(segment for segments in go.segments for segment in segments) if me == go.root else ()
            case "scatter":
                return (go.segments[go.root][_place(go, me)],)
            case "reduce_scatter":
                return (go.segments[me][_place(go, me)],)
            case "recv":
                return go.segments[go.root]
            case _:
                return ()

    def _targets(self, go: OperationGo, found: Sequence[Segment]) -> tuple[torch.Tensor, ...] | None:
        """The caller's tensors to write, checked for fit; None: make new ones."""
        if self.kind in _IN_PLACE:
            return self.inputs
        if self.targets is None or not found:
            return None
        targets = self.targets
        counts = {len(segments) for segments in go.segments}
        if self.kind in _GATHERING and len(targets) > len(found) and len(counts) == 1:
            each = counts.pop()  # given for the first attempt: take the remaining members'
            places = (_place(go, participant) for participant in range(len(go.participants)))
            targets = tuple(tensor for place in places for tensor in targets[place * each : (place + 1) * each])
        given = [(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in targets]
        coming = [(segment.dtype, segment.shape) for segment in found]
        if given != coming:
            text = f"{self.kind}: the tensors given here are {_text(given)}, the others send {_text(coming)}"
            hint = "give tensors of the shapes and dtypes that are sent, or none to have them made"
            raise errors.RanksDisagree(text, hint=hint)
        return targets

    def finish(self, data: ReceiptData, go: OperationGo, me: int, outputs: Buffer | None) -> Receipt:
        """Write the results into the caller's tensors or new ones, on any thread."""
        found = self._result_segments(go, me)
        data = msgspec.structs.replace(data, nbytes=_nbytes(self.segments or found))
        if not found or outputs is None:
            return Receipt.of(data)
        results = read_segments(outputs, self.output_segments(go, me))
        if self.kind == "reduce_scatter":
            results = (results[_place(go, me)],)
        targets = self._targets(go, found)
        if targets is None:
            tensors = self._made(results, outputs)
        else:
            self._write(targets, results, outputs)
            tensors = targets
        if self.kind in _IN_PLACE:
            return Receipt.of(data)
        if self.kind not in _GATHERING:
            return Receipt.of(data, tensors=tensors)
        rest = iter(tensors)
        pieces = (tuple(islice(rest, len(segments))) for segments in go.segments)
        return Receipt.of(data, outputs=dict(zip(go.participants, pieces, strict=True)))

    def _made(self, results: Sequence[torch.Tensor], source: Buffer) -> tuple[torch.Tensor, ...]:
        device = self.inputs[0].device if self.inputs else torch.device("cpu")
        made = tuple(torch.empty(result.shape, dtype=result.dtype, device=device) for result in results)
        # the allocator may hand out memory that another tensor had on the stream it was
        # made for, and that stream may still use it
        self._write(made, results, source, *((call_point(self.gpu),) if self.gpu else ()))
        return made

    def _write(
        self, targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor], source: Buffer, *after: Event
    ) -> None:
        if self.gpu:
            copy_out(self.gpu, targets, results, source, (*self.called, *after))
            return
        for target, result in zip(targets, results, strict=True):
            copy_elements(target.detach(), result)


def _place(go: OperationGo, participant: int) -> int:
    """Index of a participant among those of the first attempt."""
    return go.places[participant] if go.places else participant


def _nbytes(segments: Sequence[Segment]) -> int:
    return sum(prod(segment.shape) * item_nbytes(segment.dtype) for segment in segments)


def _text(specs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in specs) or "none"

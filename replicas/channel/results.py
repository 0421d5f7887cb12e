"""What each kind of operation takes and gives: its inputs, where its results lie, and what the caller sees of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from replicas import errors
from replicas.channel.pending import Receipt
from replicas.channel.scratch import read_segments, segments_of
from replicas.messages import OperationGo, OperationKind, ReceiptData, ReduceOp, Segment
from replicas.weights.arena import Buffer
from replicas.weights.layout import copy_elements
from replicas.weights.tensors import dtype_name

__all__ = ["Operation"]

_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_GATHERING = ("all_gather", "gather")


@dataclass(frozen=True, eq=False)
class Operation:
    """One call.

    :param inputs: tensors whose values are sent; empty where this member sends none.
    :param targets: the caller's tensors to be written on success; None: new tensors are made where there are results.
    :param posted: what is posted when there are no inputs (``recv`` and ``scatter`` with targets).
    """

    kind: OperationKind
    inputs: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] | None = None
    posted: tuple[Segment, ...] = ()
    reduce_op: ReduceOp = "sum"
    root: str = ""
    step: int | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What this member posts, which for one with inputs is how they lie in the scratch buffer."""
        return segments_of(self.inputs) if self.inputs else self.posted

    @property
    def device(self) -> str:
        """Device type of the tensors that take part."""
        tensors = (*self.inputs, *(self.targets or ()))
        return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")

    def output_segments(self, go: OperationGo, me: int) -> tuple[Segment, ...]:
        """What the sidecar writes into the output buffer of participant number ``me``.

        :raises replicas.errors.RanksDisagree: the caller's tensors do not fit what the others posted.
        """
        found: tuple[Segment, ...] = ()
        if self.kind == "all_gather" or (self.kind == "gather" and me == go.root):
            found = tuple(segment for segments in go.segments for segment in segments)
        elif self.kind == "scatter":
            found = (go.segments[go.root][me],)
        elif self.kind == "reduce_scatter":
            found = (go.segments[me][me],)
        elif self.kind == "recv":
            found = go.segments[go.root]
        if found:
            self._check(found)
        return found

    def _check(self, found: Sequence[Segment]) -> None:
        """The caller's own tensors must be just as large as what will come."""
        if self.targets is None:
            return
        given = [(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in self.targets]
        coming = [(segment.dtype, segment.shape) for segment in found]
        if given != coming:
            raise errors.RanksDisagree(
                f"{self.kind}: the tensors given here are {_text(given)}, the others send {_text(coming)}",
                hint="give tensors of the shapes and dtypes that are sent, or none to have them made",
            )

    def finish(
        self, data: ReceiptData, go: OperationGo, me: int, inputs: Buffer | None, outputs: Buffer | None
    ) -> Receipt:
        """Write the results into the caller's tensors (or make new ones). On a worker thread."""
        if self.kind in _IN_PLACE:
            receives = self.kind == "all_reduce" or (self.kind == "reduce") == (me == go.root)
            if receives and inputs is not None:
                results = read_segments(inputs, self.segments)
                _write(self.inputs, results)
            return Receipt.of(data)
        found = self.output_segments(go, me)
        if not found or outputs is None:
            return Receipt.of(data)
        results = read_segments(outputs, found)
        if self.targets is not None:
            _write(self.targets, results)
            tensors = self.targets
        else:
            tensors = self._made(results)
        if self.kind not in _GATHERING:
            return Receipt.of(data, tensors=tensors)
        pieces = _split(tensors, [len(segments) for segments in go.segments])
        return Receipt.of(data, outputs=dict(zip(go.participants, pieces, strict=True)))

    def _made(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """New tensors on the device of the inputs."""
        device = self.inputs[0].device if self.inputs else torch.device("cpu")
        made = tuple(torch.empty(result.shape, dtype=result.dtype, device=device) for result in results)
        _write(made, results)
        return made


def _write(targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    for target, result in zip(targets, results, strict=True):
        copy_elements(target.detach(), result)
    if any(target.device.type == "cuda" for target in targets):
        torch.cuda.synchronize()


def _split(tensors: tuple[torch.Tensor, ...], counts: Sequence[int]) -> Iterator[tuple[torch.Tensor, ...]]:
    start = 0
    for count in counts:
        yield tensors[start : start + count]
        start += count


def _text(specs: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in specs) or "none"

"""The collectives of `Channel`: they check arguments, on the caller's thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn, get_args

import torch

from replicas import errors
from replicas.channel.operations.results import OperationCall
from replicas.channel.operations.scratch import segments_of
from replicas.channel.session.pending import Pending, Receipt
from replicas.messages import OperationKind, ReduceOp, arguments
from replicas.messages.bounds import is_name, shown
from replicas.messages.identity import Member
from replicas.weights.copies.tensors import PLAIN, alias_of, check_modes, is_dtensor, why_unusable

Tensors = torch.Tensor | Sequence[torch.Tensor]
"""One dense tensor or several, of any dtypes, shapes, strides and devices."""
Peer = Member | str
"""A member, ``"group/replica/rank"`` or ``"group/replica"``.

The last means the rank of that replica that is in the caller's lane.
"""

_PEER = re.compile(r"[^/]+/[0-9]{1,7}(/[0-9]{1,7})?")


@arguments.refuse_unknown_keywords
class Collectives:
    """**Collectives between the peers of a channel** are methods of the channel, too.
    Each call copies the tensors and returns a :class:`Pending` of a :class:`Receipt`.
    Results are written into the caller's tensors only after the operation has succeeded
    for every peer, before the Pending resolves.

    Calls are matched in the order in which each member makes them; ``step`` tags (whole
    numbers that grow) keep a peer that joined again from being matched with the wrong
    call.

    With ``on_lost = "drop"`` (the default of a channel) an operation that loses a
    member, or a member that no longer responds, runs again over the others, from the
    tensors as they were at the call: a mean divides by the number of members that took
    part, and the receipt's ``members``, ``lost`` and ``reasons`` name all members. A
    failure with all members alive is retried once, with all of them.

    ``deadline`` is in seconds for all attempts together, by default the channel's. A
    Pending fails with

    * :class:`~replicas.errors.PeersLost`: a required member died: the root, the other
      member of a pair, or any member with ``on_lost = "raise"``;
    * :class:`~replicas.errors.SyncError`: a link between peers is broken, and the error
      names those that cannot reach each other; or the operation failed twice in another
      way;
    * :class:`~replicas.errors.Preflight`: the peers never reached each other;
    * :class:`~replicas.errors.DeadlineExceeded`: a peer did not call, or the operation
      took too long;
    * :class:`~replicas.errors.RanksDisagree`: the peers called different operations;
    * :class:`~replicas.errors.Gone`: ``step`` has passed; or the others continued
      without this member while it did not respond. Its next call matches their next;
    * :class:`~replicas.errors.OutcomeUnknown`: no verdict came in time; wait again, or
      make the next call, which settles it;
    * :class:`~replicas.errors.Disconnected`: the coordinator was replaced before the
      operation ran: it did not happen, call again.

    The call itself raises :class:`~replicas.errors.UsageError` for invalid arguments,
    :class:`~replicas.errors.NoCapacity` when there is no memory for the copy, and
    :class:`~replicas.errors.Gone` (once) when an earlier operation of unknown outcome
    succeeded and no caller has waited for it again.
    """

    def _start_operation(self, operation: OperationCall, deadline: float | None) -> Pending[Receipt]:
        """Start ``operation``, after checks of this rank's role and tensors.

        The channel implements it.

        :param deadline: seconds; None: the channel's.
        :returns: a Pending of the operation's receipt.
        """
        raise NotImplementedError

    def _post(
        self,
        kind: OperationKind,
        given: Tensors | None,
        out: Tensors | None = None,
        *,
        op: ReduceOp = "sum",
        root: tuple[str, Peer] | None = None,
        step: int | None,
        deadline: float | None,
    ) -> Pending[Receipt]:
        """Check the arguments of a method, and start the operation ``kind``.

        :param given: the caller's tensors; None where the method has none to send.
        :param out: tensors for the results; None: new ones.
        :param op: how to reduce; only for reductions.
        :param root: (name of the argument, peer), of operations with a source or
            destination.
        :param step: a tag that all peers' calls must share, or None.
        :param deadline: seconds; None: the channel's.
        :raises replicas.errors.UsageError: an argument is invalid; nothing was sent.
        """
        inputs = () if given is None and kind in ("scatter", "recv", "barrier") else _tensors(kind, given)
        if kind in ("all_reduce", "reduce", "reduce_scatter"):
            _check_op(kind, op, inputs)
        operation = OperationCall(
            kind,
            inputs,
            targets=None if out is None else _tensors(kind, out),
            reduce_op=op,
            root="" if root is None else _peer(*root),
            step=step,
        )
        return self._start_operation(operation, deadline)

    def all_reduce(
        self, tensors: Tensors, op: ReduceOp = "sum", *, step: int | None = None, deadline: float | None = None
    ) -> Pending[Receipt]:
        """Reduce elementwise over all peers, in place, on every peer.

        Sums, also those of a mean, have the tensors' dtype: a float16 sum above 65,504
        is infinite, and bfloat16 rounds each partial sum. Pass float32 where that
        matters.

        :param op: sum, mean (floating dtypes), min or max; default sum.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("all_reduce", tensors, op=op, step=step, deadline=deadline)

    def broadcast(
        self, tensors: Tensors, src: Peer, *, step: int | None = None, deadline: float | None = None
    ) -> Pending[Receipt]:
        """Give every peer ``src``'s values, in place; shapes and dtypes must match.

        :param src: the peer whose tensors all get.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("broadcast", tensors, root=("src", src), step=step, deadline=deadline)

    def reduce(
        self,
        tensors: Tensors,
        dst: Peer,
        op: ReduceOp = "sum",
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> Pending[Receipt]:
        """Reduce elementwise over all peers, into ``dst``'s tensors, in place.

        The tensors of the other peers are only read.

        :param dst: the peer that gets the result.
        :param op: sum, mean (floating dtypes), min or max; default sum.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("reduce", tensors, op=op, root=("dst", dst), step=step, deadline=deadline)

    def all_gather(
        self,
        tensors: Tensors,
        out: Sequence[torch.Tensor] | None = None,
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> Pending[Receipt]:
        """Give all peers' tensors to every peer, in ``receipt.outputs`` by member.

        Shapes and dtypes may differ by member.

        :param out: tensors to write into: those of the first participant, then of the
            next, in the order of members. Those of a lost member stay unchanged.
            Default: new tensors.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("all_gather", tensors, out, step=step, deadline=deadline)

    def gather(
        self,
        tensors: Tensors,
        dst: Peer,
        out: Sequence[torch.Tensor] | None = None,
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> Pending[Receipt]:
        """Give all peers' tensors to ``dst``, in its ``receipt.outputs`` by member.

        :param dst: the peer that gets them; the others' receipts have no outputs.
        :param out: on ``dst``, tensors to write into: those of the first participant,
            then of the next, in the order of members. Default: new tensors.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("gather", tensors, out, root=("dst", dst), step=step, deadline=deadline)

    def scatter(
        self,
        tensors: Sequence[torch.Tensor] | None,
        src: Peer,
        out: torch.Tensor | None = None,
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> Pending[Receipt]:
        """Give each participant one of ``src``'s tensors, in the order of members.

        The tensor is in ``receipt.tensors`` and ``out``. A lost member does not get its
        tensor; those of the others stay the same.

        :param tensors: on ``src`` one tensor for each participant; None on the others.
        :param out: the tensor to write into; default: a new one.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("scatter", tensors, out, root=("src", src), step=step, deadline=deadline)

    def reduce_scatter(
        self,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp = "sum",
        out: torch.Tensor | None = None,
        *,
        step: int | None = None,
        deadline: float | None = None,
    ) -> Pending[Receipt]:
        """Reduce the i-th tensors of all peers; give the result to the i-th peer.

        The result is in ``receipt.tensors`` and ``out``. The tensors for a lost member
        are dropped.

        :param tensors: one for each participant, in the order of members.
        :param op: sum, mean (floating dtypes), min or max; default sum.
        :param out: the tensor to write into; default: a new one.
        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("reduce_scatter", tensors, out, op=op, step=step, deadline=deadline)

    def send(
        self, tensors: Tensors, dst: Peer, *, step: int | None = None, deadline: float | None = None
    ) -> Pending[Receipt]:
        """Send to one peer, which calls :meth:`recv`; other peers need not call.

        :param dst: the peer; the Pending ends when it has received the tensors.
        :param step: a tag that the peer's call must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("send", tensors, root=("dst", dst), step=step, deadline=deadline)

    def recv(
        self, tensors: Tensors | None = None, *, src: Peer, step: int | None = None, deadline: float | None = None
    ) -> Pending[Receipt]:
        """Receive from one peer; the tensors are in ``receipt.tensors``.

        :param tensors: tensors to write into, of the shapes and dtypes sent; default:
            new CPU tensors.
        :param step: a tag that the peer's call must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("recv", None, tensors, root=("src", src), step=step, deadline=deadline)

    def barrier(self, *, step: int | None = None, deadline: float | None = None) -> Pending[Receipt]:
        """Return a Pending that resolves when every peer has called this method.

        :param step: a tag that all peers' calls must share; it grows. Default: none.
        :param deadline: seconds; default: the channel's.
        """
        return self._post("barrier", None, step=step, deadline=deadline)


def _fail(text: str, hint: str) -> NoReturn:
    """Raise a UsageError with ``text``, and with the remedy ``hint``."""
    raise errors.UsageError(text, hint=hint)


def _tensors(kind: str, given: Tensors | None) -> tuple[torch.Tensor, ...]:
    """Check the tensors given to the operation ``kind``, and return them as a tuple.

    Subclasses of Tensor come as plain tensors over the same memory.

    :raises replicas.errors.UsageError: there is no tensor, or one is unusable.
    """
    if not isinstance(given, (torch.Tensor, Iterable)):
        _fail(f"{kind} was given a {type(given).__name__}", "pass a tensor or a sequence of them")
    tensors = (given,) if isinstance(given, torch.Tensor) else tuple(given)
    if not tensors:
        _fail(f"{kind} was given no tensor", "pass a tensor or a sequence of them")
    check_modes(kind)
    tensors = tuple(_usable(kind, number, tensor) for number, tensor in enumerate(tensors))
    segments_of(tensors)  # raises for a dtype that cannot be sent
    return tensors


def _usable(kind: str, number: int, tensor: object) -> torch.Tensor:
    """Return the tensor, a subclass as a plain tensor over the same memory.

    :param kind: name of the operation, for the error.
    :param number: index of the tensor in the call, for the error.
    :raises replicas.errors.UsageError: it is not a tensor, or a DTensor, quantized, or
        without dense memory.
    """
    if not isinstance(tensor, torch.Tensor):
        _fail(f"{kind} was given a {type(tensor).__name__}", "pass a tensor or a sequence of them")
    if is_dtensor(tensor):
        _fail(f"{kind} was given a DTensor", "pass its to_local()")
    if why := why_unusable(tensor):
        _fail(f"{kind}: tensor {number} {why}", "pass dense, strided tensors that have memory")
    taken = alias_of(tensor)
    if taken.is_quantized:
        _fail(f"{kind}: tensor {number} is quantized", "pass its int_repr()")
    return tensor if type(tensor) in PLAIN else taken


def _check_op(kind: str, op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise UsageError for an unknown ``op``, or the mean of integer tensors.

    :param kind: name of the operation, for the error.
    """
    if not isinstance(op, str) or op not in get_args(ReduceOp):
        _fail(f"{kind}: unknown op {shown(op)}", "use sum, mean, min or max")
    if op == "mean":
        for tensor in tensors:
            if not tensor.dtype.is_floating_point:
                text = f"{kind}: the mean of {tensor.dtype} is not defined"
                _fail(text, "use op='sum', or convert to a floating dtype")


def _peer(argument: str, peer: Peer) -> str:
    """Return ``group/replica`` or ``group/replica/rank`` of a peer, in normal form.

    :param argument: its name, for errors.
    :raises replicas.errors.UsageError: ``peer`` is not valid.
    """
    name = peer.name if isinstance(peer, Member) else peer
    if not isinstance(name, str) or not _PEER.fullmatch(name) or not is_name(name.partition("/")[0]):
        text = f"{argument} must be a Member, 'group/replica' or 'group/replica/rank', not {shown(peer)}"
        _fail(text, "see channel.members")
    group, *numbers = name.split("/")
    return "/".join((group, *(str(int(number)) for number in numbers)))

"""What a connection may do to the coordinator: sizes, times, counts, and the values
that a message may carry.

Theory of operation
===================

Whoever has the run's token can open a session, and then be mad: flood, send anything,
read nothing. None of it may reach the state machines or hold up the loop that serves
everybody. So each message passes here first, cheapest check first: its size by kind
(before it is decoded: manifests come in small pieces, only the shapes of an operation
may be large), its form (msgspec, a closed set of types), its values (no negative
numbers, nothing that is not finite, names that can be shown and compared), and only
then the engine.

*Fairness* is counted in the time for which the loop was busy with somebody (by the
cheap clock: the thread's own costs as much as a small message; whoever is charged for a
moment in which this process did not run has a reserve). A session has a small account,
:class:`RateLimit`, that fills up at a fixed share of real time; handling its messages
is paid from it, and one that is overdrawn is simply read later: TCP holds the sender
back. A single expensive message is not punished, thousands are.

Each refusal has one of the reasons in :data:`REASONS`, which are also the values of a
metric's label.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec

from replicas import messages as wire
from replicas.messages.bounds import (
    FRAME_NBYTES,
    HELLO_NBYTES,
    INFO_ENTRIES,
    INFO_LENGTH,
    INTEGER_MAX,
    NAME_LENGTH,
    OTHER_NBYTES,
    RANKS_MAX,
    SECONDS_MAX,
    VERSION_MAX,
    is_name,
    most_nbytes,
)
from replicas.messages.identity import ProcessIdentity

__all__ = [
    "CLOSE_TIMEOUT_S",
    "FRAGMENTS",
    "FRAME_NBYTES",
    "HEAD_NBYTES",
    "HELLO_NBYTES",
    "HELLO_TIMEOUT_S",
    "LOBBY",
    "MESSAGES_WAITING",
    "OUTBOX_MESSAGES",
    "OUTBOX_NBYTES",
    "QUEUED",
    "READ_NBYTES",
    "REASONS",
    "REFUSED_MAX",
    "REQUEST_S",
    "REQUEST_TIMEOUT_S",
    "STALL_TIMEOUT_S",
    "STRANGERS",
    "RateLimit",
    "hello_problem",
    "message_problem",
    "size_problem",
]

REASONS = (
    "token",  # a wrong token, or none
    "peer",  # another user's process on the Unix socket
    "timeout",  # no request or no Hello in time, or an answer that is not taken
    "too_many",  # more strangers than can be served; those of the source that has most go
    "host",  # a page of somebody else's name: DNS rebinding
    "malformed",  # not HTTP, not a message, or values that no member can mean
    "oversized",  # larger than a message of its kind may be
    "out_of_order",  # a number or an ack that cannot be, or a second Hello
    "hello",  # a Hello that is not acceptable: channel, run, rank, preflight
    "fenced",  # a stale incarnation
    "flood",  # more messages than one session may send: it is read more slowly (counted once for each connection)
    "overflow",  # it let too much pile up unread
)

REQUEST_TIMEOUT_S = 5.0
"""From the connection to the end of its request's head, and for a stranger from there
to its turn."""
HEAD_NBYTES = 16 * 1024
"""Of the head of a request."""
REQUEST_S = 500e-6
"""What the request of a stranger costs beside its handling: a transport, parsing, the
close."""
HELLO_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
"""How long the peer may take to read what is left, once its connection is being
closed."""
STALL_TIMEOUT_S = 5.0
"""How long the reader of a page may take for a buffer of it."""
LOBBY = 4096
"""Connections that have not said what they want; never more than a quarter of this
process's descriptors."""
QUEUED = 512
"""Requests of strangers that wait for their turn."""
STRANGERS = 128
"""Connections of strangers that are being served."""
READ_NBYTES = 4096
"""How much is read from one connection before the others have their turn: some 160 of
the smallest messages, 3 ms."""

MESSAGES_WAITING = 32
"""Messages that have been read and not yet handled, beyond which a connection is not
read any further."""

FRAGMENTS = 1024
"""Frames that one message may be cut into (ours are never cut)."""

OUTBOX_NBYTES = 32 * 2**20
"""What a member may leave unread when something more is to be sent (which may itself be
larger: one manifest always fits)."""
OUTBOX_MESSAGES = 16_384

REFUSED_MAX = 3
"""Connections closed for what came through them, with no new good message in between:
the member would only go on so."""

LOOP_SHARE = 0.25
"""Part of the loop's time that one session can have for its messages, in the long
run."""
STRANGERS_SHARE = 0.1
"""That of all who do not show the token, together."""
LOOP_BURST_S = 0.5
CHARGE_MAX_S = 0.5
MESSAGE_S = 50e-6
"""What a message costs beside its handling: turns of the loop, the answer."""
MESSAGES_AT_ONCE = 8
HOLD_S = 0.002

_HELD = 256
_PID_MAX = 2**31


class RateLimit:
    """How fast one connection may go on. Times in seconds; ``used_s`` is time of the
    loop, ``share`` a part of it."""

    def __init__(self, now: float, share: float = LOOP_SHARE) -> None:
        self._share = share
        self._account_s = LOOP_BURST_S
        self._at = now
        self._messages = 0
        self._held_s = 0.0
        self.flooded = False

    def charge(self, used_s: float, now: float) -> float:
        """Pay; returns how long the connection should be left alone: 0 unless it is
        overdrawn."""
        self._account_s = min(LOOP_BURST_S, self._account_s + (now - self._at) * self._share)
        self._at = now
        self._account_s -= min(used_s, CHARGE_MAX_S)
        if self._account_s >= 0:
            return 0.0
        self.flooded = True
        return -self._account_s / self._share

    def after_message(self, used_s: float, now: float) -> float | None:
        """Pay for one message: None: go on; 0: let the others have a turn; else wait so
        long."""
        wait_s = self.charge(used_s + MESSAGE_S, now)
        self._messages += 1
        self._held_s += used_s
        if not wait_s and self._messages < MESSAGES_AT_ONCE and self._held_s < HOLD_S:
            return None
        self._messages, self._held_s = 0, 0.0
        return wait_s


# ------------------------------------------------------------ sizes

_LARGE = [kind.__name__ for kind in get_args(wire.FromMember) if most_nbytes(kind.__name__) > OTHER_NBYTES]
_HEAD_NBYTES = 64


def size_problem(data: bytes, *, first: bool = False) -> str | None:
    """Why a message of this size is refused, before it is decoded. ``first``: it must
    be the Hello."""
    if len(data) <= HELLO_NBYTES:
        return None
    kind, limit = "message", HELLO_NBYTES if first else OTHER_NBYTES
    if not first:
        kind, limit = _kind(data[:_HEAD_NBYTES])
    if len(data) <= limit:
        return None
    return f"{kind} of {len(data):,} bytes: at most {limit:,} are taken"


def _kind(head: bytes) -> tuple[str, int]:
    """Kind and limit by the tag, which our encoder writes first; a large message whose
    tag is elsewhere is not ours."""
    for name in _LARGE:
        if msgspec.msgpack.encode("type") + msgspec.msgpack.encode(name) in head:
            return name, most_nbytes(name)
    return "message", OTHER_NBYTES


# ------------------------------------------------------------ values


def hello_problem(hello: wire.Hello) -> str | None:
    """Why this Hello is refused as malformed."""
    for what in ("channel", "group", "incarnation"):
        if not is_name(getattr(hello, what)):
            return f"{what} {getattr(hello, what)[:NAME_LENGTH]!r} is no name"
    if any(abs(number) > RANKS_MAX for number in (hello.replica, hello.rank, hello.world_size)):
        return "its replica, rank or world size is absurd"
    entries = max(len(hello.info), len(hello.nccl_env))
    if entries > INFO_ENTRIES or max(len(hello.held), len(hello.lent)) > _HELD:
        return "it says too much about itself"
    if hello.beacon is not None and len(hello.beacon.nonce) > NAME_LENGTH:
        return "its beacon has no nonce of ours"
    if any(not 0 <= version < INTEGER_MAX for version in hello.lent):
        return "it has lent what is no version"
    if any(len(text) > INFO_LENGTH for pair in (*hello.info.items(), *hello.nccl_env.items()) for text in pair):
        return "one of its texts is too long"
    if not _is_process(hello.process):
        return "its process is none"
    return _number_problem(hello) or next((text for held in hello.held if (text := _number_problem(held))), None)


def _is_process(process: ProcessIdentity) -> bool:
    return 0 < process.pid < _PID_MAX and len(process.boot_id) <= NAME_LENGTH


def message_problem(message: wire.FromMember) -> str | None:
    """Why a message that has the right form cannot be meant: a number that is negative,
    absurd or not finite."""
    problem = _number_problem(message)
    if problem is None and isinstance(message, wire.PublishBegin):
        most = VERSION_MAX * (1 + message.resumed)  # the library counts on from what was chosen
        return None if (message.version or 0) <= most else f"PublishBegin with version = {message.version}"
    if problem is None and isinstance(message, wire.OperationPost):
        for segment in message.segments:
            if any(not 0 <= size < INTEGER_MAX for size in segment.shape):
                return f"a tensor of shape {segment.shape}"
    return problem


def _number_problem(value: msgspec.Struct) -> str | None:
    """Of the numbers in ``value``, and in the structs with numbers that lie in it."""
    for name in _NESTED[type(value)]:
        inner = getattr(value, name)
        if inner is not None and (problem := _number_problem(inner)) is not None:
            return f"{type(value).__name__}: {problem}"
    for name, may_be_negative in _NUMBERS[type(value)]:
        number = getattr(value, name)
        if number is None:
            continue
        most = INTEGER_MAX if isinstance(number, int) else SECONDS_MAX
        if not math.isfinite(number) or abs(number) > most or (number < 0 and not may_be_negative):
            return f"{type(value).__name__} with {name} = {number}"
    return None


_SIGNED = {"deadline_s", "step", "after", "found"}
"""A deadline may have passed, a host may not be found; the others are the user's own
numbers, of which the state machine says what is wrong."""
_JUDGED_LATER = {"replica", "rank", "world_size", "at_least"}


def _numbers_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, bool], ...]:
    """Fields of a message that are numbers, and whether each may be negative."""
    signed = _SIGNED | ({"version"} if kind in (wire.PublishBegin, wire.WatchLoaded) else set())
    names = []
    for field in msgspec.structs.fields(kind):
        types: tuple[Any, ...] = get_args(field.type) or (field.type,)
        if set(types) <= {int, float, type(None)} and field.name not in _JUDGED_LATER:
            names.append((field.name, field.name in signed))
    return tuple(names)


_KINDS = (*get_args(wire.FromMember), wire.HeldVersion, wire.Beacon, wire.SlotPlace)
_NUMBERS: dict[type[msgspec.Struct], tuple[tuple[str, bool], ...]] = {kind: _numbers_of(kind) for kind in _KINDS}
_NESTED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    kind: tuple(
        field.name
        for field in msgspec.structs.fields(kind)
        if {wire.Beacon, wire.SlotPlace} & set(get_args(field.type))
    )
    for kind in _KINDS
}

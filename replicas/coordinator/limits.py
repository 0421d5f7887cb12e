"""Limits on connections: sizes and values of messages, shares of the loop's time.

A token holder may flood, send invalid messages, or never read. That must not reach the
state machines or block the loop that serves all members. So each message is checked
before the engine gets it: its size by kind (before decoding), its form (msgspec, a
closed set of types), then its values.

*Fairness* is counted in loop time, by wall clock, because reading the thread's CPU
clock costs as much as a small message; a reserve covers moments in which this process
did not run. Handling its messages is charged to a session's :class:`RateLimit`, which
is refilled at a fixed share of real time. An overdrawn session is read later, and TCP
slows the sender: one expensive message has no effect, thousands do. The number of
connections without a token is :class:`Bounded`.

Each refusal has one of the :data:`REASONS`, which are also the values of a metric's
label.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args, get_origin

import msgspec

from replicas import messages as wire
from replicas.messages import bounds

REASONS = (
    "token",  # a wrong token, or none
    "tls",  # TLS and plain HTTP mixed up, or a handshake that fails
    "peer",  # another user's process on the Unix socket
    "timeout",  # no complete request or Hello in time, or an answer that is not read
    "too_many",  # too many strangers; the oldest is closed
    "host",  # a foreign host name: DNS rebinding
    "malformed",  # not HTTP, not a message, or invalid values
    "oversized",  # larger than a message of its kind may be
    "out_of_order",  # an impossible number or ack, or a second Hello
    "hello",  # an unacceptable Hello: channel, run, rank, preflight
    "fenced",  # a stale incarnation
    "flood",  # a session exceeds its message rate and is throttled (counted once for each connection)
    "overflow",  # too much unsent data in the outbox
)

LOOP_SHARE = 0.25
"""Share of the loop's time that one session gets in the long run."""
STRANGERS_SHARE = 0.1
"""Share of all strangers together."""
LOOP_BURST_S = 0.5
CHARGE_MAX_S = 0.5  # for a message during which this process was suspended
MESSAGE_S = 50e-6
"""Fixed cost of a message: loop iterations and the answer."""
# a busy session yields after this many messages, or this long
MESSAGES_AT_ONCE = 8
HOLD_S = 0.002

_HELD = 256
_GPUS = 64
_DIMENSIONS = 64  # more than any model's tensors have
_PID_MAX = 2**31
_PORT_MAX = 2**16 - 1
_SHA256 = re.compile("[0-9a-f]{64}")
One = TypeVar("One", bound=Hashable)


class RateLimit:
    """The account of loop time of one connection, or of all strangers."""

    def __init__(self, now: float, share: float = LOOP_SHARE) -> None:
        self._share = share
        self._account_s = LOOP_BURST_S
        self._at = now
        self._messages = 0
        self._held_s = 0.0
        self.flooded = False

    def charge(self, used_s: float, now: float) -> float:
        """Charge ``used_s``. Return how long to pause the connection, usually 0."""
        self._account_s = min(LOOP_BURST_S, self._account_s + (now - self._at) * self._share)
        self._at = now
        self._account_s -= min(used_s, CHARGE_MAX_S)
        if self._account_s >= 0:
            return 0.0
        self.flooded = True
        return -self._account_s / self._share

    def after_message(self, used_s: float, now: float) -> float | None:
        """Charge one message.

        Return None to continue, 0 to yield to other sessions, or the seconds to wait.
        """
        wait_s = self.charge(used_s + MESSAGE_S, now)
        self._messages += 1
        self._held_s += used_s
        if not wait_s and self._messages < MESSAGES_AT_ONCE and self._held_s < HOLD_S:
            return None
        self._messages, self._held_s = 0, 0.0
        return wait_s


class Bounded(Generic[One]):
    """A set of at most ``most`` connections, and at most half of one source."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._sources: dict[One, bytes] = {}
        self._by_source: dict[bytes, dict[One, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, one: One) -> bool:
        return one in self._sources

    def __iter__(self) -> Iterator[One]:
        return iter(tuple(self._sources))

    def add(self, one: One, source: bytes) -> One | None:
        """Add a connection. Return the oldest, which the caller closes, if full."""
        alike = self._by_source.get(source, {})
        gone = None
        if 2 * len(alike) >= self.most:
            gone = next(iter(alike))
        elif len(self._sources) >= self.most:
            gone = self.oldest()
        if gone is not None:
            self.discard(gone)
        self._sources[one] = source
        self._by_source.setdefault(source, {})[one] = None
        return gone

    def oldest(self) -> One | None:
        return next(iter(self._sources), None)

    def discard(self, one: One) -> None:
        source = self._sources.pop(one, None)
        if source is not None:
            alike = self._by_source[source]
            del alike[one]
            if not alike:
                del self._by_source[source]


# ------------------------------------------------------------ sizes

_POST = msgspec.msgpack.encode("type") + msgspec.msgpack.encode("OperationPost")
"""The first bytes of the one large kind: our encoder writes the tag first."""
_HEAD_NBYTES = 64


def size_problem(data: bytes, *, first: bool = False) -> str | None:
    """Return why a message is too large to be decoded, or None.

    :param first: it must be the Hello.
    """
    if len(data) <= bounds.HELLO_NBYTES:
        return None
    kind = "OperationPost" if not first and _POST in data[:_HEAD_NBYTES] else "message"
    limit = bounds.HELLO_NBYTES if first else bounds.most_nbytes(kind)
    return f"{kind}: {len(data):,} bytes exceed the limit of {limit:,}" if len(data) > limit else None


# ------------------------------------------------------------ values


def hello_problem(hello: wire.Hello) -> str | None:
    """Return why this Hello is malformed, or None."""
    if len(hello.proof) > bounds.NAME_LENGTH:
        return "its proof is too long"
    for what in ("channel", "group", "incarnation"):
        if not bounds.is_name(getattr(hello, what)):
            return f"{getattr(hello, what)[: bounds.NAME_LENGTH]!r} is not a valid {what} name"
    if any(abs(number) > bounds.RANKS_MAX for number in (hello.replica, hello.rank, hello.world_size)):
        return "its replica, rank or world size is out of range"
    entries = max(len(hello.info), len(hello.nccl_env))
    if entries > bounds.INFO_ENTRIES or max(len(hello.held), len(hello.lent)) > _HELD:
        return "it has too many info entries, NCCL variables or versions"
    shown = ("info", hello.info, bounds.INFO_NBYTES), ("NCCL variables", hello.nccl_env, bounds.ENV_NBYTES)
    for what, texts, most in shown:
        if (nbytes := len(msgspec.msgpack.encode(texts))) > most:
            return f"its {what}: {nbytes:,} bytes exceed the limit of {most:,}"
    if len(hello.cuda_devices) > _GPUS:
        return "it has too many GPUs"
    if hello.beacon is not None and max(len(hello.beacon.nonce), len(hello.beacon.door)) > bounds.NAME_LENGTH:
        return "the nonce or the door of its beacon is too long"
    if any(not 0 <= version < bounds.INTEGER_MAX for version in hello.lent):
        return "it has lent an invalid version number"
    if any(len(text) > bounds.INFO_LENGTH for pair in (*hello.info.items(), *hello.nccl_env.items()) for text in pair):
        return "one of its texts is too long"
    if not 0 < hello.process.pid < _PID_MAX or len(hello.process.boot_id) > bounds.NAME_LENGTH:
        return "its process identity is invalid"
    parts = (hello, *hello.held)
    return next((text for part in parts if (text := _number_problem(part) or _text_problem(part))), None)


def message_problem(message: wire.FromMember) -> str | None:
    """Return why a well-formed message is invalid, or None.

    Values are kept and shown to others, so numbers have ranges, and texts lengths.
    """
    problem = _number_problem(message) or _text_problem(message)
    if problem is None and isinstance(message, wire.PublishBegin):
        most = bounds.VERSION_MAX * (1 + message.resumed)  # the library counts up from the user's number
        return None if (message.version or 0) <= most else f"PublishBegin with version = {message.version}"
    if problem is None and isinstance(message, wire.CarrierUp):
        if message.port > _PORT_MAX:
            return f"CarrierUp with port = {message.port}"
        if message.certificate_hash and _SHA256.fullmatch(message.certificate_hash) is None:
            return "CarrierUp with a certificate_hash that is not a SHA-256"
    if problem is None and isinstance(message, wire.TransferDone | wire.TransferFailed):
        return _holders_problem(message)
    if problem is None and isinstance(message, wire.OperationPost):
        for segment in message.segments:
            if any(not 0 <= size < bounds.INTEGER_MAX for size in segment.shape):
                return f"a tensor of shape {segment.shape}"
            if len(segment.shape) > _DIMENSIONS or len(segment.dtype) > bounds.NAME_LENGTH:
                return f"a tensor of {len(segment.shape)} dimensions, and a dtype of {len(segment.dtype)} characters"
    return problem


def _holders_problem(message: wire.TransferDone | wire.TransferFailed) -> str | None:
    """Return why its statements about holders are invalid, or None."""
    maps: tuple[Mapping[str, object], ...]
    if isinstance(message, wire.TransferDone):
        maps = message.received, message.holders, message.wrong
    else:
        maps = (message.holders,)
    texts = [text for found in maps for pair in found.items() for text in pair if isinstance(text, str)]
    numbers = [number for found in maps for number in found.values() if isinstance(number, int)]
    if any(len(found) > _HOLDERS for found in maps) or any(len(text) > bounds.INFO_LENGTH for text in texts):
        return f"{type(message).__name__} with too many holders, or a text that is too long"
    if any(not 0 <= number < bounds.INTEGER_MAX for number in numbers):
        return f"{type(message).__name__} with a number of bytes that is out of range"
    return None


def _number_problem(value: msgspec.Struct) -> str | None:
    """Return the first problem of the numbers in ``value`` and its nested structs."""
    nested, numbers = _FIELDS[type(value)]
    for name in nested:
        inner = getattr(value, name)
        if inner is not None and (problem := _number_problem(inner)) is not None:
            return f"{type(value).__name__}: {problem}"
    for name, may_be_negative in numbers:
        number = getattr(value, name)
        if number is None:
            continue
        most = bounds.INTEGER_MAX if isinstance(number, int) else bounds.SECONDS_MAX
        if not math.isfinite(number) or abs(number) > most or (number < 0 and not may_be_negative):
            return f"{type(value).__name__} with {name} = {number}"
    return None


def _text_problem(value: msgspec.Struct) -> str | None:
    """Return the first problem of the texts in ``value`` and its error."""
    for name in _TEXTS[type(value)]:
        found = getattr(value, name)
        if isinstance(found, wire.WireError):
            if problem := _text_problem(found):
                return problem
            continue
        most = bounds.TEXT_NBYTES if isinstance(value, wire.WireError) else 4 * bounds.INFO_LENGTH
        most = bounds.NAME_LENGTH if name.endswith(("digest", "hash")) else most
        texts = found if isinstance(found, tuple) else () if found is None else (found,)
        texts = tuple(itertools.chain(*texts)) if name == "links" else texts
        if len(texts) > _MANY:
            return f"{type(value).__name__} with {len(texts):,} {name}"
        for text in texts:
            # UTF-8: at most 4 bytes a character; most texts need no encoding
            if 4 * len(text) > most and (nbytes := len(text.encode())) > most:
                return f"{type(value).__name__}: {name}: {nbytes:,} bytes exceed the limit of {most:,}"
    return None


_HOLDERS = 64
"""Limit of holders in a message; a member is given fewer."""
_MANY = 4096
"""Limit of texts of one kind in a message."""
_SIGNED = {"deadline_s", "step", "after", "found"}
"""Fields that may be negative: a past deadline, a host not found, the user's numbers,
which the state machine checks."""
_JUDGED_LATER = {"replica", "rank", "world_size", "at_least"}


def _fields_of(kind: type[msgspec.Struct]) -> tuple[list[str], list[tuple[str, bool]]]:
    """Return the names of fields with structs, and of numeric fields, each with
    whether it may be negative."""
    signed = _SIGNED | ({"version"} if kind in (wire.PublishBegin, wire.WatchLoaded) else set())
    nested, numbers = [], []
    for field in msgspec.structs.fields(kind):
        types: set[Any] = {*(get_args(field.type) or (field.type,))}
        if {wire.Beacon, wire.SlotPlace} & types:
            nested.append(field.name)
        elif types <= {int, float, type(None)} and field.name not in _JUDGED_LATER:
            numbers.append((field.name, field.name in signed))
    return nested, numbers


def _texts_of(kind: type[msgspec.Struct]) -> list[str]:
    """Return the names of fields with texts or an error."""
    texts = ({str}, {str, type(None)}, {str, ...}, {tuple[str, str], ...}, {wire.WireError})
    fields = [field for field in msgspec.structs.fields(kind) if get_origin(field.type) is not dict]
    return [field.name for field in fields if {*(get_args(field.type) or (field.type,))} in texts]


_KINDS = (*get_args(wire.FromMember), wire.HeldVersion, wire.Beacon, wire.SlotPlace)
_FIELDS: dict[type[msgspec.Struct], tuple[list[str], list[tuple[str, bool]]]] = {
    kind: _fields_of(kind) for kind in _KINDS
}
_TEXTS = {kind: _texts_of(kind) for kind in (*_KINDS, wire.WireError)}

"""Limits on connections: sizes and values of messages, shares of the loop's time.

A token holder may flood, send invalid messages, or never read. That must not reach the
state machines or block the loop that serves all members. So each message is checked
before the engine gets it: its size by kind (before decoding), then its form and values
as it is decoded (:mod:`replicas.messages.bounds`).

*Fairness* is counted in loop time, by wall clock, because reading the thread's CPU
clock costs as much as a small message; a reserve covers moments in which this process
did not run. Handling its messages is charged to a session's :class:`RateLimit`, which
is refilled at a fixed share of real time. An overdrawn session is read later, and TCP
slows the sender: one expensive message has no effect, thousands do. The number of
connections without a token is :class:`BoundedConnections`.

Each refusal has one of the :data:`REASONS`, which are also the values of a metric's
label.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

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

One = TypeVar("One", bound=Hashable)


class RateLimit:
    """Limits the share of the loop's time of one connection, or of all without a token.

    Its *account* is the time in seconds that they may still use now.
    """

    def __init__(self, now: float, share: float = LOOP_SHARE) -> None:
        """Begin at loop time ``now``, with 0.5 s of loop time to be used at once.

        :param share: seconds of loop time to be used in each further second.
        """
        self._share = share
        self._account_s = LOOP_BURST_S
        self._at = now
        self._messages = 0
        self._held_s = 0.0
        self.flooded = False

    def charge(self, used_s: float, now: float) -> float:
        """Record the use of ``used_s`` of the loop's time; do not wait.

        Return for how many seconds the caller must not serve the connection, usually 0:
        until its share of real time has made up for its use.

        :param now: loop time.
        """
        self._account_s = min(LOOP_BURST_S, self._account_s + (now - self._at) * self._share)
        self._at = now
        self._account_s -= min(used_s, CHARGE_MAX_S)
        if self._account_s >= 0:
            return 0.0
        self.flooded = True
        return -self._account_s / self._share

    def after_message(self, used_s: float, now: float) -> float | None:
        """Charge one message of the connection, whose handling took ``used_s``.

        Return what the caller must do before it reads the next one: None means nothing,
        0 yield to the loop once, else wait so many seconds.

        :param now: loop time.
        """
        wait_s = self.charge(used_s + MESSAGE_S, now)
        self._messages += 1
        self._held_s += used_s
        if not wait_s and self._messages < MESSAGES_AT_ONCE and self._held_s < HOLD_S:
            return None
        self._messages, self._held_s = 0, 0.0
        return wait_s


class BoundedConnections(Generic[One]):
    """A set of at most ``most`` connections, and at most half of one source."""

    def __init__(self, most: int) -> None:
        """Make an empty set for at most ``most`` connections."""
        self.most = most
        self._sources: dict[One, bytes] = {}
        self._by_source: dict[bytes, dict[One, None]] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, one: One) -> bool:
        return one in self._sources

    def __iter__(self) -> Iterator[One]:
        """Iterate over a copy, the oldest first: the set may change meanwhile."""
        return iter(tuple(self._sources))

    def add(self, one: One, source: bytes) -> One | None:
        """Add a connection; return an older one that had to be removed for it, or None.

        The caller must close the removed connection.

        :param source: key of where it comes from; connections with the same source may
            have half of the set.
        """
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
        """Return the connection that was added first, or None; it stays in the set."""
        return next(iter(self._sources), None)

    def discard(self, one: One) -> None:
        """Remove the connection, if it is in the set; do not close it."""
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
    """Return why an encoded message is too large to be decoded, or None.

    :param first: it is the connection's first message, which must be the Hello.
    """
    if len(data) <= bounds.HELLO_NBYTES:
        return None
    kind = "OperationPost" if not first and _POST in data[:_HEAD_NBYTES] else "message"
    limit = bounds.HELLO_NBYTES if first else bounds.most_nbytes(kind)
    return f"{kind}: {len(data):,} bytes exceed the limit of {limit:,}" if len(data) > limit else None


# ------------------------------------------------------------ values


def hello_problem(hello: wire.Hello) -> str | None:
    """Return why a decoded Hello (a member's first message) is not accepted, or None.

    Its names may not be valid, or its texts too long; the channel's rules are not
    checked.
    """
    for what in ("channel", "group", "incarnation"):
        if not bounds.is_name(getattr(hello, what)):
            return f"{getattr(hello, what)[: bounds.NAME_LENGTH]!r} is not a valid {what} name"
    shown = ("info", hello.info, bounds.INFO_NBYTES), ("NCCL variables", hello.nccl_env, bounds.ENV_NBYTES)
    for what, texts, most in shown:
        if (nbytes := len(msgspec.msgpack.encode(texts))) > most:
            return f"its {what}: {nbytes:,} bytes exceed the limit of {most:,}"
    return None

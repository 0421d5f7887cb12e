"""A member's session in the coordinator: outbox, message numbers and process watch.

A session outlives its WebSocket: when the connection breaks and the member comes back
with the same incarnation and term, both sides resend what the other has not yet
acknowledged (protocol: :mod:`replicas.messages`). Messages are queued here and written
together at the end of the loop's turn, as many as the connection takes; the rest
when it takes more. So nothing ever waits for a slow member, and a broadcast does not
create one task per member. A member with too much unread data is lost before more is
added (one message, however large, always fits). A broadcast is encoded once
(:class:`Encoded`) and shared by all queues; only its frame, made when it is written,
belongs to one session. Acks carry nothing but the newest number, so at most one of them
waits, however many heartbeats a member sends.

Each connection has an event, :attr:`MemberSession.over`, set when the session needs it
no longer: the session was closed, or another connection has taken over. What is queued
by then is still written, for as long as the server waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from replicas.core.channel_state import ChannelState
from replicas.linux.processes import START_TIME, stat_fields
from replicas.messages import Ack, FromCoordinator, Refused, Welcome, encode_body, encode_frame
from replicas.messages.identity import Member, ProcessIdentity

UNNUMBERED = (Ack, Refused, Welcome)
_ACK = encode_body(Ack())
OUTBOX_NBYTES = 32 * 2**20
"""Unread data of a member with which one more message ends its session.

The last message may be larger itself: one manifest always fits.
"""
OUTBOX_MESSAGES = 16_384  # small ones cost more than their bytes
WRITE_NBYTES = 1 << 18
"""Written at once, before checking whether the connection takes more."""


class MemberConnection(Protocol):
    """The transport to a member."""

    on_writable: Callable[[], None]
    """Called when it takes more again."""
    on_bytes: Callable[[], None]
    """Called when data arrived that is not a whole message yet."""

    def takes_more(self) -> bool:
        """Return True if the write buffer has room."""

    def rtt_s(self) -> float:
        """Recent round-trip time in seconds; 0: unknown."""

    def write(self, messages: Sequence[bytes]) -> None:
        """Write the messages; does nothing on a closing connection."""


class Encoded:
    """Encodes a message once for consecutive sends to many members."""

    def __init__(self) -> None:
        self._message: FromCoordinator | None = None
        self._body = b""

    def of(self, message: FromCoordinator) -> bytes:
        """The encoding without a frame."""
        if message is not self._message:
            self._message, self._body = message, encode_body(message)
        return self._body


class MemberSession:
    """The outbox and the message numbers of one member's session."""

    def __init__(self, member: Member, channel: ChannelState) -> None:
        self.member = member
        self.channel = channel
        self.received = 0
        self.sent = 0
        self.refused = 0
        """Connections closed for bad input since the last good message."""
        self.connection: MemberConnection | None = None
        self.watch: ProcessWatch | None = None
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._unacknowledged_nbytes = 0
        self._queue: deque[tuple[int, bytes]] = deque()
        self._news = asyncio.Event()
        self._ack_due = False
        self._flush_due = False
        self.wrote_at = 0.0
        """Loop time of the last write to the member."""
        self.over = asyncio.Event()
        """Set when nothing more will be queued for the present connection."""
        self.on_detach: Callable[[], None] | None = None
        """Called when the connection has ended and all its input was handled."""

    def attach(self, connection: MemberConnection, acknowledged: int, first: FromCoordinator) -> None:
        """Take over a new connection: send ``first``, then what is unacknowledged."""
        self.over.set()
        self.over = asyncio.Event()
        self.connection = connection
        self.acknowledge(acknowledged)
        self._ack_due = False
        self._queue.clear()  # its numbered ones are in _unacknowledged, too
        self._queue.append((0, encode_body(first)))
        self._queue.extend(self._unacknowledged)
        connection.on_writable = self.flush
        self._news.set()
        self._flush_soon()

    def send(self, message: FromCoordinator, body: bytes | None = None) -> bool:
        """Queue a message (``body``: encoded); False: too much was unread before."""
        if isinstance(message, Ack):
            self._ack_due = self.connection is not None
            self._flush_soon()
            return True
        seq = 0
        # judged before this one is added, so that one of any size fits
        too_much = self._unacknowledged_nbytes > OUTBOX_NBYTES or len(self._unacknowledged) > OUTBOX_MESSAGES
        data = body if body is not None else encode_body(message)
        if not isinstance(message, UNNUMBERED):
            seq = self.sent = self.sent + 1
            self._unacknowledged.append((seq, data))
            self._unacknowledged_nbytes += len(data)
        if self.connection is not None:
            self._queue.append((seq, data))
            self._flush_soon()
        return not too_much

    def acknowledge(self, seq: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= seq:
            self._unacknowledged_nbytes -= len(self._unacknowledged.popleft()[1])

    def accept(self, seq: int) -> bool | None:
        """True if the numbered message is new; None: one before it is missing."""
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            return None
        self.received = seq
        self.refused = 0
        return True

    def _flush_soon(self) -> None:
        if not self._flush_due and self.connection is not None:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write queued messages until the connection takes no more."""
        self._flush_due = False
        connection = self.connection
        while connection is not None and connection.takes_more() and (frames := self._next_frames()):
            connection.write(frames)
        self._news.set()

    def _next_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        nbytes = 0
        while self._queue and nbytes < WRITE_NBYTES:
            seq, body = self._queue.popleft()
            frames.append(encode_frame(seq, self.received, body))
            nbytes += len(body)
        if self._ack_due and not frames:  # any other frame carries the ack
            frames.append(encode_frame(0, self.received, _ACK))
        self._ack_due = False
        self.wrote_at = asyncio.get_running_loop().time()
        return frames

    async def written(self, connection: MemberConnection) -> None:
        """Return when all messages queued for this connection were handed to it."""
        while self.connection is connection and (self._queue or self._ack_due):
            self._news.clear()
            await self._news.wait()

    def detach(self, connection: MemberConnection) -> bool:
        """The connection has ended. Returns False if another one has replaced it."""
        present = self.connection is connection
        if present:
            self.connection = None
            if self.on_detach is not None:
                self.on_detach()
        self._news.set()
        return present

    def close(self) -> None:
        """Let the server write the queued messages, then end the connection."""
        self.over.set()
        self._news.set()
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class ProcessWatch:
    """Reports the end of a local process by pidfd.

    Its sockets do not tell: forked children may keep them open.

    :raises ProcessLookupError: it is already gone.
    """

    def __init__(self, process: ProcessIdentity, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pidfd = os.pidfd_open(process.pid)  # from here on the pid cannot be given to another
        try:
            if int(stat_fields(process.pid)[START_TIME]) != process.start_time:
                raise ProcessLookupError(process.pid)
        except OSError:
            os.close(self._pidfd)
            raise

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def start(self, on_exit: Callable[[], None]) -> None:
        self._loop.add_reader(self._pidfd, on_exit)

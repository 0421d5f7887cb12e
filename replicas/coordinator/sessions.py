"""A member's session in the coordinator: outbox, message numbers, process watch.

A session outlives its WebSocket: when the connection breaks and the member reconnects
with the same incarnation and term, both sides resend unacknowledged messages
(protocol: :mod:`replicas.messages`). Messages are queued here and written together at
the end of the loop iteration, up to the connection's write buffer; the rest follows
when it drains. So callers never wait for a slow member, and a broadcast does not create
a task for each member. A member with too much unsent data is lost before more is added
(one message of any size always fits). A broadcast is encoded once (:class:`Encoded`)
and shared by all queues; only its frame, made when it is written, belongs to one
session. An ack carries only the newest number, so at most one is queued.

Each connection has an event, :attr:`MemberSession.over`, set when the session was
closed or has another connection. The server then waits a moment for queued messages to
be written.
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
"""Unacknowledged bytes of a member beyond which one more message ends its session.

A single message may be larger: one manifest always fits.
"""
OUTBOX_MESSAGES = 16_384  # each message has a fixed cost beside its bytes
WRITE_NBYTES = 1 << 18
"""Bytes written before checking the connection's write buffer again."""


class MemberConnection(Protocol):
    """The transport to a member."""

    on_writable: Callable[[], None]
    """Called when the write buffer has room again."""
    on_bytes: Callable[[], None]
    """Called when data arrived that does not complete a message."""

    def takes_more(self) -> bool:
        """Return True if the write buffer has room."""

    def rtt_s(self) -> float:
        """Return the recent round-trip time in seconds, or 0 if unknown."""

    def write(self, messages: Sequence[bytes]) -> None:
        """Write the encoded messages, without waiting.

        Do nothing on a closing connection.
        """


class Encoded:
    """Encodes a message once for consecutive sends to many members."""

    def __init__(self) -> None:
        """Begin without a message."""
        self._message: FromCoordinator | None = None
        self._body = b""

    def of(self, message: FromCoordinator) -> bytes:
        """Return the encoding of ``message``, without the frame that numbers it.

        It is kept, so that a call with the same object next is cheap.
        """
        if message is not self._message:
            self._message, self._body = message, encode_body(message)
        return self._body


class MemberSession:
    """The outbox and the message numbers of one member's session."""

    def __init__(self, member: Member, channel: ChannelState) -> None:
        """Begin the session of ``member``, without a connection; send nothing."""
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
        """Set when no more messages will be queued for the present connection."""
        self.on_detach: Callable[[], None] | None = None
        """Called when the connection has ended and all its input was handled."""

    def attach(self, connection: MemberConnection, acknowledged: int, first: FromCoordinator) -> None:
        """Send over ``connection`` from now on.

        The former connection is not closed here: :attr:`over` is set, at which the task
        that serves it closes it.

        :param acknowledged: number of the last message that the member has received.
        :param first: sent before the messages above that number.
        """
        self.over.set()
        self.over = asyncio.Event()
        self.connection = connection
        self.acknowledge(acknowledged)
        self._ack_due = False
        self._queue.clear()  # numbered messages are in _unacknowledged, too
        self._queue.append((0, encode_body(first)))
        self._queue.extend(self._unacknowledged)
        connection.on_writable = self.flush
        self._news.set()
        self._flush_soon()

    def send(self, message: FromCoordinator, body: bytes | None = None) -> bool:
        """Queue a message for the member; the loop writes it in this iteration.

        Without a connection it waits for the next one; an Ack, Welcome or Refused is
        dropped. Return False if too much was unacknowledged before it, so that the
        caller must drop the member; it is queued even then.

        :param body: the encoded message, if there is one already.
        """
        if isinstance(message, Ack):
            self._ack_due = self.connection is not None
            self._flush_soon()
            return True
        seq = 0
        # before this message is added, so that a message of any size fits
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
        """Forget the sent messages up to ``seq``, which the member has received."""
        while self._unacknowledged and self._unacknowledged[0][0] <= seq:
            self._unacknowledged_nbytes -= len(self._unacknowledged.popleft()[1])

    def accept(self, seq: int) -> bool | None:
        """Record that the message number ``seq`` of the member came.

        Return True if it is new, False for a repetition to ignore, and None if one
        before it is missing, so that the connection must be closed.
        """
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            return None
        self.received = seq
        self.refused = 0
        return True

    def _flush_soon(self) -> None:
        """Have :meth:`flush` called at the end of this loop iteration."""
        if not self._flush_due and self.connection is not None:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write queued messages until the connection's buffer is full.

        Also wake :meth:`written`. Called on the loop, and by the connection when its
        buffer has room again.
        """
        self._flush_due = False
        connection = self.connection
        while connection is not None and connection.takes_more() and (frames := self._next_frames()):
            connection.write(frames)
        self._news.set()

    def _next_frames(self) -> list[bytes]:
        """Remove messages from the queue, about 256 KiB at most; return them as frames.

        Each frame also acknowledges the member's messages. If no message is queued, but
        an acknowledgement is due, return a frame with only that.
        """
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
        """Wait, without limit, until the connection has taken all its queued messages.

        Return immediately if the session has another connection.
        """
        while self.connection is connection and (self._queue or self._ack_due):
            self._news.clear()
            await self._news.wait()

    def detach(self, connection: MemberConnection) -> bool:
        """Stop writing to ``connection``, which has ended, and call :attr:`on_detach`.

        Unacknowledged messages are kept for the next connection. Return False, and
        change nothing, if another connection has replaced it.
        """
        present = self.connection is connection
        if present:
            self.connection = None
            if self.on_detach is not None:
                self.on_detach()
        self._news.set()
        return present

    def close(self) -> None:
        """End the session: set :attr:`over`, and stop the watch of its process.

        The server then still writes queued messages, for 1 s at most, and ends the
        connection.
        """
        self.over.set()
        self._news.set()
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class ProcessWatch:
    """Reports the end of a local process, found by pidfd, to a callback.

    Its sockets do not show the end: forked children may keep them open.

    :raises ProcessLookupError: it has ended already.
    """

    def __init__(self, process: ProcessIdentity, loop: asyncio.AbstractEventLoop) -> None:
        """Open a pidfd of the process, and check its start time; watch nothing yet.

        :param loop: the event loop for :meth:`start`.
        :raises ProcessLookupError: it has ended already.
        """
        self._loop = loop
        self._pidfd = os.pidfd_open(process.pid)  # from here on the pid cannot be given to another
        try:
            if int(stat_fields(process.pid)[START_TIME]) != process.start_time:
                raise ProcessLookupError(process.pid)
        except OSError:
            os.close(self._pidfd)
            raise

    def close(self) -> None:
        """Close the pidfd, so that ``on_exit`` is not called.

        A second call does nothing.
        """
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def start(self, on_exit: Callable[[], None]) -> None:
        """Have the loop call ``on_exit`` when the process ends, until :meth:`close`.

        ``on_exit`` must call :meth:`close`, or it is called again and again.
        """
        self._loop.add_reader(self._pidfd, on_exit)

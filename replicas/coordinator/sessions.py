"""One session: a member's side of the protocol in :mod:`replicas.messages`, as the coordinator holds it.

A session outlives its WebSocket: when the connection breaks and the member comes back with the same incarnation and term,
both sides resend what the other has not yet acknowledged. What is sent is queued here and written by the connection's own
task, so that nothing ever waits for a slow member; a member that lets too much pile up is cut off, before more is added to
it (one message, however large, always fits). Acks carry no content but the newest number, so that there is never more
than one of them waiting, however many heartbeats a member sends.

Each connection has an event, :attr:`Session.over`, set when the session has no more use for it: it was closed, or another
connection has taken its place. What is queued is still written then, for as long as the server waits for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from replicas.coordinator.limits import OUTBOX_MESSAGES, OUTBOX_NBYTES
from replicas.core.identity import Member, ProcessIdentity
from replicas.messages import Ack, FromCoordinator, Refused, ServerFrame, Welcome, encode

__all__ = ["ProcessWatch", "Session"]

UNNUMBERED = (Ack, Refused, Welcome)


class Session:
    """The outbox and the numbers of one member's session."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.received = 0
        self.sent = 0
        self.connection: object | None = None
        self.watch: ProcessWatch | None = None
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._unacknowledged_nbytes = 0
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._ack_due = False
        self.over = asyncio.Event()
        """Of the present connection: nothing more will be queued for it."""
        self.closed = False
        self.on_detach: Callable[[], None] | None = None
        """Called when the connection has ended and everything that came through it was handled."""

    def attach(self, connection: object, acknowledged: int, first: FromCoordinator) -> None:
        """A new connection: answer ``first``, then resend what the member has not yet received."""
        self.over.set()
        self.over = asyncio.Event()
        self.connection = connection
        self.acknowledge(acknowledged)
        self._ack_due = False
        self._queue.clear()
        self._queue.append(encode(ServerFrame(0, self.received, first)))
        self._queue.extend(data for _, data in self._unacknowledged)
        self._wake.set()

    def send(self, message: FromCoordinator) -> bool:
        """Queue a message; False when the member has let too much pile up before this one."""
        if isinstance(message, Ack):
            self._ack_due = self.connection is not None
            self._wake.set()
            return True
        seq = 0
        too_much = self._unacknowledged_nbytes > OUTBOX_NBYTES or len(self._unacknowledged) > OUTBOX_MESSAGES
        if not isinstance(message, UNNUMBERED):
            self.sent += 1
            seq = self.sent
        data = encode(ServerFrame(seq, self.received, message))
        if seq:
            self._unacknowledged.append((seq, data))
            self._unacknowledged_nbytes += len(data)
        if self.connection is not None:
            self._queue.append(data)
            self._wake.set()
        return not too_much

    def plausible(self, acknowledged: int) -> bool:
        """Whether a member can have received so many messages."""
        return 0 <= acknowledged <= self.sent

    def acknowledge(self, seq: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= seq:
            self._unacknowledged_nbytes -= len(self._unacknowledged.popleft()[1])

    def accept(self, seq: int) -> bool | None:
        """Whether the numbered message is new; None when one before it is missing."""
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            return None
        self.received = seq
        return True

    async def next(self, connection: object) -> bytes | None:
        """What to write next on this connection; None when another one has taken over, or the session is closed."""
        while self.connection is connection:
            if self._queue:
                return self._queue.popleft()
            if self._ack_due:
                self._ack_due = False
                return encode(ServerFrame(0, self.received, Ack()))
            if self.closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return None

    def detach(self, connection: object) -> None:
        if self.connection is connection:
            self.connection = None
            if self.on_detach is not None:
                self.on_detach()
        self._wake.set()

    def close(self) -> None:
        """Write what is queued, then end the connection."""
        self.closed = True
        self.over.set()
        self._wake.set()
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class ProcessWatch:
    """Tells when a process of this machine ends, by pidfd: sockets may be kept open by its forked children."""

    def __init__(self, pidfd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._pidfd = pidfd
        self._loop = loop

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def start(self, on_exit: Callable[[], None]) -> None:
        self._loop.add_reader(self._pidfd, on_exit)

    @classmethod
    def open(cls, process: ProcessIdentity, loop: asyncio.AbstractEventLoop) -> ProcessWatch | None:
        """A watch on the process, or None when it is not of this machine and pid namespace.

        :raises ProcessLookupError: it is of this machine, and already gone.
        """
        if (process.boot_id, process.pid_namespace) != _machine():
            return None
        pidfd = os.pidfd_open(process.pid)
        if _start_time(process.pid) != process.start_time:
            os.close(pidfd)
            raise ProcessLookupError(process.pid)
        return cls(pidfd, loop)


def _machine() -> tuple[str, int]:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat; 0 when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])

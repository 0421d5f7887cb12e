"""Progress of this process's connections to its peers, by the kernel's TCP counts.

Theory of operation
===================

A process group does not report progress: Gloo reports only the end of an operation, and
an operation of a few megabytes takes minutes on a slow link. The kernel counts the
bytes of each TCP connection that the peer has acknowledged (``TCP_INFO``), which tells
a slow link from a broken one. A thread that is not stuck in the group reads those
counts for each pong (:mod:`replicas.sidecar.mailbox`).

A peer *holds up* this process when bytes for it are queued and one of two things is
true. Either the peer has acknowledged nothing through several retransmissions, or the
network limited the connection for most of the time, not the reader at its end or a lack
of data at ours. In a chain of members one slow or broken link stops all of them; only
the member in front of that link reports that it is held up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from replicas.sidecar.wire import Moved

TRIES = 2
"""Unanswered retransmissions in a row that mark a connection as held up."""
SHARE = 0.5
"""Minimum share of the time between two readings in which the network is the limit."""
MIN_LOOK_S = 0.2
"""Shortest interval between two readings, in seconds, with meaningful shares."""
_INET = (socket.AF_INET, socket.AF_INET6)
_NBYTES = 256
_INFO = struct.Struct("<xxBB20xI40xI48xQQ8xI20xQQ")
"""Of tcp_info: unanswered retransmits and window probes, unacked, rtt, bytes_acked,
bytes_received, notsent_bytes, busy_time, rwnd_limited."""
_Key = tuple[tuple[object, ...], tuple[object, ...]]
"""Addresses of the two ends of a connection."""


class _Connection(NamedTuple):
    address: str
    sent: int
    received: int
    queued: bool
    tries: int
    limited_s: float
    """Time in which bytes were queued and the reader's window was not the limit."""
    rtt_s: float


class Traffic:
    """Measures the TCP traffic of a sidecar's current request. Thread-safe."""

    def __init__(self) -> None:
        """Begin outside a request; read no counts yet."""
        self._lock = threading.Lock()
        self._active = False
        self._sockets: dict[int, _Key] = {}
        """Sockets at the last reading; listing them takes longer than a barrier."""
        self._first: dict[_Key, tuple[int, int]] = {}
        self._last: dict[_Key, _Connection] = {}
        self._seen: tuple[int, int] | None = None
        self._still_since = 0.0
        self._looked_at = 0.0

    @contextlib.contextmanager
    def of_request(self) -> Iterator[None]:
        """Context manager: count bytes to and from peers, for :meth:`progress`.

        It begins at 0 for each request. Outside a block there is no progress.
        """
        now = time.monotonic()
        with self._lock:
            self._last = self._read() if self._sockets else self._find()
            self._first = {key: (one.sent, one.received) for key, one in self._last.items()}
            self._seen, self._still_since, self._looked_at = None, now, now
            self._active = True
        try:
            yield
        finally:
            with self._lock:
                self._active = False

    def progress(self) -> Moved | None:
        """Any thread: read the kernel's counts of TCP bytes since the request began.

        :returns: the progress, or None outside a request or without TCP connections.
        """
        with self._lock:
            if not self._active:
                return None
            now, before = time.monotonic(), self._last
            found = self._find()
            if not found:
                return None  # no TCP connections, so no counts
            sent = sum(one.sent - self._first.get(key, (0, 0))[0] for key, one in found.items())
            received = sum(one.received - self._first.get(key, (0, 0))[1] for key, one in found.items())
            if (sent, received) != self._seen:
                self._seen, self._still_since = (sent, received), now
            elapsed_s = now - self._looked_at
            if elapsed_s >= MIN_LOOK_S:
                self._last, self._looked_at = found, now
            held_up = {one.address for key, one in found.items() if _holds_up(one, before.get(key), elapsed_s)}
            rtt_s = max((one.rtt_s for one in found.values()), default=0.0)
            return Moved(sent, received, now - self._still_since, rtt_s, tuple(sorted(held_up)))

    def _find(self) -> dict[_Key, _Connection]:
        """Find this process's TCP connections again; return their counts.

        The caller holds the lock.
        """
        self._sockets = {fd: key for fd in _descriptors() if (key := _ends(fd)) is not None}
        return self._read()

    def _read(self) -> dict[_Key, _Connection]:
        """Return the counts of the known connections that are still open.

        The caller holds the lock.
        """
        read = ((key, _counts(fd, key)) for fd, key in self._sockets.items())
        return {key: counts for key, counts in read if counts is not None}


def _holds_up(now: _Connection, before: _Connection | None, elapsed_s: float) -> bool:
    """Return True if the peer or the network holds up the bytes queued on a connection.

    :param now: the connection's counts now. :param before: those ``elapsed_s`` seconds
        ago; None for a new connection.
    """
    if not now.queued:
        return False
    if now.tries >= TRIES:
        return True
    return before is not None and elapsed_s >= MIN_LOOK_S and now.limited_s - before.limited_s > SHARE * elapsed_s


def _descriptors() -> Iterator[int]:
    """Yield the descriptors of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # twice a second, up to a thousand entries
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)


@contextlib.contextmanager
def _borrowed(fd: int, family: int = -1, kind: int = -1) -> Iterator[socket.socket]:
    """Context manager: yield a socket object for descriptor ``fd``, which stays open.

    :param family: address family of the socket.
    :param kind: type of the socket; -1 for either asks the kernel.
    """
    sock = socket.socket(family, kind, -1, fd)
    try:
        yield sock
    finally:
        sock.detach()


def _ends(fd: int) -> _Key | None:
    """Return both ends of a TCP connection, or None for any other socket."""
    with contextlib.suppress(OSError), _borrowed(fd) as sock:  # a listening socket has no peer
        if sock.family in _INET and sock.type == socket.SOCK_STREAM:
            return sock.getsockname(), sock.getpeername()
    return None


def _counts(fd: int, ends: _Key) -> _Connection | None:
    """Return the kernel's counts of bytes and retransmits (TCP_INFO) of a connection;
    None if ``fd`` is closed by now, or the kernel has no counts of it.

    :param fd: the connected socket, which stays open. :param ends: its two addresses.
    """
    try:
        with _borrowed(fd, socket.AF_INET, socket.SOCK_STREAM) as sock:  # for its options only: any family
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NBYTES)
        lost, probes, unacked, rtt_us, acked, received, not_sent, busy_us, window_us = _INFO.unpack_from(info)
    except (OSError, struct.error):
        return None
    queued = unacked > 0 or not_sent > 0
    limited_s = (busy_us - window_us) / 1e6
    return _Connection(str(ends[1][0]), acked, received, queued, max(lost, probes), limited_s, rtt_us / 1e6)

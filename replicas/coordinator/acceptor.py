"""Accept connections on the control port; pass each on after its first bytes.

A connection costs a Python server ten times as much as its client. So no transport,
protocol or task is created for it before its turn:

* Connections are accepted for at most :data:`ACCEPT_S` of one loop iteration;
  the rest stay in the kernel's backlog. An accepted connection waits in the *lobby*, as
  a bare descriptor in an epoll set, for at most :data:`REQUEST_TIMEOUT_S`. A connection
  that hangs up there costs three system calls.
* On a plain port the request head is peeked at in the kernel's buffer. A request with
  the run's token is passed on immediately, so strangers never delay a member. A probe
  is answered here: if it had to wait, the supervisor would be restarted.
* On a port with TLS a token can be shown only after the handshake, which costs about
  0.5 ms. So every connection that begins one waits for its turn.
* Strangers, and all handshakes, get a share of the loop's time, in the order in which
  they came. When the lobby is full, the oldest is closed; one source may fill half of
  it. All users of this machine count as one source, because asking the kernel for the
  user of a connection would cost several times all of the above.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import resource
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicas.coordinator.addresses import source_of
from replicas.coordinator.limits import BoundedConnections, RateLimit
from replicas.coordinator.port_connections import (
    HEAD_NBYTES,
    REQUEST_S,
    REQUEST_TIMEOUT_S,
    PortRules,
    answer,
    authorization_of,
    head_nbytes,
)

Admit = Callable[[socket.socket, bytes, float], None]
"""Receives a connection, its source and its deadline; no bytes were read from it."""

HANDSHAKES_SHARE = 0.25
"""Share of the loop's time for all TLS handshakes together."""
HANDSHAKE_S = 600e-6
"""Fixed cost of a handshake: OpenSSL's part of it, turns of the loop, the socket."""
LOBBY = 4096
"""Connections that have not been passed on; at most a quarter of the process's fds."""
ACCEPT_S = 0.003
LOOK_S = 0.001
"""Time limits of accepting and of reading, per loop iteration.

When the backlog is full, the kernel drops the attempt, and the client retries after a
second. So a small delay of all other work is better than connections in the backlog.
"""
SWEEP_S = 0.25
NO_ROOM_S = 0.1
"""Pause when the process has no descriptor left."""
_AT_ONCE = 64
_DRAINED = 8  # reads of a head's size
_STREAM = int(socket.SOCK_STREAM)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_NOW = int(socket.MSG_DONTWAIT)
_USUAL_NBYTES = 2048
"""Bytes of the head to peek at first; the rest is read only if this is not enough."""
_WATCHED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET  # edge-triggered: each piece wakes it once
_TLS_HANDSHAKE = 0x16
_SPEAKS_TLS = "this port speaks TLS 1.3: ask it by https://, with the token that `replicas token` shows"


@dataclass(slots=True, eq=False)
class _Waiting:
    """A connection that is not passed on yet; ``until``: loop time of its end."""

    sock: _socket.socket
    source: bytes
    until: float
    began: bool = False
    """It has sent the beginning of a request."""


class Acceptor:
    """Accepts and queues the connections of one listener, on the running loop.

    Each is passed on, untouched, when its turn has come, or closed.

    :param tls: the port speaks TLS.
    """

    def __init__(self, listener: socket.socket, rules: PortRules, admit: Admit, *, tls: bool) -> None:
        """Begin to accept connections of ``listener`` on the running loop.

        :param rules: of the port: tokens, counts of refusals, answers to probes.
        :param admit: called on the loop when the turn of a connection has come, with
            its socket (which it then owns), its source (a key of its address), and the
            loop time by which its request must be complete.
        :param tls: the port speaks TLS.
        """
        self._rules = rules
        self._admit = admit
        self._listener = listener
        self._family = int(listener.family)
        self._accept_fd: Callable[[], tuple[int, Any]] = listener._accept  # type: ignore[attr-defined]  # typeshed leaves it out
        self._tls = tls
        self._lobby: BoundedConnections[_Waiting] = BoundedConnections(
            min(LOBBY, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        )
        self._ready: dict[_Waiting, None] = {}
        self._by_fd: dict[int, _Waiting] = {}
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._pace = RateLimit(self._loop.time(), HANDSHAKES_SHARE) if tls else rules.pace
        self._poll = select.epoll()
        self._loop.add_reader(self._poll.fileno(), self._on_readable)
        self._accept()

    @property
    def waiting(self) -> int:
        """Number of accepted connections that are not yet passed on or closed."""
        return len(self._lobby)

    def close(self) -> None:
        """Stop accepting, and close the connections that still wait.

        The listener stays open.
        """
        while self._timers:
            self._timers.popitem()[1].cancel()
        if not self._poll.closed:
            self._loop.remove_reader(self._listener.fileno())
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
        for one in self._lobby:
            one.sock.close()

    # ------------------------------------------------------------ the lobby

    def _accept(self) -> None:
        """Have the loop call :meth:`_on_connections` when connections come.

        Called at the start, and again after the pause that :meth:`_no_room` makes.
        """
        self._loop.add_reader(self._listener.fileno(), self._on_connections)

    def _on_connections(self) -> None:
        """Accept connections for :data:`ACCEPT_S` at most; the loop calls it.

        Each is handled if its first bytes are there, else watched until they come.
        """
        until = time.perf_counter() + ACCEPT_S
        while time.perf_counter() < until:
            try:
                fd, address = self._accept_fd()  # without socket.accept's wrapper: 1/3 of a stranger's cost
                sock = _socket.socket(self._family, _STREAM, 0, fd)
            except (BlockingIOError, ConnectionAbortedError):  # or it hung up before its turn
                return
            except OSError:
                self._no_room()
                return
            source = source_of(address[0]) if isinstance(address, tuple) else b""  # of a Unix socket
            one = _Waiting(sock, source, self._loop.time() + REQUEST_TIMEOUT_S)
            if not self._handle_arrived(one, ended=False):
                self._wait(one)

    def _no_room(self) -> None:
        """Make room when the process has no descriptor left.

        Close the connection that waits longest; if none waits, accept none for 0.1 s.
        """
        if (one := self._lobby.oldest()) is not None:
            self._refuse(one, "too_many")
            return
        self._loop.remove_reader(self._listener.fileno())
        self._later(NO_ROOM_S, self._accept)

    def _wait(self, one: _Waiting) -> None:
        """Add a connection to the lobby, and watch it for more bytes or its end.

        The loop then calls :meth:`_on_readable`. The lobby has the connections that are
        neither passed on nor closed yet.
        """
        self._keep(one)
        self._by_fd[one.sock.fileno()] = one
        self._poll.register(one.sock.fileno(), _WATCHED)

    def _keep(self, one: _Waiting) -> None:
        """Add a connection to the lobby, the set of those that wait, unwatched.

        If the lobby is full, or half full from this source, an older connection in it
        is refused and closed. Also have :meth:`_sweep` called soon, which closes those
        whose deadline is over.
        """
        if (gone := self._lobby.add(one, one.source)) is not None:
            self._refuse(gone, "too_many")
        self._later(SWEEP_S, self._sweep)

    def _on_readable(self) -> None:
        """Handle waiting connections that have sent bytes or ended; the loop calls it.

        After :data:`LOOK_S` the others stay for the next loop iteration.
        """
        until = time.perf_counter() + LOOK_S
        while time.perf_counter() < until and (found := self._poll.poll(0, _AT_ONCE)):
            for fd, events in found:
                if (one := self._by_fd.get(fd)) is not None:
                    # any other event: the peer has closed it, or its sending side
                    self._handle_arrived(one, ended=bool(events & ~select.EPOLLIN))

    def _sweep(self) -> None:
        """Close waiting connections whose deadline is over; a timer calls it.

        It has itself called again while connections wait.
        """
        now = self._loop.time()
        for one in self._lobby:
            if one.until <= now:
                # a browser's spare connection, or a probe, sends no request
                self._refuse(one, "too_many" if one in self._ready else "timeout" if one.began else "")
        if self.waiting:
            self._later(SWEEP_S, self._sweep)

    # ------------------------------------------------------------ one connection

    def _handle_arrived(self, one: _Waiting, *, ended: bool) -> bool:
        """Decide on a connection by the bytes that have arrived, which stay unread.

        It is answered and closed (``GET /livez``, or plain HTTP on a TLS port), passed
        on (with a valid token), queued for its turn (without a token, or a TLS
        handshake) or closed. Return True if so, False if more bytes are needed.

        :param one: the connection. :param ended: the peer has closed it, or its sending
            side.
        """
        try:
            data = self._peeked(one)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        nbytes = head_nbytes(data)
        if not data:
            self._drop(one)
        elif self._tls and data[0] != _TLS_HANDSHAKE:
            self._rules.refused("tls")
            self._answer(one, answer("400 Bad Request", _SPEAKS_TLS) if data[:1].isalpha() else b"")
        elif not self._tls and nbytes and (probe := self._rules.answer_at_once(data)) is not None:
            self._answer(one, probe)
        elif not self._tls and nbytes and self._rules.is_valid_token(authorization_of(data[:nbytes])):
            self._pass_on(one)
        elif self._tls or nbytes or len(data) >= HEAD_NBYTES or not data[:1].isalpha():
            self._queue_for_turn(one)
        elif ended:
            self._drop(one)
        else:
            one.began = True
            return False
        return True

    def _peeked(self, one: _Waiting) -> bytes:
        """Return the bytes that have come on a connection, 16 KiB at most; never wait.

        It only peeks: they stay in the kernel's buffer for the next reader. ``b""``
        means that the peer has closed its sending side without a byte.

        :raises BlockingIOError: none have come yet.
        :raises OSError: the connection has failed; the caller closes it.
        """
        data = one.sock.recv(_USUAL_NBYTES, _LOOK)
        # the first read was full, so there may be more
        return one.sock.recv(HEAD_NBYTES, _LOOK) if len(data) == _USUAL_NBYTES else data

    def _answer(self, one: _Waiting, data: bytes) -> None:
        """Send ``data``, a whole HTTP response, and close the connection.

        Does not wait: bytes that the socket does not take now are lost.
        """
        with contextlib.suppress(OSError):
            for _ in range(_DRAINED):  # unread bytes at the close would reset the connection and lose the answer
                if len(one.sock.recv(HEAD_NBYTES, _NOW)) < HEAD_NBYTES:
                    break
        with contextlib.suppress(OSError):
            one.sock.send(data, _NOW)
        self._drop(one)

    def _refuse(self, one: _Waiting, reason: str) -> None:
        """Close a waiting connection, and count the refusal.

        :param reason: one of :data:`replicas.coordinator.limits.REASONS`; "" counts
            nothing.
        """
        if reason:
            self._rules.refused(reason)
        self._drop(one)

    def _unwatch(self, one: _Waiting) -> None:
        """Stop watching a connection for bytes; it stays open."""
        if self._by_fd.pop(one.sock.fileno(), None) is not None:
            self._poll.unregister(one.sock.fileno())

    def _leave(self, one: _Waiting) -> None:
        """Remove a connection from the waiting ones and the queue; do not close it."""
        self._lobby.discard(one)
        self._ready.pop(one, None)

    def _drop(self, one: _Waiting) -> None:
        """Remove a connection from the lobby and the queue for turns, and close it."""
        self._leave(one)
        self._by_fd.pop(one.sock.fileno(), None)  # closing it ends its watch
        one.sock.close()

    def _pass_on(self, one: _Waiting) -> None:
        """Hand a connection to ``admit``, which owns its socket from then on."""
        self._leave(one)
        self._unwatch(one)
        self._admit(socket.socket(fileno=one.sock.detach()), one.source, one.until)

    # ------------------------------------------------------------ turns

    def _queue_for_turn(self, one: _Waiting) -> None:
        """Queue a connection until :meth:`_serve` passes it on, in order of arrival.

        It has no token, or begins a TLS handshake. It is no longer watched for bytes;
        its deadline stays.
        """
        self._unwatch(one)
        if one not in self._lobby:
            self._keep(one)
        self._ready[one] = None
        self._later(0.0, self._serve)

    def _serve(self) -> None:
        """Hand the first connection of the queue to ``admit``, if its turn is now.

        The queue (connections without a token, or TLS handshakes) gets a limited share
        of the event loop's time. A handed connection is charged to it; while the share
        is used up, the connection stays queued. Either way a timer calls this again,
        until the queue is empty.
        """
        one = next(iter(self._ready), None)
        if one is None:
            return
        rest_s = self._pace.charge(0.0, self._loop.time())
        if not rest_s:
            self._pace.charge(HANDSHAKE_S if self._tls else REQUEST_S, self._loop.time())
            self._pass_on(one)
        self._later(rest_s, self._serve)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        """Have the loop call ``what`` after so many seconds; do not wait.

        Do nothing if a call of ``what`` is scheduled already, at whatever time.
        """
        if what not in self._timers:
            self._timers[what] = self._loop.call_later(seconds, self._run_scheduled, what)

    def _run_scheduled(self, what: Callable[[], None]) -> None:
        """Call ``what``, which :meth:`_later` has scheduled; the timer's function."""
        del self._timers[what]  # first: it may schedule itself again
        what()

"""Accept connections on the control port; pass each on once its request head is there.

A connection costs a server in Python some ten times what it costs the client. So
nothing is created for it (no transport, no protocol, no task) before its request head
has arrived and its turn has come:

* Connections are accepted at once, for at most :data:`ACCEPT_S` of one loop iteration;
  the rest stay in the kernel's backlog. An accepted connection waits in the *lobby*, as
  a bare descriptor in an epoll set. One that hangs up there costs three system calls.
* The request head is peeked at in the kernel's buffer. It must be complete within
  :data:`REQUEST_TIMEOUT_S`, and small.
* A head with the run's token is let in at once, so strangers never delay a member. This
  grants nothing: the handler of the request checks the token again.
* ``GET /livez`` is answered here: if a probe had to wait, the supervisor would be
  restarted.
* On a port with TLS the same holds for the decrypted head; before it, the handshakes of
  all have their own queue and share (:mod:`replicas.coordinator.greeting`).
* All other strangers queue by source and share a part of the loop's time
  (:mod:`replicas.coordinator.limits`). When there are too many, the source that has
  most loses its oldest. All users of this machine count as one source: to ask the
  kernel for the user of a connection would cost several times all of the above.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import functools
import itertools
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replicas import errors
from replicas.coordinator.addresses import AllowedHosts, source_of
from replicas.coordinator.greeting import GREET_S, HANDSHAKES_SHARE, SHAKING, TOO_LONG, Greeting, first_bytes
from replicas.coordinator.limits import STRANGERS_SHARE, Crowd, RateLimit

Admit = Callable[[socket.socket, bytes | None, Greeting | None], None]
"""Passes on a connection whose request can be read from it, with a stranger's source.

None for the source: the connection has shown a token. On a port with TLS the request
has been read already, into the greeting.
"""

REQUEST_TIMEOUT_S = 5.0
"""From connecting to the complete head; for a stranger also from there to its turn."""
HEAD_NBYTES = 16 * 1024
"""Of a request head."""
REQUEST_S = 500e-6
"""Fixed cost of a stranger's request: a transport, parsing, the close."""
LOBBY = 4096
"""Connections without a complete request; at most a quarter of the process's fds."""
QUEUED = 512
"""Requests of strangers that wait for their turn."""
ACCEPT_S = 0.003
LOOK_S = 0.001
"""Time limits of accepting and of reading, per loop iteration.

When the backlog is full the kernel drops the connection attempt, and the client retries
after a second. So delaying all other work a little is better than leaving connections
in the backlog.
"""
SWEEP_S = 0.25
NO_ROOM_S = 0.1
"""Pause when the process has no descriptor left."""
_AT_ONCE = 64
_DRAINED = 8
_STREAM = int(socket.SOCK_STREAM)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_NOW = int(socket.MSG_DONTWAIT)
_USUAL_NBYTES = 2048
"""Bytes of the head to peek at first; more only if they do not suffice."""
_WATCHED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ENDS = (b"\r\n\r\n", b"\n\n", b"\n\r\n")
_LIVEZ = b"GET /livez HTTP/1."
_TLS_HANDSHAKE = 0x16
_SPEAKS_TLS = "this port speaks TLS 1.3: ask it by https://, with the token that `replicas token` shows"


def authorization_of(head: bytes) -> bytes:
    """The value of the Authorization header, or empty."""
    for line in head.split(b"\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"authorization":
            return value.strip()
    return b""


@functools.cache
def _answer(status: str, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body


def head_of(data: bytes) -> bytes | None:
    """The lines of the request's head; None: not complete yet."""
    ends = [end for mark in _ENDS if (end := data.find(mark)) >= 0]
    return data[: min(ends)] if ends else None


@dataclass(slots=True, eq=False)
class _Waiting:
    sock: _socket.socket
    source: bytes
    until: float
    greeting: Greeting | None = None


class Door:
    """Accepts and queues the connections of one listener.

    :param refused: called with the reason for each connection that is turned away.
    :param knows: whether the value of an Authorization header shows a valid token.
    :param live: result of ``GET /livez``; None: no such page.
    :param tls: what the port speaks; None: plain HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        refused: Callable[[str], None],
        *,
        knows: Callable[[bytes], bool],
        hosts: AllowedHosts,
        live: Callable[[], bool] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._family = int(listener.family)
        self._accept_fd: Callable[[], tuple[int, Any]] = listener._accept  # type: ignore[attr-defined]  # typeshed leaves it out
        self._refused = refused
        self._knows = knows
        self._tls = tls
        self.hosts = hosts
        self._live = live
        self._lobby_max = min(LOBBY, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._lobby: Crowd[_Waiting] = Crowd()
        self._hellos: Crowd[_Waiting] = Crowd()
        self._shaking: Crowd[_Waiting] = Crowd()
        self._queue: Crowd[_Waiting] = Crowd()
        self._by_fd: dict[int, _Waiting] = {}
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    @property
    def waiting(self) -> int:
        """Connections that have not been let in."""
        return sum(map(len, self._crowds))

    @property
    def _crowds(self) -> tuple[Crowd[_Waiting], ...]:
        return self._lobby, self._hellos, self._shaking, self._queue

    def open(self, admit: Admit) -> None:
        """Start to accept."""
        self._loop = asyncio.get_running_loop()
        self.pace = RateLimit(self._loop.time(), STRANGERS_SHARE)
        self._greeting_pace = RateLimit(self._loop.time(), HANDSHAKES_SHARE)
        self._admit = admit
        self._poll = select.epoll()
        self._loop.add_reader(self._poll.fileno(), self._on_readable)
        self._loop.add_reader(self._listener.fileno(), self._on_connections)

    def close(self) -> None:
        """Stop accepting, and close the waiting connections."""
        while self._timers:
            self._timers.popitem()[1].cancel()
        if not self._poll.closed:
            self._loop.remove_reader(self._listener.fileno())
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
        for one in itertools.chain(*self._crowds):
            self._drop(one)

    # ------------------------------------------------------------ the lobby

    def _on_connections(self) -> None:
        until = time.perf_counter() + ACCEPT_S
        while time.perf_counter() < until:
            try:
                fd, address = self._accept_fd()  # without socket.accept's wrapper: 1/3 of a stranger's cost
                sock = _socket.socket(self._family, _STREAM, 0, fd)
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._no_room()
                return
            one = _Waiting(sock, source_of(address[0]), self._loop.time() + REQUEST_TIMEOUT_S)
            if not self._handle(one, ended=False):
                self._wait(one)

    def _no_room(self) -> None:
        """No descriptor is left: close one of the lobby, else pause accepting."""
        if len(self._lobby):
            self._refused("too_many")
            self._drop(self._lobby.pop_excess())
            return
        self._loop.remove_reader(self._listener.fileno())
        self._later(NO_ROOM_S, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._on_connections)

    def _wait(self, one: _Waiting) -> None:
        crowd, most = (self._lobby, self._lobby_max) if one.greeting is None else (self._shaking, SHAKING)
        if len(crowd) >= most:
            self._refused("too_many")
            self._drop(crowd.pop_excess())
        crowd.add(one, one.source)
        self._by_fd[one.sock.fileno()] = one
        self._poll.register(one.sock.fileno(), _WATCHED)
        self._later(SWEEP_S, self._sweep)

    def _on_readable(self) -> None:
        until = time.perf_counter() + LOOK_S
        while time.perf_counter() < until and (found := self._poll.poll(0, _AT_ONCE)):
            for fd, events in found:
                one = self._by_fd.get(fd)
                if one is not None and self._handle(one, ended=bool(events & ~select.EPOLLIN)):
                    self._lobby.discard(one)
                    self._shaking.discard(one)

    def _sweep(self) -> None:
        """Close connections that have waited past their deadline."""
        now = self._loop.time()
        for crowd in self._crowds:
            for one in [one for one in crowd if one.until <= now]:
                crowd.discard(one)
                self._refused("timeout" if crowd in (self._lobby, self._shaking) else "too_many")
                self._drop(one)
        if self.waiting:
            self._later(SWEEP_S, self._sweep)

    # ------------------------------------------------------------ one connection

    def _handle(self, one: _Waiting, *, ended: bool) -> bool:
        """Handle what has arrived; False: more of the request must come first."""
        try:
            data = self._peeked(one) if one.greeting is None else self._decrypted(one, one.greeting)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return True
        if self._tls is not None and one.greeting is None:
            return self._judge_hello(one, data, ended=ended)
        if data[:1].isalpha() and (head := head_of(data)) is not None:
            self._heard(one, head)
        elif data[0] == _TLS_HANDSHAKE and one.greeting is None:
            self._turn_away(one, "tls", "400 Bad Request", "this port does not speak TLS")
        elif not data[:1].isalpha():
            self._turn_away(one, "malformed", "400 Bad Request", "this is not a request of HTTP")
        elif len(data) >= HEAD_NBYTES:
            text = f"the head of a request may have {HEAD_NBYTES} bytes"
            self._turn_away(one, "oversized", "431 Request Header Fields Too Large", text)
        elif ended:
            self._drop(one)
        else:
            return False
        return True

    def _peeked(self, one: _Waiting) -> bytes:
        data = one.sock.recv(_USUAL_NBYTES, _LOOK)
        return one.sock.recv(HEAD_NBYTES, _LOOK) if len(data) == _USUAL_NBYTES else data

    def _heard(self, one: _Waiting, data: bytes) -> None:
        if self._live is not None and data.startswith(_LIVEZ):
            status, text = "503 Service Unavailable", "the supervisor's event loop or store is stuck"
            try:
                if self._live():
                    status, text = "200 OK", "ok"
            except errors.UsageError as error:  # the supervisor is still starting
                text = error.message
            self._answer(one, _answer(status, text))
            return
        if self._knows(authorization_of(data)):
            self._let_in(one, None)
            return
        self._forget(one)
        if len(self._queue) >= QUEUED:
            self._refused("too_many")
            if self._queue.is_mostly(one.source):
                self._drop(one)
                return
            self._drop(self._queue.pop_excess())
        self._queue.add(one, one.source)
        self._later(0.0, self._serve)
        self._later(SWEEP_S, self._sweep)

    def _turn_away(self, one: _Waiting, reason: str, status: str, text: str) -> None:
        self._refused(reason)
        self._answer(one, _answer(status, text))

    def _answer(self, one: _Waiting, data: bytes) -> None:
        if one.greeting is not None:
            tls = one.greeting.tls
            tls.write(data)
            tls.end()
            data = tls.outgoing()
        with contextlib.suppress(OSError):
            for _ in range(_DRAINED):  # unread bytes at the close would reset the connection and lose the answer
                if len(one.sock.recv(HEAD_NBYTES, _NOW)) < HEAD_NBYTES:
                    break
        with contextlib.suppress(OSError):
            one.sock.send(data, _NOW)
        self._drop(one)

    def _forget(self, one: _Waiting) -> None:
        """Stop polling the connection."""
        if self._by_fd.pop(one.sock.fileno(), None) is not None:
            self._poll.unregister(one.sock.fileno())

    def _drop(self, one: _Waiting) -> None:
        self._by_fd.pop(one.sock.fileno(), None)
        one.sock.close()

    def _let_in(self, one: _Waiting, source: bytes | None) -> None:
        self._forget(one)
        self._admit(socket.socket(fileno=one.sock.detach()), source, one.greeting)

    # ------------------------------------------------------------ TLS

    def _judge_hello(self, one: _Waiting, data: bytes, *, ended: bool) -> bool:
        """Queue a connection whose ClientHello is there; as :meth:`_handle`."""
        match first_bytes(data):
            case "more" if not ended:
                return False
            case "hello":
                self._forget(one)
                if len(self._hellos) >= QUEUED:
                    self._refused("too_many")
                    self._drop(self._hellos.pop_excess())
                self._hellos.add(one, one.source)
                self._later(0.0, self._greet)
                self._later(SWEEP_S, self._sweep)
            case "plain":
                self._turn_away(one, "tls", "400 Bad Request", _SPEAKS_TLS)
            case "oversized":
                self._refused("oversized")
                self._answer(one, TOO_LONG)
            case "malformed":
                self._refused("malformed")
                self._drop(one)
            case _:
                self._drop(one)
        return True

    def _greet(self) -> None:
        """Answer the next hello: one per loop iteration, as their share allows."""
        if not len(self._hellos):
            return
        began = time.perf_counter()
        if rest_s := self._greeting_pace.charge(0.0, self._loop.time()):
            self._later(rest_s, self._greet)
            return
        one = self._hellos.pop_next()
        assert self._tls is not None
        one.greeting = Greeting(self._tls)
        if not self._handle(one, ended=False):
            self._wait(one)
        self._greeting_pace.charge(time.perf_counter() - began + GREET_S, self._loop.time())
        self._later(0.0, self._greet)

    def _decrypted(self, one: _Waiting, greeting: Greeting) -> bytes:
        """The request as far as it has come; BlockingIOError: nothing of it yet.

        :raises OSError: the peer is gone, or does not speak our TLS.
        """
        while len(greeting.content) < HEAD_NBYTES:
            try:
                data = one.sock.recv(HEAD_NBYTES, _NOW)
            except BlockingIOError:
                break
            try:
                answer = greeting.take(data)
            except (ssl.SSLError, EOFError):  # also: it expected another key, and leaves without a request
                self._refused("tls")
                self._send(one, greeting.tls.outgoing())
                return b""
            self._send(one, answer)
        if not greeting.content:
            raise BlockingIOError
        return greeting.content

    def _send(self, one: _Waiting, data: bytes) -> None:
        if data:
            with contextlib.suppress(OSError):  # it does not read, or is gone: its deadline will end it
                one.sock.send(data, _NOW)

    # ------------------------------------------------------------ the queue

    def _serve(self) -> None:
        """Let in the next stranger: one per loop iteration, as their share allows."""
        if not len(self._queue):
            return
        rest_s = self.pace.charge(0.0, self._loop.time())
        if rest_s:
            self._later(rest_s, self._serve)
            return
        one = self._queue.pop_next()
        self.pace.charge(REQUEST_S, self._loop.time())
        self._let_in(one, one.source)
        self._later(0.0, self._serve)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        """Schedule a call, unless it is already scheduled."""
        if what not in self._timers:
            self._timers[what] = self._loop.call_later(seconds, self._now, what)

    def _now(self, what: Callable[[], None]) -> None:
        del self._timers[what]
        what()

"""The door of the control port: accepts connections, and lets them in when they have
said what they want.

Theory of operation
===================

A stranger who connects costs a server written in Python some ten times what it costs
the stranger. So nothing is built for a connection (no transport, no protocol, no task)
before the head of its request is there and it is its turn:

* Everybody is accepted, at once, as long as that takes no more than :data:`ACCEPT_S` of
  a turn of the loop; the kernel keeps the rest. What is accepted waits in the *lobby*,
  a bare descriptor in an epoll set. Whoever hangs up is gone for the price of three
  system calls.
* The head of a request is looked at where it lies, in the kernel's buffer. It must be
  complete in REQUEST_TIMEOUT_S, and small.
* A head that shows the run's token is let in at once. Members do so: no crowd of
  strangers is ever ahead of one. That gives no right to anything; those who serve the
  request look at the token again.
* ``GET /livez`` is answered from here: a probe that is kept waiting would have the
  supervisor restarted.
* All other strangers queue, source by source (:mod:`replicas.coordinator.crowd`), and
  together get a share of the loop's time
  (:class:`~replicas.coordinator.limits.RateLimit`). Where there are too many, the
  source that has most loses its oldest.

Users of this machine are one source. The kernel would tell whose a connection is, but
asking costs 70 µs, several times of all the above together, and those who matter
(members, probes) need no such favour.
"""

from __future__ import annotations

import _socket
import asyncio
import contextlib
import functools
import hmac
import resource
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from replicas import errors
from replicas.coordinator.allowed_hosts import AllowedHosts
from replicas.coordinator.crowd import Crowd, source_of
from replicas.coordinator.limits import (
    HEAD_NBYTES,
    LOBBY,
    QUEUED,
    REQUEST_S,
    REQUEST_TIMEOUT_S,
    STRANGERS_SHARE,
    RateLimit,
)

__all__ = ["Admit", "Door", "authorization_of", "head_of"]

Admit = Callable[[socket.socket, bytes | None], None]
"""Let a connection in, whose request can be read from it. The source of a stranger;
None: it has shown the token."""

ACCEPT_S = 0.003
LOOK_S = 0.001
"""How long these go on before everybody else has a turn of the loop. Whom the kernel
cannot keep has to try again after a second: so it is better to be a little late with
everything than to leave somebody there."""
SWEEP_S = 0.25
NO_ROOM_S = 0.1
"""A pause when the process has no descriptor left."""
_AT_ONCE = 64
_DRAINED = 8
_STREAM = int(socket.SOCK_STREAM)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_NOW = int(socket.MSG_DONTWAIT)
_USUAL_NBYTES = 2048
"""Of the head of a request; more is looked at where it is not enough."""
_WATCHED = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ENDS = (b"\r\n\r\n", b"\n\n", b"\n\r\n")
_LIVEZ = b"GET /livez HTTP/1."


def authorization_of(head: bytes) -> bytes:
    """What the request shows, if anything."""
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
    """The lines of the request's head; None: it is not complete yet."""
    ends = [end for mark in _ENDS if (end := data.find(mark)) >= 0]
    return data[: min(ends)] if ends else None


class _Caller:
    __slots__ = ("sock", "source", "until")

    def __init__(self, sock: _socket.socket, source: bytes, until: float) -> None:
        self.sock = sock
        self.source = source
        self.until = until


class Door:
    """One for each listener.

    :param refused: called with the reason for each connection that is turned away.
    :param token: of the run. :param hosts: by which names the port may be spoken to.
    :param live: what ``GET /livez`` tells; None: there is no such page.
    """

    def __init__(
        self,
        listener: socket.socket,
        refused: Callable[[str], None],
        *,
        token: Callable[[], str],
        hosts: AllowedHosts,
        live: Callable[[], bool] | None = None,
    ) -> None:
        self._listener = listener
        self._family = int(listener.family)
        self._accept_fd: Callable[[], tuple[int, Any]] = listener._accept  # type: ignore[attr-defined]  # typeshed leaves it out
        self._refused = refused
        self._token = token
        self.hosts = hosts
        self._live = live
        self._lobby_max = min(LOBBY, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._lobby: Crowd[_Caller] = Crowd()
        self._queue: Crowd[_Caller] = Crowd()
        self._by_fd: dict[int, _Caller] = {}
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    @property
    def waiting(self) -> int:
        """Connections that have not been let in."""
        return len(self._lobby) + len(self._queue)

    def open(self, admit: Admit) -> None:
        """Accept from now on."""
        self._loop = asyncio.get_running_loop()
        self.pace = RateLimit(self._loop.time(), STRANGERS_SHARE)
        self._admit = admit
        self._poll = select.epoll()
        self._loop.add_reader(self._poll.fileno(), self._on_news)
        self._loop.add_reader(self._listener.fileno(), self._on_callers)

    def close(self) -> None:
        """Accept nobody any more, and send away who waits."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if not self._poll.closed:
            self._loop.remove_reader(self._listener.fileno())
            self._loop.remove_reader(self._poll.fileno())
            self._poll.close()
        for one in (*self._lobby, *self._queue):
            self._drop(one)

    # ------------------------------------------------------------ the lobby

    def _on_callers(self) -> None:
        until = time.perf_counter() + ACCEPT_S
        while time.perf_counter() < until:
            try:
                sock, address = self._accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._no_room()
                return
            one = _Caller(sock, source_of(address[0]), self._loop.time() + REQUEST_TIMEOUT_S)
            if not self._dealt_with(one, ended=False):
                self._wait(one)

    def _accept(self) -> tuple[_socket.socket, Any]:
        """As ``socket.accept``, without what that takes for enums and a class in
        Python: a third of what a stranger costs."""
        fd, address = self._accept_fd()
        return _socket.socket(self._family, _STREAM, 0, fd), address

    def _no_room(self) -> None:
        """There is no descriptor left: whoever waits without a word gives way; else the
        kernel keeps who comes."""
        if len(self._lobby):
            self._refused("too_many")
            self._drop(self._lobby.pop_excess())
            return
        self._loop.remove_reader(self._listener.fileno())
        self._later(NO_ROOM_S, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._on_callers)

    def _wait(self, one: _Caller) -> None:
        if len(self._lobby) >= self._lobby_max:
            self._refused("too_many")
            self._drop(self._lobby.pop_excess())
        self._lobby.add(one, one.source)
        self._by_fd[one.sock.fileno()] = one
        self._poll.register(one.sock.fileno(), _WATCHED)
        self._later(SWEEP_S, self._sweep)

    def _on_news(self) -> None:
        until = time.perf_counter() + LOOK_S
        while time.perf_counter() < until and (found := self._poll.poll(0, _AT_ONCE)):
            for fd, events in found:
                one = self._by_fd.get(fd)
                if one is not None and self._dealt_with(one, ended=bool(events & ~select.EPOLLIN)):
                    self._lobby.discard(one)

    def _sweep(self) -> None:
        """Send away who took too long."""
        now = self._loop.time()
        for crowd in (self._lobby, self._queue):
            for one in crowd.oldest():
                if one.until <= now:
                    crowd.discard(one)
                    self._refused("timeout" if crowd is self._lobby else "too_many")
                    self._drop(one)
        if self.waiting:
            self._later(SWEEP_S, self._sweep)

    # ------------------------------------------------------------ one connection

    def _dealt_with(self, one: _Caller, *, ended: bool) -> bool:
        """Whether it needs not wait for more of its request any longer."""
        try:
            data = one.sock.recv(_USUAL_NBYTES, _LOOK)
            if len(data) == _USUAL_NBYTES:
                data = one.sock.recv(HEAD_NBYTES, _LOOK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return True
        if data[:1].isalpha() and (head := head_of(data)) is not None:
            self._heard(one, head)
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

    def _heard(self, one: _Caller, data: bytes) -> None:
        if self._live is not None and data.startswith(_LIVEZ):
            self._answer(one, _answer(*self._life(self._live)))
            return
        if hmac.compare_digest(authorization_of(data), b"Bearer " + self._token().encode()):
            self._let_in(one, None)
            return
        self._forget(one)
        self._enqueue(one)

    def _enqueue(self, one: _Caller) -> None:
        if len(self._queue) >= QUEUED:
            self._refused("too_many")
            if self._queue.is_mostly(one.source):
                self._drop(one)
                return
            self._drop(self._queue.pop_excess())
        self._queue.add(one, one.source)
        self._later(0.0, self._serve)
        self._later(SWEEP_S, self._sweep)

    @staticmethod
    def _life(live: Callable[[], bool]) -> tuple[str, str]:
        try:
            if live():
                return "200 OK", "ok"
        except errors.UsageError as error:  # it is just being started
            return "503 Service Unavailable", error.message
        return "503 Service Unavailable", "the supervisor's event loop or store is stuck"

    def _turn_away(self, one: _Caller, reason: str, status: str, text: str) -> None:
        self._refused(reason)
        self._answer(one, _answer(status, text))

    def _answer(self, one: _Caller, data: bytes) -> None:
        with contextlib.suppress(OSError):
            for _ in range(_DRAINED):  # what is left unread would cut off the answer
                if len(one.sock.recv(HEAD_NBYTES, _NOW)) < HEAD_NBYTES:
                    break
            one.sock.send(data, _NOW)
        self._drop(one)

    def _forget(self, one: _Caller) -> None:
        """Hear no more of it."""
        if self._by_fd.pop(one.sock.fileno(), None) is not None:
            self._poll.unregister(one.sock.fileno())

    def _drop(self, one: _Caller) -> None:
        self._by_fd.pop(one.sock.fileno(), None)
        one.sock.close()

    def _let_in(self, one: _Caller, source: bytes | None) -> None:
        self._forget(one)
        self._admit(socket.socket(fileno=one.sock.detach()), source)

    # ------------------------------------------------------------ the queue

    def _serve(self) -> None:
        """Let in the next of those who wait, one in a turn of the loop, as far as their
        share of it goes."""
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
        """Call it then, unless it will be called anyway."""
        if what not in self._timers:
            self._timers[what] = self._loop.call_later(seconds, self._now, what)

    def _now(self, what: Callable[[], None]) -> None:
        del self._timers[what]
        what()

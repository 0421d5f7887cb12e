"""A helper process of this process: requests over frames, pings, and its end.

**Pings.** A helper answers a ping on a separate thread, within 0.2 s, even if its main
thread is stuck. A helper that does not answer is stopped (SIGSTOP, a frozen cgroup) or
starved beyond use: it is killed and replaced. A thread that needs microseconds of CPU
gets them within about 100 ms even on a machine with ten busy processes for each core,
and no call of a helper holds the GIL for that long. ``SILENCE_S`` is far above that,
and far below any deadline; a wrong verdict only fails the helper's pending requests.
If this process itself was late, the answer may be unread, so the helper gets the whole
time again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from replicas.common.child import ChildLife
from replicas.common.patience import Silence
from replicas.common.tasks import is_set_within
from replicas.linux import frames
from replicas.linux.processes import send_signal

KILL_GRACE_S = 1.0
"""Time past a request's own timeout after which the sidecar is killed, in seconds."""
INTERVAL_S = 0.5
"""Time between two checks while a request or a ping is pending, in seconds."""
IDLE_S = 5.0
"""Time between two pings of an idle sidecar, in seconds."""
SILENCE_S = 2.0
"""A ping unanswered for this many seconds means that the sidecar is frozen."""
LATE_S = 0.25
"""A check that is later than this, in seconds, means that this process was stalled."""
_ROUNDING_S = 0.01

_R = TypeVar("_R")


class HelperDied(RuntimeError):
    """The helper is dead, or was killed at a deadline.

    :cvar kind: name of this kind of helper, for messages.
    """

    kind = "helper"


class Pulse(Silence):
    """Decides when the owner of one helper process pings or kills it; sends nothing.

    The owner calls :meth:`next_action` at intervals. ``now`` is in seconds of any
    steady clock.

    :ivar busy: True if the helper was at work when the interval began.
    """

    def __init__(self, now: float) -> None:
        """Begin without a ping; the first :meth:`next_action` is due ``now``."""
        super().__init__(now, LATE_S)
        self.busy = False

    def interval_s(self, now: float, *, busy: bool) -> float:
        """Set the time of the next :meth:`next_action`; return the seconds until then.

        The time is stored in :attr:`due`, and ``busy`` as an attribute. A call that is
        later shows that this process was suspended, which does not count as silence.

        :param busy: True if a request is pending: the interval is then shorter.
        """
        self.busy = busy
        delay = INTERVAL_S if busy or self.asked else IDLE_S
        self.due = now + delay
        return delay

    def next_action(self, now: float) -> Literal["ping", "wait", "frozen"]:
        """Return the owner's next action: "ping", "wait" (do nothing) or "frozen".

        ``"ping"`` means to send a ping, which counts as sent from now on; ``"frozen"``
        to kill the helper, which has not answered for :data:`SILENCE_S`.
        """
        if not self.asked:
            self.ask(now)
            return "ping"
        return "frozen" if self.measure_silence(now) >= SILENCE_S - _ROUNDING_S else "wait"


class HelperMemory(Protocol):
    """Shared memory, by descriptor, that helper processes map.

    ``watchers``: objects to notify when it is closed.
    """

    @property
    def fd(self) -> int:
        """Descriptor of the memory's file; -1 once it is closed."""

    @property
    def key(self) -> int:
        """Number that is unique among the memories of this process."""

    watchers: Any


class HelperProcess:
    """One helper process, watched by a pidfd, and the socket for requests to it.

    A subclass has a method for each request, and tells which reply answers a ping.

    :cvar died: the error of pending requests when the helper dies.
    :cvar decode: decodes the body of a frame to a reply.
    :cvar ping: makes a ping with a number.
    :cvar lend: makes the message with which a memory is sent.
    :cvar forget: makes the message to unmap the memory of a key.
    :ivar on_exit: called on the loop, once, with a reason, when it ends without
        :meth:`kill`.
    """

    died: type[HelperDied] = HelperDied
    decode: Callable[[bytes], Any]
    ping: Callable[[int], msgspec.Struct]
    lend: Callable[[Any], msgspec.Struct]
    forget: Callable[[int], msgspec.Struct]

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        """Take over a started process; watch its pidfd and socket on the running loop.

        This object closes both when the process or its connection has ended.

        :param sock: connected to the process; set to non-blocking here.
        """
        self.pid = pid
        self.on_exit: Callable[[str], None] | None = None
        self._pidfd = pidfd
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._memories = _Memories(self)
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        """Frames that are not sent yet, with their descriptors."""
        self._life = ChildLife(None)
        self._life.start(self._loop.time())
        self._gone = asyncio.Event()
        self._reason = ""
        sock.setblocking(False)
        self._loop.add_reader(pidfd, self._ended)
        self._frames = frames.FrameReader(sock)
        self._loop.add_reader(sock, self._readable)
        self._pulse = Pulse(self._loop.time())
        self._timer = self._next_look()

    @property
    def dead(self) -> bool:
        """True if the process has ended (not merely been killed)."""
        return self._life.state == "over"

    @property
    def usable(self) -> bool:
        """True if requests can be sent: the process is starting or up, not killed."""
        return self._life.state in ("starting", "up")

    @property
    def at_work(self) -> bool:
        """True if a request is pending; the helper is then pinged more often."""
        return bool(self._pending)

    def kill(self, reason: str = "killed") -> None:
        """Kill the helper by SIGKILL; pending requests raise the error :attr:`died`.

        ``on_exit`` is not called. Does not wait for its end; see :meth:`wait_dead`.

        :param reason: text for the errors.
        """
        self.on_exit = None
        self._kill_and_fail(reason)

    async def wait_dead(self, timeout_s: float = 5.0) -> bool:
        """Wait until the process has ended, and so has freed its memory; kill nothing.

        Return True if it has ended, False after ``timeout_s``.
        """
        await is_set_within(self._gone, timeout_s)
        return self.dead

    @property
    def fds(self) -> set[int]:
        """The open descriptors of this object. A forked child must close them."""
        return {self._sock.fileno(), self._pidfd} - {-1}

    async def _ask(self, request: Any, timeout_s: float, kind: type[_R], *memories: HelperMemory) -> _R:
        """Send a request to the helper, wait for the reply, and return it.

        :param timeout_s: time within which the helper should answer, if only with an
            error. If it has not done so ``KILL_GRACE_S`` later, it is killed here.
        :param kind: the type that the reply must have; another one raises
            :meth:`_failure`.
        :param memories: sent before the request, unless the helper has mapped them
            already.
        :raises HelperDied: it is dead, died, or was killed at the limit.
        """
        if not self.usable:
            raise self.died(self._end_text())
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[request.id] = future
        self._look_soon()
        try:
            for memory in memories:
                self._memories.map(memory)
            self._send(request)
            async with asyncio.timeout(timeout_s + KILL_GRACE_S):
                reply = await future
        except TimeoutError:
            self.kill(f"it did not answer within {timeout_s:g} s and was killed")
            raise self.died(self._end_text()) from None
        except OSError as error:
            raise self.died(f"{self.died.kind} {self.pid} is gone: {self._reason or error}") from error
        finally:
            self._pending.pop(request.id, None)
        if not isinstance(reply, kind):
            text = f"{self.died.kind} {self.pid} answered {type(request).__name__} with {type(reply).__name__}"
            raise self._failure(reply, text)
        return reply

    def _failure(self, reply: Any, text: str) -> Exception:
        """Return the error to raise for a reply of an unexpected type.

        A subclass implements this and :meth:`_answers_ping`.

        :param reply: an error of the helper, or anything else.
        :param text: message for a reply that is not an error.
        """
        raise NotImplementedError

    def _answers_ping(self, reply: Any) -> bool:
        """Return True if the reply answers a ping, and belongs to no request."""
        raise NotImplementedError

    def _send(self, message: msgspec.Struct, *fds: int) -> None:
        """Queue a message, with duplicates of the descriptors ``fds``, and try to send.

        Does not block; the rest follows when the socket has room. If the connection has
        failed, the helper is killed, as by :meth:`_flush`.

        :raises OSError: one of ``fds`` is closed.
        """
        body = frames.encode(message)
        owned = [os.dup(fd) for fd in fds]  # a buffer may be closed before it is sent
        self._unsent.append((memoryview(frames.frame_head(body, fds) + body), owned))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send queued frames until the socket is full; the loop calls it again later.

        If the connection has failed, kill the helper and fail its pending requests.
        """
        try:
            while self._unsent:
                data, fds = self._unsent[0]
                sent = socket.send_fds(self._sock, [data], fds)
                frames.close_all(fds)  # they are sent with the first byte
                self._unsent[0] = (data[sent:], [])
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
        except OSError as error:
            with contextlib.suppress(OSError):
                while came := self._frames.receive():  # it has ended, and its last reply may say why
                    self._handle(came)
            self._kill_and_fail(str(error))
        else:
            self._loop.remove_writer(self._sock)

    def _next_look(self) -> asyncio.TimerHandle:
        """Schedule the next :meth:`_check_alive` on the loop; return its timer."""
        delay = self._pulse.interval_s(self._loop.time(), busy=self.at_work)
        return self._loop.call_later(delay, self._check_alive)

    def _look_soon(self) -> None:
        """Schedule the next check of an idle helper sooner, as it gets a request."""
        if not self._pulse.asked and not self._pulse.busy:
            self._timer.cancel()
            self._timer = self._next_look()

    def _check_alive(self) -> None:
        """Send a ping, or kill a helper that does not answer; schedule the next check.

        The timer calls it on the loop.
        """
        match self._pulse.next_action(self._loop.time()):
            case "frozen":
                self._kill_and_fail(f"it did not respond for {SILENCE_S:g} s and was killed")
                return
            case "ping":
                self._send(self.ping(next(self._numbers)))
        self._timer = self._next_look()

    def _readable(self) -> None:
        """Handle the replies that have come; the loop calls it when there are data.

        At the connection's end, close the socket and kill the helper.
        """
        try:
            came = self._frames.receive()
            if came is None:
                raise ConnectionError("it died")
            self._handle(came)
        except OSError as error:
            self._loop.remove_reader(self._sock)
            self._kill_and_fail(str(error))  # also a living process that has closed the channel
            self._sock.close()

    def _handle(self, came: list[tuple[bytes, list[int]]]) -> None:
        """Give pending requests their replies, and note answers to pings.

        :param came: encoded replies with their descriptors, which this closes.
        :raises ConnectionError: a reply is malformed.
        """
        for body, fds in came:
            frames.close_all(fds)  # replies carry no descriptors
            reply = self.decode(body)
            self._life.ready()
            if self._answers_ping(reply):
                self._pulse.answered()
                continue
            future = self._pending.pop(reply.id, None)
            if future is not None and not future.done():
                future.set_result(reply)

    def _kill_and_fail(self, reason: str) -> None:
        """Kill the helper if it lives, and fail all pending requests.

        Unsent frames are dropped, and the connection is shut down.

        :param reason: text for the errors; an earlier reason stays.
        """
        self._reason = self._reason or reason
        if self.usable:
            self._life.give_up()
        if not self.dead:
            send_signal(self._pidfd, signal.SIGKILL)
        if self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock)
        self._timer.cancel()
        while self._unsent:
            frames.close_all(self._unsent.popleft()[1])
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self.died(self._end_text()))

    def _ended(self) -> None:
        """Handle the end of the process, which the pidfd reports to the loop.

        Close the pidfd, wake :meth:`wait_dead`, and call ``on_exit`` if it is set.
        """
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._life.ended(self._loop.time())
        self._gone.set()  # _readable still reads earlier replies, then fails the other requests
        self._timer.cancel()
        if self.on_exit is not None:
            self.on_exit(self._end_text())

    def _end_text(self) -> str:
        """Return a text for an error: the kind of helper, its pid, and why it ended."""
        return f"{self.died.kind} {self.pid}: {self._reason or 'it died'}"


class _Memories:
    """The shared memories that a helper has mapped; it must unmap those closed here."""

    def __init__(self, helper: HelperProcess) -> None:
        """Begin with nothing mapped; messages are sent by ``helper``."""
        self._helper = helper
        self._mapped: set[int] = set()

    def map(self, memory: HelperMemory) -> None:
        """Send a memory's descriptor to the helper, unless the helper has mapped it.

        From then on the helper is told when the memory is closed here.

        :raises OSError: the memory is closed.
        """
        if memory.key not in self._mapped:
            self._helper._send(self._helper.lend(memory), memory.fd)
            self._mapped.add(memory.key)
            memory.watchers.add(self)

    def buffer_closed(self, key: int) -> None:
        """Have the helper unmap memory ``key``, which was closed here.

        Called on any thread, by the memory; the message is sent on the loop.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the helper has ended
            self._helper._loop.call_soon_threadsafe(self._unmap, key)

    def _unmap(self, key: int) -> None:
        """Tell the helper to unmap memory ``key``, if it has mapped it; on the loop."""
        if key in self._mapped and self._helper.usable:
            self._mapped.discard(key)
            self._helper._send(self._helper.forget(key))

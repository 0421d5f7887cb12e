"""One sidecar, as its rank uses it: requests, signs of life, errors, and its end.

:mod:`replicas.sidecar.rank_side.forkserver_client` has the theory of operation.

**Pings.** A sidecar answers a ping on a separate thread, within 0.2 s, whatever its
main thread is stuck in. One that does not answer is stopped (SIGSTOP, a frozen cgroup),
or starved beyond use: it is killed and replaced. A thread that needs microseconds of
CPU gets them within some 100 ms even on a machine with ten busy processes for each
core, and no call of the sidecar holds the GIL for that long. ``SILENCE_S`` is far above
that, and far below any deadline; a wrong verdict costs one lane, which is built again.
There is no verdict after this process itself was late: the answer may lie unread, so
the sidecar gets the whole time again.
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
from typing import Any, Literal, TypeVar

import msgspec
import torch

from replicas import errors
from replicas.common.child import ChildLife
from replicas.common.patience import Silence
from replicas.linux.processes import send_signal
from replicas.sidecar import wire
from replicas.sidecar.wire import CollectiveSpec, GroupSpec, TransferResult, TransferSpec
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.memory.buffers import Buffer

KILL_GRACE_S = 1.0
"""Time past a request's own timeout after which the sidecar is killed, in seconds."""
INTERVAL_S = 0.5
"""Between two looks while a request or a ping is pending, in seconds."""
IDLE_S = 5.0
"""Between two pings of an idle sidecar, in seconds."""
SILENCE_S = 2.0
"""A ping unanswered for this many seconds means that the sidecar is frozen."""
LATE_S = 0.25
"""A look that is later than this, in seconds, means that this process was stalled."""
_ROUNDING_S = 0.01

_R = TypeVar("_R")


class SidecarFailed(RuntimeError):
    """The sidecar answered with an error. Fields as of :class:`wire.Failed`."""

    def __init__(self, reply: wire.Failed) -> None:
        super().__init__(reply.error)
        self.over, self.kind, self.links = reply.over, reply.kind, reply.links
        self.members, self.hint = reply.members, reply.hint

    def as_error(self, **fields: Any) -> errors.ReplicasError:
        """Convert to an error of the library. ``fields``: channel, phase, version."""
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(RuntimeError):
    """The sidecar or the forkserver is dead, or was killed at a deadline."""


class Pulse:
    """Signs of life of one sidecar: its owner calls :meth:`look` at intervals.

    ``now``: seconds of any steady clock.
    """

    def __init__(self, now: float) -> None:
        self._silence = Silence(now, LATE_S)

    @property
    def asked(self) -> bool:
        return self._silence.asked

    def interval_s(self, now: float, *, busy: bool) -> float:
        """Return the delay until the next look, and note when it is due."""
        delay = INTERVAL_S if busy or self.asked else IDLE_S
        self._silence.due = now + delay
        return delay

    def look(self, now: float) -> Literal["ping", "wait", "frozen"]:
        """Decide: send a ping (it counts as sent now), wait, or give the sidecar up."""
        if not self.asked:
            self._silence.ask(now)
            return "ping"
        return "frozen" if self._silence.lasts(now) >= SILENCE_S - _ROUNDING_S else "wait"

    def answered(self) -> None:
        self._silence.answered()


class Sidecar:
    """One sidecar process, with at most one process group.

    It has a method for each request, and the fields of both ends of its life: of the
    process, which is watched, and of the socket, which is never waited for.

    :ivar on_exit: called on the loop, once, with a reason, when it ends without
        :meth:`kill`.
    :ivar on_moved: called on the loop, about twice a second while it handles a request
        that moves bytes.
    """

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        self.pid = pid
        self.on_exit: Callable[[str], None] | None = None
        self.on_moved: Callable[[wire.Moved], None] | None = None
        self._pidfd = pidfd
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[wire.Reply]] = {}
        self._mapped: set[int] = set()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        """Frames, with their descriptors, that the socket has not taken yet."""
        self._life = ChildLife(None)
        self._life.start(self._loop.time())
        self._gone = asyncio.Event()
        self._reason = ""
        sock.setblocking(False)
        self._loop.add_reader(pidfd, self._ended)
        self._frames = wire.FrameReader(sock)
        self._loop.add_reader(sock, self._readable)
        self._pulse = Pulse(self._loop.time())
        self._busy = False
        self._timer = self._next_look()

    @property
    def dead(self) -> bool:
        return self._life.state == "over"

    @property
    def usable(self) -> bool:
        return self._life.state in ("starting", "up")

    async def build(self, spec: GroupSpec) -> float:
        """Form the process group; return the duration in seconds.

        :raises SidecarFailed: a peer did not come, or an address is wrong.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after the timeout.
        """
        if spec.backend == "nccl":
            spec = _of_this_process(spec)
        request = wire.BuildGroup(next(self._numbers), spec)
        return (await self._ask(request, (), spec.timeout_s, wire.Built)).seconds

    async def transfer(self, spec: TransferSpec, buffer: Buffer) -> TransferResult:
        """Move one version from or into ``buffer``.

        Errors as of :meth:`build`; after one, a receiver's slot is undefined.
        """
        request = wire.RunTransfer(next(self._numbers), buffer.key, spec)
        return (await self._ask(request, (buffer,), spec.timeout_s, wire.Transferred)).result

    async def probe(self, buffer: Buffer, timeout_s: float) -> bytes:
        """Read all of a small buffer in the sidecar. Errors as of :meth:`build`."""
        request = wire.ProbeBuffer(next(self._numbers), buffer.key)
        return (await self._ask(request, (buffer,), timeout_s, wire.Probed)).seen

    def progress(self, transfer: int, nbytes: int) -> None:
        """Report the first ``nbytes`` of a streaming ``transfer``'s data as packed.

        Never waits. A report before :meth:`transfer` is kept; one after its end, or the
        sidecar's, is ignored.
        """
        if self.usable:
            self._send(wire.TransferProgress(transfer, nbytes))

    async def collective(self, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        """Run one operation; return its duration. Errors as of :meth:`build`."""
        buffers = tuple(buffer for buffer in (inputs, outputs) if buffer is not None)
        first, second = (None if buffer is None else buffer.key for buffer in (inputs, outputs))
        request = wire.RunCollective(next(self._numbers), first, second, spec)
        return (await self._ask(request, buffers, spec.timeout_s, wire.Collected)).seconds

    def kill(self, reason: str = "killed") -> None:
        """SIGKILL; pending requests raise :class:`SidecarDied`; no ``on_exit`` call."""
        self.on_exit = None
        self._put_down(reason)

    async def wait_dead(self, timeout_s: float = 5.0) -> bool:
        """True if the process is dead within ``timeout_s``: it accesses no memory."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        return self.dead

    def buffer_closed(self, key: int) -> None:
        """Have the sidecar unmap a buffer that was closed here (on any thread)."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the sidecar has ended
            self._loop.call_soon_threadsafe(self._forget, key)

    @property
    def fds(self) -> set[int]:
        """Its descriptors: in a forked child they would hide the rank's end."""
        return {self._sock.fileno(), self._pidfd} - {-1}

    async def _ask(self, request: Any, buffers: tuple[Buffer, ...], timeout_s: float, kind: type[_R]) -> _R:
        if not self.usable:
            raise SidecarDied(self._end_text())
        future: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._pending[request.id] = future
        self._look_soon()
        try:
            for buffer in buffers:
                self._map(buffer)
            self._send(request)
            async with asyncio.timeout(timeout_s + KILL_GRACE_S):
                reply = await future
        except TimeoutError:
            self.kill(f"it did not answer within {timeout_s:g} s and was killed")
            raise SidecarDied(self._end_text()) from None
        except OSError as error:
            raise SidecarDied(f"sidecar {self.pid} is gone: {self._reason or error}") from error
        finally:
            self._pending.pop(request.id, None)
        if isinstance(reply, wire.Failed):
            raise SidecarFailed(reply)
        if not isinstance(reply, kind):
            text = f"sidecar {self.pid} answered {type(request).__name__} with {type(reply).__name__}"
            raise SidecarFailed(wire.Failed(request.id, text))
        return reply

    def _map(self, buffer: Buffer) -> None:
        if buffer.fd < 0:
            raise ValueError("the buffer is closed")
        if buffer.key not in self._mapped:
            self._send(wire.MapBuffer(buffer.key, buffer.device), buffer.fd)
            self._mapped.add(buffer.key)
            buffer.watchers.add(self)

    def _send(self, message: msgspec.Struct, *fds: int) -> None:
        """Send a frame after those before it, as soon as the socket takes it."""
        body = wire.encode(message)
        owned = [os.dup(fd) for fd in fds]  # a buffer may be closed before it is sent
        self._unsent.append((memoryview(wire.frame_head(body, fds) + body), owned))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, fds = self._unsent[0]
                sent = socket.send_fds(self._sock, [data], fds)
                wire.close_all(fds)  # they went with the first byte
                self._unsent[0] = (data[sent:], [])
                if sent == len(data):
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
        except OSError as error:
            self._put_down(str(error))
        else:
            self._loop.remove_writer(self._sock)

    def _forget(self, key: int) -> None:
        if key in self._mapped and self.usable:
            self._mapped.discard(key)
            self._send(wire.ForgetBuffer(key))

    def _next_look(self) -> asyncio.TimerHandle:
        self._busy = bool(self._pending)
        delay = self._pulse.interval_s(self._loop.time(), busy=self._busy)
        return self._loop.call_later(delay, self._look)

    def _look_soon(self) -> None:
        """Look more often while a request is pending."""
        if not self._pulse.asked and not self._busy:
            self._busy = True
            self._timer.cancel()
            self._timer = self._next_look()

    def _look(self) -> None:
        match self._pulse.look(self._loop.time()):
            case "frozen":
                self._put_down(f"it gave no sign of life for {SILENCE_S:g} s and was killed")
                return
            case "ping":
                self._send(wire.Ping(next(self._numbers)))
        self._timer = self._next_look()

    def _readable(self) -> None:
        try:
            frames = self._frames.receive()
            if frames is None:
                raise ConnectionError("it died")
            for body, fds in frames:
                wire.close_all(fds)  # replies carry no descriptors
                self._take(wire.decode_reply(body))
        except OSError as error:
            self._loop.remove_reader(self._sock)
            self._put_down(str(error))  # also a process that has closed the channel without ending
            self._sock.close()

    def _take(self, reply: wire.Reply) -> None:
        self._life.ready()
        if isinstance(reply, wire.Pong):
            self._pulse.answered()
            if reply.moved is not None and self.on_moved is not None:
                self.on_moved(reply.moved)
            return
        if isinstance(reply, wire.Failed) and reply.over:
            self._reason = self._reason or reply.error
        future = self._pending.pop(reply.id, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _put_down(self, reason: str) -> None:
        """SIGKILL it if it still lives, and fail all pending requests."""
        self._reason = self._reason or reason
        if self.usable:
            self._life.give_up()
        if not self.dead:
            send_signal(self._pidfd, signal.SIGKILL)
        if self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock)
        self._timer.cancel()
        while self._unsent:
            wire.close_all(self._unsent.popleft()[1])
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(SidecarDied(self._end_text()))

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._life.ended(self._loop.time())
        self._gone.set()  # _readable still takes the replies sent before the end, then fails the rest
        self._timer.cancel()
        if self.on_exit is not None:
            self.on_exit(self._end_text())

    def _end_text(self) -> str:
        return f"sidecar {self.pid}: {self._reason or 'it died'}"


def _of_this_process(spec: GroupSpec) -> GroupSpec:
    """Use this process's GPU and NCCL variables: the forkserver's may be older."""
    changes: dict[str, Any] = {}
    if not spec.device and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        found = accelerator()
        changes["device"] = found.device() if found is not None else ""
    if spec.nccl_env is None:
        changes["nccl_env"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return msgspec.structs.replace(spec, **changes)

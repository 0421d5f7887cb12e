"""The rank's side of sidecars, for the asyncio loop of its session thread.

Theory of operation
===================

A :class:`Forkserver` makes :class:`Sidecar` objects; a sidecar has one process group. Requests are matched with replies by
number, so that a reply that comes after its caller gave up is dropped and never taken for another's. Deadlines are the
rank's business: a sidecar that does not answer by then is killed (a second after it should have given up by itself), as
it may be stuck in native code that knows no timeout. A sidecar's end is seen by pidfd, which no inherited socket delays.

Memory goes to a sidecar once, as a descriptor, and is unmapped there when its buffer is closed here. A slot that a sidecar
may be writing is safe to reuse only after :meth:`Sidecar.wait_dead`, or after the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

import replicas
from replicas.sidecar import wire
from replicas.sidecar.wire import CollectiveSpec, GroupSpec, TransferResult, TransferSpec
from replicas.weights.arena import Buffer

__all__ = [
    "CollectiveSpec",
    "Forkserver",
    "GroupSpec",
    "Sidecar",
    "SidecarDied",
    "SidecarFailed",
    "TransferResult",
    "TransferSpec",
]

KILL_GRACE_S = 1.0
"""A sidecar has its own timeouts; it is killed when it has not answered this much later."""

FORK_TIMEOUT_S = 4.0
"""A fork takes milliseconds: a forkserver that has not answered for so long is frozen, and is killed to be replaced."""

_CONNECT_INTERVAL_S = 0.02
_UCRED = struct.Struct("3i")

_R = TypeVar("_R")


class SidecarFailed(RuntimeError):
    """The sidecar said why it could not do it.

    :ivar over: its group is of no use any more, and it exits by itself; else the request was refused and nothing moved.
    """

    def __init__(self, message: str, *, over: bool = True) -> None:
        super().__init__(message)
        self.over = over


class SidecarDied(RuntimeError):
    """The sidecar, or the forkserver, is gone (killed at a deadline too)."""


class Forkserver:
    """A connection to the process that makes sidecars. Every sidecar of it ends with the connection."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._sock = sock
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._closed = ""
        self._children: list[Sidecar] = []
        self._unanswered_since: float | None = None
        self._pidfd = -1
        if process is None:
            pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            with contextlib.suppress(OSError):  # it is gone already, or in a pid namespace that we do not see
                self._pidfd = os.pidfd_open(pid)  # certainly the server's, once that has answered
        sock.setblocking(False)
        own = os.pidfd_open(os.getpid())
        try:
            wire.write_packet(sock, wire.Attach(), [own])
        finally:
            os.close(own)
        self._loop.add_reader(sock, self._read)

    @classmethod
    async def connect(cls, name: str, *, timeout_s: float = 30.0) -> Forkserver:
        """The forkserver that listens on the abstract socket ``name``; waits until it can fork.

        :raises SidecarDied: nobody listens there, or it has not loaded torch, after ``timeout_s``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect("\0" + name)
            except (ConnectionRefusedError, BlockingIOError):  # not there yet, or its backlog is full
                sock.close()
                if loop.time() >= deadline:
                    raise SidecarDied(f"no forkserver listens on {name!r} after {timeout_s:g} s") from None
                # Nothing announces that an abstract socket has appeared.
                await asyncio.sleep(_CONNECT_INTERVAL_S)
            except BaseException:
                sock.close()
                raise
            else:
                return await cls(sock)._attached(deadline - loop.time())

    @classmethod
    async def spawn(cls, *, timeout_s: float = 60.0) -> Forkserver:
        """A helper process of our own, which dies with us. Returns when it can fork (1.5-5 s: it loads torch).

        :raises SidecarDied: it did not come up within ``timeout_s``.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            home = str(Path(replicas.__file__).parent.parent)
            path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
            process = subprocess.Popen(  # noqa: ASYNC220  # returns as soon as the program was exec'ed
                [sys.executable, "-m", "replicas.sidecar.forkserver", "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        return await cls(ours, process)._attached(timeout_s)

    async def _attached(self, timeout_s: float) -> Forkserver:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except TimeoutError:
            await self.aclose()
            raise SidecarDied(f"the forkserver was not ready within {timeout_s:g} s") from None
        except BaseException:
            await self.aclose()
            raise
        return self

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return not self._closed

    async def fork(self, *, timeout_s: float = FORK_TIMEOUT_S) -> Sidecar:
        """A new sidecar.

        :raises SidecarDied: the forkserver is gone, or has not answered for ``timeout_s`` (it is killed then, also when
            an earlier call began that wait and was cancelled).
        :raises SidecarFailed: the system has no process left to give.
        """
        if self._closed:
            raise SidecarDied(self._closed)
        now = self._loop.time()
        self._unanswered_since = self._unanswered_since or now
        deadline = self._unanswered_since + timeout_s
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        future: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._pending[number] = future
        try:
            with theirs:
                wire.write_packet(self._sock, wire.Fork(number), [theirs.fileno()])
            await asyncio.wait((future,), timeout=max(0.1, deadline - now))
            if not future.done():
                self._kill(f"the forkserver did not answer within {timeout_s:g} s and was killed")
            pid, pidfd = await future
        except OSError as error:
            ours.close()
            raise SidecarDied(f"the forkserver is gone: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            self._pending.pop(number, None)
        sidecar = Sidecar(pid, pidfd, ours)
        self._children = [child for child in self._children if not child.dead]
        self._children.append(sidecar)
        return sidecar

    async def aclose(self) -> None:
        """Close the connection: its sidecars are killed, and a helper process of ours ends. Idempotent."""
        self._close("the forkserver connection was closed")
        for child in self._children:
            child.kill()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await _reap(process)

    def _kill(self, reason: str) -> None:
        """End the server itself, with all its sidecars; whoever started it starts another one."""
        if self._process is not None:
            self._process.kill()
        elif self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._close(reason)

    def close_in_child(self) -> None:
        """In a forked child of this process: drop the descriptors, so that the rank's end is seen at once."""
        for fd in (self._sock.detach(), self._pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _read(self) -> None:
        try:
            data, fds = wire.read_packet(self._sock)
        except BlockingIOError:
            return
        except OSError as error:
            self._close(f"the forkserver is gone: {error}")
            return
        if not data:
            self._close("the forkserver is gone")
            return
        reply = wire.decode_forkserver_reply(data)
        self._unanswered_since = None
        if isinstance(reply, wire.Attached):
            if not self._ready.done():
                self._ready.set_result(None)
            return
        future = self._pending.pop(reply.id, None)
        if future is None or future.done():
            wire.close_all(fds)  # too late: our end of its channel is closed, and it will exit
        elif isinstance(reply, wire.Forked):
            future.set_result((reply.pid, fds[0]))
        else:
            future.set_exception(SidecarFailed(f"a sidecar could not be forked: {reply.error}"))

    def _close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = reason
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not self._ready.done():
            self._ready.set_exception(SidecarDied(reason))
            self._ready.exception()  # whoever waits gets it; without a waiter it is no news
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SidecarDied(reason))
        self._pending.clear()


async def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was killed. Without a worker thread: at interpreter exit there are none any more."""
    if process.poll() is not None:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.wait()


class Sidecar:
    """One sidecar process, with at most one process group.

    :ivar pid: its process id.
    :ivar on_exit: called on the loop, once, with a reason, when it ends without :meth:`kill`.
    """

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        self.pid = pid
        self.on_exit: Callable[[str], None] | None = None
        self._pidfd = pidfd
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[wire.Reply]] = {}
        self._mapped: set[int] = set()
        self._sending = asyncio.Lock()
        self._dead = asyncio.Event()
        self._killed = False
        self._reason = ""
        sock.setblocking(False)
        self._loop.add_reader(pidfd, self._ended)
        self._reader = self._loop.create_task(self._read())

    @property
    def dead(self) -> bool:
        """Whether the process is confirmed dead."""
        return self._dead.is_set()

    async def build(self, spec: GroupSpec) -> float:
        """Form the process group. Returns seconds.

        :raises SidecarFailed: a peer did not come, or an address is wrong.
        :raises SidecarDied: it died, or was killed ``KILL_GRACE_S`` after ``spec.timeout_s``.
        """
        if spec.backend == "nccl" and not spec.device and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            spec = GroupSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"device": uuid})
        number = next(self._numbers)
        return (await self._ask(wire.BuildGroup(number, spec), (), spec.timeout_s, wire.Built)).seconds

    async def transfer(self, spec: TransferSpec, buffer: Buffer) -> TransferResult:
        """Move one version from or into ``buffer``. Errors as of :meth:`build`; a receiver's slot is undefined then."""
        request = wire.RunTransfer(next(self._numbers), buffer.key, spec)
        return (await self._ask(request, (buffer,), spec.timeout_s, wire.Transferred)).result

    async def collective(self, spec: CollectiveSpec, inputs: Buffer | None, outputs: Buffer | None) -> float:
        """Run one operation; see :func:`replicas.sidecar.collectives.run_collective`. Returns seconds. Errors as of build."""
        buffers = tuple(buffer for buffer in (inputs, outputs) if buffer is not None)
        first, second = (None if buffer is None else buffer.key for buffer in (inputs, outputs))
        request = wire.RunCollective(next(self._numbers), first, second, spec)
        return (await self._ask(request, buffers, spec.timeout_s, wire.Collected)).seconds

    def kill(self, reason: str = "killed") -> None:
        """SIGKILL. Whoever waits for a reply gets :class:`SidecarDied`; ``on_exit`` is not called."""
        self._killed = True
        self._reason = self._reason or reason
        if not self.dead:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._fail()

    async def wait_dead(self, timeout_s: float = 5.0) -> bool:
        """Whether the process is dead, which none of its memory accesses outlives; waits up to ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._dead.wait()
        return self.dead

    def buffer_closed(self, key: int) -> None:
        """A buffer that the sidecar has mapped was closed (on any thread): have it unmapped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the sidecar gone with it
            self._loop.call_soon_threadsafe(self._forget, key)

    def close_in_child(self) -> None:
        """In a forked child of this process: drop the descriptors, so that the rank's end is seen at once."""
        for fd in (self._sock.detach(), self._pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)

    async def _ask(self, request: Any, buffers: tuple[Buffer, ...], timeout_s: float, kind: type[_R]) -> _R:
        if self.dead or self._killed:
            raise SidecarDied(self._end_text())
        future: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._pending[request.id] = future
        try:
            async with asyncio.timeout(timeout_s + KILL_GRACE_S):
                async with self._sending:
                    for buffer in buffers:
                        await self._map(buffer)
                    await self._send(request)
                reply = await future
        except TimeoutError:
            self.kill(f"it did not answer within {timeout_s:g} s and was killed")
            raise SidecarDied(self._end_text()) from None
        except OSError as error:
            raise SidecarDied(f"sidecar {self.pid} is gone: {error}") from error
        finally:
            self._pending.pop(request.id, None)
        if isinstance(reply, wire.Failed):
            raise SidecarFailed(reply.error, over=reply.over)
        if not isinstance(reply, kind):
            raise SidecarFailed(f"sidecar {self.pid} answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    async def _map(self, buffer: Buffer) -> None:
        if buffer.fd < 0:
            raise ValueError("the buffer is closed")
        if buffer.key not in self._mapped:
            self._mapped.add(buffer.key)
            buffer.watchers.add(self)
            await self._send(wire.MapBuffer(buffer.key), (buffer.fd,))

    async def _send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """One frame; the caller holds the lock. A frame that is cut off by a cancellation ends the sidecar."""
        body = wire.encode(message)
        head = wire.frame_head(body, fds)
        sent = 0
        try:
            while not sent:
                try:
                    sent = socket.send_fds(self._sock, [head], list(fds))
                except BlockingIOError:
                    await self._writable()
            await self._loop.sock_sendall(self._sock, head[sent:] + body)
        except asyncio.CancelledError:
            self.kill("a request to it was cut off")
            raise

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            self._loop.remove_writer(self._sock)

    def _forget(self, key: int) -> None:
        if key in self._mapped and not self.dead and not self._killed:
            self._mapped.discard(key)
            self._background = self._loop.create_task(self._send_forget(key))

    async def _send_forget(self, key: int) -> None:
        with contextlib.suppress(OSError):  # it is ending, which unmaps everything
            async with self._sending:
                await self._send(wire.ForgetBuffer(key))

    async def _read(self) -> None:
        try:
            while True:
                head = await self._read_exactly(wire.HEAD_NBYTES)
                length, _ = wire.parse_head(head)
                reply = wire.decode_reply(await self._read_exactly(length))
                if isinstance(reply, wire.Failed) and reply.over:
                    self._reason = self._reason or reply.error
                future = self._pending.pop(reply.id, None)
                if future is not None and not future.done():
                    future.set_result(reply)
        except OSError as error:
            # As a rule the process has ended. One that closed its channel without ending is of no use: make it end.
            if not self.dead:
                self._reason = self._reason or str(error)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        finally:
            self._fail()
            async with self._sending:
                self._sock.close()

    async def _read_exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            chunk = await self._loop.sock_recv(self._sock, nbytes - len(data))
            if not chunk:
                raise ConnectionError("it died")
            data += chunk
        return bytes(data)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._dead.set()  # the reader still takes the replies that came before the end, and then fails the rest
        if not self._killed and self.on_exit is not None:
            self.on_exit(self._end_text())

    def _end_text(self) -> str:
        return f"sidecar {self.pid}: {self._reason or 'it died'}"

    def _fail(self) -> None:
        """No reply will come any more. The reader closes the socket, when it is sure that nobody uses it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SidecarDied(self._end_text()))
        self._pending.clear()

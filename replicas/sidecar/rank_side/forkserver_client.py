"""A rank's connection to a forkserver: reach or start it, and fork sidecars from it.

Theory of operation
===================

A :class:`Forkserver` is the connection to a forkserver, the node's or a helper process
of the rank's own, and makes :class:`~replicas.sidecar.rank_side.sidecar_handle.Sidecar`
objects; a sidecar has one process group. All run on the asyncio loop of the session
thread. Requests and replies are matched by number, so that a late reply, whose caller
gave up, is dropped. The end of a sidecar is detected by its pidfd, which no inherited
socket delays.

**Hung and frozen.** A sidecar whose group hangs still answers pings. It may be in
native code without a timeout, so it is killed when it has not answered a request one
second after its deadline. A frozen sidecar answers no ping: it is killed after two
seconds (:class:`~replicas.linux.helper_process.Pulse`), long before any
deadline, and its lane is replaced.

**Spare.** After :meth:`Forkserver.prefork`, a forkserver connection has one spare
sidecar, so that a lane does not wait for the fork. ``ps`` shows it as ``replica-spare``
until it builds a group.

Memory is sent to a sidecar once, as a descriptor, and is unmapped there when its buffer
is closed here. A slot that a sidecar may be writing is safe to reuse only after
``Sidecar.wait_dead``, or after the reply.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import tenacity

from replicas import __version__
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import is_set_within
from replicas.linux import frames, rank_environment
from replicas.linux.helpers import apart, python_module
from replicas.linux.processes import pid_of, send_signal
from replicas.linux.scarce import naming_limits
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.linux.stalls import LOOK_INTERVAL_S, StallWatch, work_of
from replicas.sidecar import wire
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed

logger = Log("replicas.sidecar")

FORK_TIMEOUT_S = 4.0
"""A fork takes milliseconds: a forkserver that is silent and idle for 4 s is frozen,
and is killed. A busy forkserver serves other ranks of the node first."""
BUSY_TIMEOUT_S = 20.0
"""Seconds for which a busy forkserver may give no answer."""
UNBOUND_S = 0.2
"""Seconds for which a rank waits until the forkserver's socket is bound."""
REAP_TIMEOUT_S = 5.0
"""Seconds to wait for the end of a killed process."""
HELPER_TRIES = 3
"""Number of helper processes to start, one after another, until one is ready."""


class Squatted(SidecarDied):
    """Another user's process listens on the forkserver's socket."""


class Unbound(SidecarDied):
    """The forkserver's socket is not bound."""


class OtherRelease(SidecarDied):
    """The forkserver runs another release of this library than the rank."""


class Forkserver:
    """Connection to a forkserver; its sidecars end with the connection."""

    def __init__(
        self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None, *, secret: str = ""
    ) -> None:
        self._sock = sock
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._closed = ""
        self._children: list[Sidecar] = []
        self._spare: Sidecar | None = None
        self._preforking: asyncio.Task[None] | None = None
        self._unanswered_since: float | None = None
        sock.setblocking(False)
        fds = [os.pidfd_open(os.getpid())]
        try:
            fds += [] if process is not None else rank_environment.describe_own_place()
            frames.write_packet(sock, wire.Attach(secret), fds)
        finally:
            frames.close_all(fds)
        self._pidfd = -1
        self._loop.add_reader(sock, self._read)

    @classmethod
    async def connect(cls, door: str, *, timeout_s: float = 30.0) -> Forkserver:
        """Connect to the forkserver at socket ``door``, and wait until it can fork.

        If the forkserver ends before it has answered (it froze while it started, and
        was killed), wait for its successor.

        :raises SidecarDied: no forkserver could fork within ``timeout_s``.
        :raises Unbound: the socket was not bound within ``UNBOUND_S``.
        :raises Squatted: another user's process listens.
        :raises OtherRelease: the forkserver does not serve this release.
        """
        address = SocketAddress.parse(door)
        return await cls._retrying(
            lambda: cls._connected(address, timeout_s),
            timeout_s,
            wait=tenacity.wait_exponential(multiplier=0.02, max=0.5, exp_base=1.3) + tenacity.wait_random(0, 0.01),
            stop=tenacity.stop_before_delay(timeout_s),
            retry=_may_come,
        )

    @classmethod
    async def spawn(cls, *, timeout_s: float = 60.0) -> Forkserver:
        """Start a helper process, which dies with this one, and wait until it can fork.

        That takes 1.5-5 s, as the helper loads torch. A helper that freezes or dies
        while it starts is replaced, up to ``HELPER_TRIES`` processes in all.

        :raises SidecarDied: no helper was ready within ``timeout_s``.
        """
        return await cls._retrying(
            lambda: cls(*_start_helper()),
            timeout_s,
            stop=tenacity.stop_after_attempt(HELPER_TRIES) | tenacity.stop_after_delay(timeout_s),
            retry=tenacity.retry_if_exception_type(SidecarDied),
            before_sleep=_log_retry,
        )

    @staticmethod
    async def _retrying(make: Callable[[], Forkserver], timeout_s: float, **policy: Any) -> Forkserver:
        """Make connections until one can fork, by tenacity's ``policy``; return it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async for attempt in tenacity.AsyncRetrying(reraise=True, **policy):
            with attempt:
                return await make()._attached(max(0.0, deadline - loop.time()), timeout_s)
        raise AssertionError  # tenacity ends with a result or an error

    @classmethod
    def _connected(cls, door: SocketAddress, timeout_s: float) -> Forkserver:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect("\0" + door.name)
            owner, us = peer_uid(sock), os.geteuid()
            if owner != us:  # nothing is sent yet: a forkserver gets writable weights
                raise Squatted(
                    f"the forkserver's socket {door.name!r} belongs to user {owner}, but this rank runs as user {us}: "
                    "nothing was sent; run the supervisor and its ranks as one user"
                )
            return cls(sock, secret=door.secret)
        except ConnectionRefusedError:
            sock.close()
            raise Unbound(
                f"no process listens on {door.name!r}: the agent of this node is gone, or the address is out of date"
            ) from None
        except (ConnectionError, BlockingIOError):  # the backlog is full
            sock.close()
            raise SidecarDied(f"no forkserver listens on {door.name!r} after {timeout_s:g} s") from None
        except BaseException:
            sock.close()
            raise

    async def _attached(self, remaining_s: float, timeout_s: float) -> Forkserver:
        """Wait for the first answer; kill our own helper if it stalls."""
        watch = None if self._process is None else StallWatch(self._process.pid, self._loop.time())
        try:
            async with asyncio.timeout(remaining_s):
                while not self._ready.done():
                    await asyncio.wait((self._ready,), timeout=LOOK_INTERVAL_S)
                    reason = watch.reason_to_give_up(self._loop.time(), starting=True) if watch is not None else ""
                    if reason and not self._ready.done():
                        self._kill(f"the forkserver {reason} while it started, and was killed")
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
        return not self._closed

    async def fork(self, *, timeout_s: float = FORK_TIMEOUT_S) -> Sidecar:
        """Return the spare sidecar if there is one, else a new one.

        :raises SidecarDied: the forkserver is gone, or has not answered for
            ``timeout_s`` (it is then killed, also if a cancelled call began that wait).
        :raises SidecarFailed: the system allows no more processes.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.usable and not self._closed:
            spare.on_exit = None
            return spare
        return await self._fork(timeout_s, kill=True)

    def prefork(self) -> None:
        """Start to fork a spare for the next :meth:`fork`, unless there is one."""
        if self._closed or self._preforking is not None or (self._spare is not None and self._spare.usable):
            return
        self._preforking = self._loop.create_task(self._prefork(), name="prefork")

    async def _prefork(self) -> None:
        try:
            self._spare = await self._fork(FORK_TIMEOUT_S, kill=False)
            self._spare.on_exit = lambda reason: logger.info("a spare sidecar ended: %s", reason)
        except (SidecarDied, SidecarFailed) as error:  # a later fork() raises its own error
            logger.info("cannot fork a spare sidecar: %s", error)
        finally:
            self._preforking = None

    async def _fork(self, timeout_s: float, *, kill: bool) -> Sidecar:
        """:param kill: kill an unanswering forkserver, and thus all of its sidecars."""
        if self._closed:
            raise SidecarDied(self._closed)
        now = self._loop.time()
        self._unanswered_since = self._unanswered_since or now
        due = max(now + 0.1, self._unanswered_since + timeout_s)
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        future: asyncio.Future[tuple[int, int]] = self._loop.create_future()
        self._pending[number] = future
        try:
            with theirs:
                frames.write_packet(self._sock, wire.Fork(number), [theirs.fileno()])
            await self._wait_answered(future, due, timeout_s)
            if not future.done():
                if not kill:
                    raise SidecarDied(f"the forkserver did not answer within {timeout_s:g} s")
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

    async def _wait_answered(self, future: asyncio.Future[Any], due: float, timeout_s: float) -> None:
        """Wait until ``due``, and longer while the forkserver works."""
        last = due + BUSY_TIMEOUT_S
        while True:
            before = self._work()
            await asyncio.wait((future,), timeout=due - self._loop.time())
            now = self._loop.time()
            paused_s = PauseClock(due).pause_at(now)  # perhaps of the forkserver, too
            last += paused_s
            if future.done() or not (paused_s or self._work() != before) or due >= last:
                return
            due = min(now + timeout_s, last)

    def _work(self) -> tuple[str, ...]:
        if self._process is not None:
            return work_of(self._process.pid)
        return work_of(pid_of(self._pidfd)) if self._pidfd >= 0 else ()

    async def aclose(self) -> None:
        """Close the connection; kill its sidecars and our own helper. Idempotent."""
        self._close("the forkserver connection was closed")
        if self._preforking is not None:
            await asyncio.wait((self._preforking,))
        for child in self._children:
            child.kill()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await _reap(process)

    def _kill(self, reason: str) -> None:
        """Kill the forkserver with all its sidecars; its starter replaces it."""
        if self._process is not None:
            self._process.kill()
        elif self._pidfd >= 0:
            send_signal(self._pidfd, signal.SIGKILL)
        self._close(reason)

    @property
    def fds(self) -> set[int]:
        """Descriptors that would hide the rank's end if a forked child kept them."""
        own = {self._sock.fileno(), self._pidfd} - {-1}
        return own if self._spare is None else own | self._spare.fds

    def _read(self) -> None:
        try:
            data, fds = frames.read_packet(self._sock)
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
        if isinstance(reply, wire.OtherRelease):
            if not self._ready.done():
                text = f"the node's forkserver is of release {reply.release} of replicas, this rank of {__version__}"
                self._ready.set_exception(OtherRelease(text))
            return
        if isinstance(reply, wire.Attached):
            if self._process is None and self._pidfd < 0 and fds:
                self._pidfd = fds.pop()
            frames.close_all(fds)
            if not self._ready.done():
                self._ready.set_result(None)
            return
        future = self._pending.pop(reply.id, None)
        if future is None or future.done():
            frames.close_all(fds)  # too late: the sidecar exits, as our end of its channel is closed
        elif isinstance(reply, wire.Forked):
            future.set_result((reply.pid, fds[0]))
        else:
            told = wire.Failed(reply.id, f"cannot fork a sidecar: {reply.error}")
            future.set_exception(SidecarFailed(told))

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
            self._ready.exception()  # mark as retrieved: there may be no waiter
        for future in self._pending.values():
            if not future.done():
                future.set_exception(SidecarDied(reason))
        self._pending.clear()


@naming_limits()
def _start_helper() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                python_module("replicas.sidecar.forkserver", "--fd", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                **apart(os.environ),
            )
    except BaseException:
        ours.close()
        raise
    return ours, process


def _may_come(state: tenacity.RetryCallState) -> bool:
    """Return True if a failed connection should be tried again.

    An agent binds its socket before ranks start, and holds it until it ends; the next
    agent has another socket. So a rank does not wait long for an unbound socket.
    """
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, Unbound):
        return (state.seconds_since_start or 0.0) < UNBOUND_S
    return isinstance(error, SidecarDied) and not isinstance(error, Squatted | OtherRelease)


def _log_retry(state: tenacity.RetryCallState) -> None:
    assert state.outcome is not None
    error, number = state.outcome.exception(), state.attempt_number + 1
    logger.warning("starting another forkserver (try %d of %d): %s", number, HELPER_TRIES, error)


async def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a killed process without a thread, which cannot start at exit."""
    if process.poll() is not None:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, ended.set)
    try:
        if not await is_set_within(ended, REAP_TIMEOUT_S):
            logger.warning("leaving process %d, which did not end within %g s of its kill", process.pid, REAP_TIMEOUT_S)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    process.poll()

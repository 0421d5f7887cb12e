"""A rank's connection to a forkserver: reach it, and fork sidecars from it.

Theory of operation
===================

A :class:`Forkserver` is the connection to a forkserver, the node's or one that this
process keeps (:mod:`replicas.sidecar.kept_forkserver`), and makes
:class:`~replicas.sidecar.rank_side.sidecar_handle.Sidecar` objects; a sidecar has one
process group. All run on the asyncio loop of the session thread. The end of a sidecar
is detected by its pidfd, which no inherited socket delays.

**Hung and frozen.** A sidecar whose group hangs still answers pings. It may be in
native code without a timeout, so it is killed when it has not answered a request one
second after its deadline. A frozen sidecar answers no ping: it is killed after two
seconds (:class:`~replicas.linux.helper_process.Pulse`), long before any
deadline, and its lane is replaced. A forkserver that hangs or is frozen is replaced by
its keeper, and never by a rank: a connection that waits too long for a fork ends, and
the next one waits until a forkserver accepts it.

**Spare.** After :meth:`Forkserver.prefork`, a forkserver connection has one spare
sidecar, so that a lane does not wait for the fork. ``ps`` shows it as ``replica-spare``
until it builds a group.

Memory is sent to a sidecar once, as a descriptor, and is unmapped there when its buffer
is closed here. A slot that a sidecar may be writing is safe to reuse only after
``Sidecar.wait_dead``, or after the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque

import tenacity

from replicas import __version__
from replicas.common.logs import Log
from replicas.common.patience import PauseClock
from replicas.common.tasks import result_of
from replicas.linux import frames, rank_environment
from replicas.linux.helper_process import HelperDied
from replicas.linux.sockets import SocketAddress, peer_uid
from replicas.sidecar import wire
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed

logger = Log("replicas.sidecar")

FORK_TIMEOUT_S = 20.0
"""A fork takes milliseconds, but a busy forkserver serves other ranks of the node
first."""


class Squatted(HelperDied):
    """Another user's process listens on the forkserver's socket."""


class Unusable(HelperDied):
    """The socket is not bound, or its forkserver runs another release than the rank."""


class Forkserver:
    """A rank's connection to a forkserver; its sidecars end with the connection."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over ``sock``, and read answers from it on the running loop."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._pending: deque[asyncio.Future[tuple[wire.ForkserverReply, list[int]]]] = deque()
        self._closed = ""
        self._children: list[Sidecar] = []
        self._spare: asyncio.Task[Sidecar] | None = None
        self._loop.add_reader(sock, self._read)

    @classmethod
    async def connect(cls, door: str, *, timeout_s: float = 30.0) -> Forkserver:
        """Connect to the forkserver at socket ``door``, and wait until it can fork.

        If the forkserver ends before it has answered (it froze while it started, and
        was killed), wait for its successor.

        :param door: its address, with the secret that it wants.
        :raises SidecarDied: no forkserver could fork within ``timeout_s``.
        :raises Unusable: none is there, or it does not serve this release.
        :raises Squatted: another user's process listens.
        """
        address = SocketAddress.parse(door)
        deadline = asyncio.get_running_loop().time() + timeout_s
        async for attempt in tenacity.AsyncRetrying(
            reraise=True,
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.5),
            stop=tenacity.stop_before_delay(timeout_s),
            retry=tenacity.retry_if_exception_type(SidecarDied),
        ):
            with attempt:
                return await cls(_connected(address))._attached(address.secret, deadline)
        raise AssertionError  # tenacity ends with a result or an error

    async def _attached(self, secret: str, deadline: float) -> Forkserver:
        """Send the secret and this rank's pidfd and output; wait until it can fork.

        Return this object, or close it and raise.

        :param deadline: by the loop's clock.
        :raises SidecarDied: the connection ended, or no answer came by the deadline.
        :raises Unusable: it runs another release.
        """
        place = rank_environment.describe_own_place()
        try:
            reply, _ = await self._ask(wire.Attach(secret), place, deadline - self._loop.time())
            if isinstance(reply, wire.OtherRelease):
                text = f"the node's forkserver is of release {reply.release} of replicas, this rank of {__version__}"
                raise Unusable(text)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def alive(self) -> bool:
        """True until the connection is closed, or found to be broken."""
        return not self._closed

    async def fork(self) -> Sidecar:
        """Return the spare sidecar if there is one; else fork one, and wait for it.

        The caller owns it, but it is killed with this connection.

        :raises SidecarDied: the forkserver is gone, or has not answered for
            ``FORK_TIMEOUT_S`` (this connection is then closed).
        :raises SidecarFailed: the system allows no more processes.
        """
        while True:
            self.prefork()
            spare = self._spare
            assert spare is not None
            await asyncio.wait((spare,))  # if this is cancelled, it stays the spare one
            if self._spare is spare:  # no other call has taken it
                self._spare = None
                return await spare

    def prefork(self) -> None:
        """Start a task that forks a spare sidecar for the next :meth:`fork`.

        Do not wait. Do nothing if there is a usable spare, or one is being forked. A
        failure is logged; the next call tries again.
        """
        forked = result_of(self._spare)
        if self._spare is None or (self._spare.done() and (forked is None or not forked.usable)):
            self._spare = self._loop.create_task(self._fork(), name="fork")
            self._spare.add_done_callback(_log_failure)

    async def _fork(self) -> Sidecar:
        """Have the forkserver fork a new sidecar; wait, and return its handle.

        :raises SidecarDied: the forkserver is gone, or has not answered in time.
        :raises SidecarFailed: the system allows no more processes.
        """
        ours, theirs = socket.socketpair()
        try:
            reply, fds = await self._ask(wire.Fork(), [theirs.detach()], FORK_TIMEOUT_S)
            if isinstance(reply, wire.ForkFailed):
                raise SidecarFailed(wire.Failed(0, f"cannot fork a sidecar: {reply.error}"))
        except BaseException:
            ours.close()
            raise
        assert isinstance(reply, wire.Forked)
        sidecar = Sidecar(reply.pid, fds[0], ours)
        self._children = [*(child for child in self._children if not child.dead), sidecar]
        return sidecar

    def close(self) -> None:
        """Close the connection, and kill its sidecars; do not wait. Idempotent.

        Calls that wait for the forkserver raise SidecarDied.
        """
        self._close("the forkserver connection was closed")
        for child in self._children:
            child.kill()

    @property
    def fds(self) -> set[int]:
        """Descriptors of this connection and the spare sidecar. A child that the rank
        forks must close them: else the forkserver does not see that the rank ended."""
        own, spare = {self._sock.fileno()} - {-1}, result_of(self._spare)
        return own if spare is None else own | spare.fds

    async def _ask(
        self, request: wire.ForkserverRequest, fds: list[int], timeout_s: float
    ) -> tuple[wire.ForkserverReply, list[int]]:
        """Send a request with the descriptors ``fds``, and close these; then wait.

        :returns: the reply, and descriptors that came with it, which the caller owns.
        :raises SidecarDied: the connection has ended, or was closed because no answer
            came within ``timeout_s``.
        """
        future: asyncio.Future[tuple[wire.ForkserverReply, list[int]]] = self._loop.create_future()
        try:
            if not self._closed:
                frames.write_packet(self._sock, request, fds)
        except OSError as error:
            self._close(f"the forkserver is gone: {error}")
        finally:
            frames.close_all(fds)
        if self._closed:
            raise SidecarDied(self._closed)
        self._pending.append(future)
        clock = PauseClock(self._loop.time() + timeout_s)
        await asyncio.wait((future,), timeout=timeout_s)
        if clock.measure_pause(self._loop.time()):  # perhaps of the forkserver, too
            await asyncio.wait((future,), timeout=timeout_s)
        if not future.done():
            self._close(f"the forkserver did not answer within {timeout_s:.3g} s")
        return await future

    def _read(self) -> None:
        """Read one packet, and give it to the oldest request; called by the loop.

        Closes the connection at its end, and at an answer without a request.
        """
        try:
            data, fds = frames.read_packet(self._sock)
            if not data:
                self._close("the forkserver is gone")
            elif self._pending:
                self._pending.popleft().set_result((wire.decode_forkserver_reply(data), fds))
            else:
                frames.close_all(fds)
                self._close("the forkserver answered a request that was not sent")
        except BlockingIOError:
            return
        except OSError as error:
            self._close(f"the forkserver is gone: {error}")

    def _close(self, reason: str) -> None:
        """Close the connection, once; fail the waiting calls with ``reason``."""
        if self._closed:
            return
        self._closed, self._spare = reason, None
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for future in self._pending:
            future.set_exception(SidecarDied(reason))
            future.exception()  # mark it as retrieved: its waiter may have been cancelled
        self._pending.clear()


def _connected(door: SocketAddress) -> socket.socket:
    """Return a connection to the forkserver at ``door``, to which nothing is sent yet.

    :raises SidecarDied: too many clients wait there.
    :raises Unusable: the socket is not bound.
    :raises Squatted: another user's process listens.
    """
    with contextlib.ExitStack() as failed:
        sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)
        try:
            sock.connect("\0" + door.name)
        except ConnectionRefusedError:
            text = "the agent of this node has died, or was replaced"
            raise Unusable(f"no forkserver listens on {door.name!r}: {text}") from None
        except (ConnectionError, BlockingIOError) as error:  # the backlog is full
            raise SidecarDied(f"no forkserver accepts connections to {door.name!r}: {error}") from None
        owner, us = peer_uid(sock), os.geteuid()
        if owner != us:  # nothing is sent yet: a forkserver gets writable weights
            raise Squatted(
                f"the forkserver's socket {door.name!r} belongs to user {owner}, but this rank runs as user {us}: "
                "nothing was sent; run the supervisor and its ranks as one user"
            )
        failed.pop_all()
    return sock


def _log_failure(forking: asyncio.Task[Sidecar]) -> None:
    """Log why the task ``forking`` could fork no sidecar; its done callback.

    :meth:`Forkserver.fork` raises the error, too.
    """
    if not forking.cancelled() and (error := forking.exception()) is not None:
        logger.info("going on without a helper process that could not be forked: %s", error)

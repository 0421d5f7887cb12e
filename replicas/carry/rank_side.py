"""The rank's handle of its carrier: starts, asks, watches and kills the process.

carrier = await Carrier.start(host); carrier.serve(...); await carrier.pull(...)
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from replicas import errors
from replicas.carry import wire
from replicas.common.logs import Log
from replicas.linux.helper_process import HelperDied, HelperProcess
from replicas.linux.helpers import apart, python_module
from replicas.linux.scarce import naming_limits
from replicas.messages import HolderAddress
from replicas.trust.certificate import certificate_hash

logger = Log("replicas.channel")

START_TIMEOUT_S = 30.0
"""Within this time a new carrier must listen."""
WITHDRAW_TIMEOUT_S = 5.0
"""Within this time a carrier must stop using the slot of an ended transfer."""

_R = TypeVar("_R")


class SlotMemory(Protocol):
    """Memory of a slot. ``watchers``: objects to notify when it is closed."""

    @property
    def fd(self) -> int: ...

    @property
    def key(self) -> int: ...

    watchers: Any


Lent = tuple[SlotMemory, tuple[int, int]]
"""Memory, and the offset and bytes of a version in it."""


class CarrierDied(HelperDied):
    """The carrier has died, or was killed at a deadline."""

    kind = "carrier"


class PullFailed(RuntimeError):
    """No holder is left. ``why``: by holder's name; ``cut``: those whose network path
    seems broken, and why."""

    def __init__(self, reply: wire.PullFailed) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in reply.why.items()) or "no holder serves it")
        self.why, self.received = reply.why, reply.received
        self.cut = cut_off(reply)


def cut_off(reply: wire.Pulled | wire.PullFailed) -> dict[str, str]:
    """Return the holders whose network path seems broken, and why."""
    return {name: reply.why[name] for name in reply.cut if name in reply.why}


class Carrier(HelperProcess):
    """A carrier process, with a method for each request.

    :ivar port: the port at which it listens.
    :ivar certificate_hash: of its TLS certificate; empty if it has none.
    """

    died, decode, ping = CarrierDied, staticmethod(wire.decode_reply), wire.Ping

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        self._serving: set[int] = set()
        super().__init__(pid, pidfd, sock)
        self.on_exit = self._exited
        self.port = 0
        self.certificate_hash = ""
        self._mapped: set[int] = set()
        self.receivers: dict[int, Callable[[int], object]] = {}
        """Callbacks by transfer, with the bytes pulled so far, after each pong."""
        self.ends: list[Callable[[], object]] = []
        """Callbacks on the loop when the process has ended."""
        self._listens: asyncio.Future[wire.Listening] = self._loop.create_future()

    @classmethod
    async def start(cls, host: str, port: int = 0) -> Carrier:
        """Start a carrier, and wait until it listens at ``host``.

        :param port: the first port that it tries; 0 means any.
        :raises CarrierDied: it cannot listen, or did not within ``START_TIMEOUT_S``;
            details are on its stderr.
        """
        ours, process = _spawn(host, port)
        carrier = cls(process.pid, os.pidfd_open(process.pid), ours)
        carrier.process = process
        try:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    listening = await carrier._listens
            except TimeoutError:
                text = f"it did not listen within {START_TIMEOUT_S:g} s and was killed"
                listening = wire.Listening(0, 0, text)
            if not listening.port:
                carrier.kill(listening.text)
                if await carrier.wait_dead():
                    process.wait()
                raise CarrierDied(f"carrier {carrier.pid}: {listening.text}")
        except BaseException:
            carrier.kill()
            raise
        if listening.text:
            logger.warning("carrier %d: %s", carrier.pid, listening.text)
        carrier.port = listening.port
        return carrier

    process: subprocess.Popen[bytes]

    @property
    def at_work(self) -> bool:
        """Whether the rank or other hosts wait for it, so that a freeze matters."""
        return bool(self._pending or self._serving)

    def kill(self, reason: str = "killed") -> None:
        super().kill(reason)
        self.on_exit = self._over

    def _exited(self, reason: str) -> None:
        logger.warning("%s", reason)
        self._over(reason)

    def _over(self, reason: str) -> None:
        for end in self.ends:
            end()

    def certify(self, pem: bytes) -> None:
        """Send the carrier its key and certificate, once, before any encrypted use."""
        self.certificate_hash = certificate_hash(pem)
        if self.usable:
            self._send(wire.Certify(pem))

    def serve(
        self,
        transfer: int,
        secret: bytes,
        memory: SlotMemory,
        place: tuple[int, int],
        filled: int,
        base: Lent | None = None,
        regions: Sequence[tuple[int, int, int]] = (),
        *,
        encrypt: bool = False,
    ) -> None:
        """Have a version served. ``place``: offset and bytes. Never waits.

        :param base: an older version that pullers may have, for deltas.
        :param regions: (first byte, end, bytes of an element) of parts of the version.
        """
        if self.usable:
            self._map(memory)
            self._serving.add(transfer)
            self._look_soon()
            where = wire.Place(memory.key, *place)
            self._send(wire.Serve(transfer, secret, where, filled, self._lent(base), tuple(regions), encrypt))

    def filled(self, transfer: int, nbytes: int) -> None:
        """Send how many bytes of the version are packed. Never waits."""
        if self.usable:
            self._send(wire.Filled(transfer, nbytes))

    async def pull(
        self,
        transfer: int,
        secret: bytes,
        memory: SlotMemory,
        place: tuple[int, int],
        holders: Sequence[HolderAddress],
        timeout_s: float,
        source: str = "",
        digest: str = "",
        base: Lent | None = None,
        *,
        encrypt: bool = False,
        numbers: tuple[int, ...] = (),
    ) -> wire.Pulled:
        """Have a version pulled, or resumed if called again with the same memory.

        :param base: an older version that holders may have, for deltas.
        :param numbers: as in :class:`wire.StartPull`.
        :raises PullFailed: no holder is left, or the time was up.
        :raises CarrierDied: it died.
        """
        number, where, given = next(self._numbers), wire.Place(memory.key, *place), tuple(holders)
        old = None if base is None else wire.Place(base[0].key, *base[1])
        self._serving.add(transfer)  # the bytes received, until it is withdrawn
        request = wire.StartPull(
            number, transfer, secret, where, given, timeout_s, source, digest, old, encrypt, numbers
        )

        def map_both() -> None:
            self._map(memory)
            self._lent(base)

        return await self._ask(request, timeout_s, wire.Pulled, map_both)

    async def drop_base(self, transfer: int) -> None:
        """Stop making deltas; when this returns, the carrier does not read the base.

        :raises CarrierDied: it died, and does not read the base either.
        """
        await self._ask(wire.DropBase(next(self._numbers), transfer), WITHDRAW_TIMEOUT_S, wire.Dropped, lambda: None)

    async def withdraw(self, transfer: int, why: str) -> int:
        """End the transfer; return the bytes sent. The carrier no longer uses its slot.

        :raises CarrierDied: it died, and does not use the slot either.
        """
        request = wire.Withdraw(next(self._numbers), transfer, why)
        self._serving.discard(transfer)
        return (await self._ask(request, WITHDRAW_TIMEOUT_S, wire.Withdrawn, lambda: None)).sent_nbytes

    def buffer_closed(self, key: int) -> None:
        """Have the carrier unmap memory that was closed here (on any thread)."""
        self._loop.call_soon_threadsafe(self._unmap_slot, key)

    def _unmap_slot(self, key: int) -> None:
        if key in self._mapped and self.usable:
            self._mapped.discard(key)
            self._send(wire.ForgetSlot(key))

    def _lent(self, base: Lent | None) -> wire.Place | None:
        if base is None:
            return None
        self._map(base[0])
        return wire.Place(base[0].key, *base[1])

    def _map(self, memory: SlotMemory) -> None:
        if memory.key not in self._mapped:
            self._send(wire.MapSlot(memory.key), memory.fd)
            self._mapped.add(memory.key)
            memory.watchers.add(self)

    def _checked(self, reply: Any, request: Any, kind: type[_R]) -> _R:
        if isinstance(reply, wire.PullFailed):
            raise PullFailed(reply)
        if isinstance(reply, wire.Refused):
            raise errors.InternalError(f"carrier {self.pid}: {reply.text}")
        if not isinstance(reply, kind):
            text = f"carrier {self.pid} answered {type(request).__name__} with {type(reply).__name__}"
            raise errors.InternalError(text)
        return reply

    def _answers_ping(self, reply: wire.Reply) -> bool:
        if isinstance(reply, wire.Listening) and not self._listens.done():
            self._listens.set_result(reply)
            return True
        if isinstance(reply, wire.Pong):
            for transfer, nbytes in reply.received.items():
                if (receiver := self.receivers.get(transfer)) is not None:
                    receiver(nbytes)
            return True
        return False


@naming_limits()
def _spawn(host: str, port: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            ends = ("--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            options = (*ends, "--host", host, "--port", str(port))
            command = python_module("replicas.carry.carrier", *options)
            return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], **apart(os.environ))
    except BaseException:
        ours.close()
        raise

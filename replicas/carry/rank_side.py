"""One carrier, as its rank uses it."""

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
"""In which a new carrier must listen."""
WITHDRAW_TIMEOUT_S = 5.0
"""In which nobody may use a slot any more whose transfer has ended."""

_R = TypeVar("_R")


class Watched(Protocol):
    """Memory of a slot. ``watchers``: told when it is closed."""

    @property
    def fd(self) -> int: ...

    @property
    def key(self) -> int: ...

    watchers: Any


Lent = tuple[Watched, tuple[int, int]]
"""Memory, and the offset and bytes of a version in it."""


class CarrierDied(HelperDied):
    """The carrier is dead, or was killed at a deadline."""

    kind = "carrier"


class PullFailed(RuntimeError):
    """No holder is left. ``why``: for each one, by its name; ``cut``: those to whom
    nothing gets through, as it seems."""

    def __init__(self, reply: wire.PullFailed) -> None:
        super().__init__("; ".join(f"{name}: {text}" for name, text in reply.why.items()) or "nobody serves it")
        self.why, self.received = reply.why, reply.received
        self.cut = cut_off(reply)


def cut_off(reply: wire.Pulled | wire.PullFailed) -> dict[str, str]:
    """The holders to whom nothing gets through, as it seems, and why."""
    return {name: reply.why[name] for name in reply.cut if name in reply.why}


class Carrier(HelperProcess):
    """A carrier process: a method for each request.

    :ivar port: where it listens.
    :ivar certificate_hash: of the certificate that it shows; empty: it has none.
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
        """Told, for each transfer that is pulled, the bytes so far, now and then."""
        self.ends: list[Callable[[], object]] = []
        """Called on the loop when it has ended."""
        self._listens: asyncio.Future[wire.Listening] = self._loop.create_future()

    @classmethod
    async def start(cls, host: str, port: int = 0) -> Carrier:
        """Start one that listens at ``host``.

        :param port: the first one that it tries; 0: any.
        :raises CarrierDied: it cannot listen, or did not within ``START_TIMEOUT_S``;
            its own words are on stderr.
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
        """Others wait for what it serves: one that is frozen is replaced soon."""
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
        """Give it a key and its certificate, once, before what is encrypted."""
        self.certificate_hash = certificate_hash(pem)
        if self.usable:
            self._send(wire.Certify(pem))

    def serve(
        self,
        transfer: int,
        secret: bytes,
        memory: Watched,
        place: tuple[int, int],
        filled: int,
        base: Lent | None = None,
        regions: Sequence[tuple[int, int, int]] = (),
        *,
        encrypt: bool = False,
    ) -> None:
        """Serve a version. ``place``: offset and bytes. Never waits.

        :param base: a version that pullers may have, to make deltas of.
        :param regions: where elements of which size are in the version.
        """
        if self.usable:
            self._map(memory)
            self._serving.add(transfer)
            self._look_soon()
            where = wire.Place(memory.key, *place)
            self._send(wire.Serve(transfer, secret, where, filled, self._lent(base), tuple(regions), encrypt))

    def filled(self, transfer: int, nbytes: int) -> None:
        """So many bytes of it are packed. Never waits."""
        if self.usable:
            self._send(wire.Filled(transfer, nbytes))

    async def pull(
        self,
        transfer: int,
        secret: bytes,
        memory: Watched,
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
        """Pull a version; again, with the same memory: go on with these holders.

        :param base: a version that holders may have, to take deltas to.
        :param numbers: of the transfer at each holder; none: as here.

        :raises PullFailed: no holder is left, or the time was up.
        :raises CarrierDied: it died.
        """
        number, where, given = next(self._numbers), wire.Place(memory.key, *place), tuple(holders)
        old = None if base is None else wire.Place(base[0].key, *base[1])
        self._serving.add(transfer)  # what has come, until it is withdrawn
        request = wire.StartPull(
            number, transfer, secret, where, given, timeout_s, source, digest, old, encrypt, numbers
        )

        def map_both() -> None:
            self._map(memory)
            self._lent(base)

        return await self._ask(request, timeout_s, wire.Pulled, map_both)

    async def drop_base(self, transfer: int) -> None:
        """Have no more deltas made; nobody reads the base afterwards.

        :raises CarrierDied: it died; then nobody does either.
        """
        await self._ask(wire.DropBase(next(self._numbers), transfer), WITHDRAW_TIMEOUT_S, wire.Dropped, lambda: None)

    async def withdraw(self, transfer: int, why: str) -> int:
        """End the transfer; return the bytes sent. Nobody uses its slot afterwards.

        :raises CarrierDied: it died; then nobody does either.
        """
        request = wire.Withdraw(next(self._numbers), transfer, why)
        self._serving.discard(transfer)
        return (await self._ask(request, WITHDRAW_TIMEOUT_S, wire.Withdrawn, lambda: None)).sent_nbytes

    def buffer_closed(self, key: int) -> None:
        """Have the carrier unmap memory that was closed here (on any thread)."""
        self._loop.call_soon_threadsafe(self._forget, key)

    def _forget(self, key: int) -> None:
        if key in self._mapped and self.usable:
            self._mapped.discard(key)
            self._send(wire.ForgetSlot(key))

    def _lent(self, base: Lent | None) -> wire.Place | None:
        if base is None:
            return None
        self._map(base[0])
        return wire.Place(base[0].key, *base[1])

    def _map(self, memory: Watched) -> None:
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

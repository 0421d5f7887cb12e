"""The rank's handle of its carrier: starts, asks, watches and kills the process.

carrier = await Carrier.start(host); carrier.serve(...); await carrier.pull(...)
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from replicas import errors
from replicas.carry import wire
from replicas.common.logs import Log
from replicas.linux.helper_process import HelperDied, HelperMemory, HelperProcess
from replicas.linux.helpers import popen_arguments, python_module
from replicas.linux.scarce import naming_limits
from replicas.messages import HolderAddress
from replicas.trust.certificate import certificate_hash

logger = Log("replicas.channel")

START_TIMEOUT_S = 30.0
"""Within this time a new carrier must listen."""
WITHDRAW_TIMEOUT_S = 5.0
"""Within this time a carrier must stop using the slot of an ended transfer."""

_R = TypeVar("_R")


Lent = tuple[HelperMemory, tuple[int, int]]
"""Memory, and the offset and bytes of a version in it."""


class CarrierDied(HelperDied):
    """The carrier has died, or was killed at a deadline."""

    kind = "carrier"


class PullFailed(RuntimeError):
    """No holder is left.

    :ivar why: reasons by holder's name; ``received``: bytes by holder's name.
    :ivar cut: reasons by name of those holders whose network path seems broken.
    """

    def __init__(self, reply: wire.PullFailed) -> None:
        """Make the exception from the carrier's reply, whose fields it takes."""
        super().__init__("; ".join(f"{name}: {text}" for name, text in reply.why.items()) or "no member can send it")
        self.why, self.received = reply.why, reply.received
        self.cut = cut_off(reply)


def cut_off(reply: wire.Pulled | wire.PullFailed) -> dict[str, str]:
    """Return ``{holder's name: reason}`` of holders whose network path seems broken.

    :param reply: the carrier's message at the end of a pull.
    """
    return {name: reply.why[name] for name in reply.cut if name in reply.why}


class Carrier(HelperProcess):
    """The rank's handle of its carrier (transfer process): a method for each request.

    :ivar port: the port at which it listens.
    :ivar certificate_hash: of its TLS certificate; empty if it has none.
    """

    died, decode = CarrierDied, staticmethod(wire.decode_reply)
    lend = staticmethod(lambda memory: wire.MapSlot(memory.key))
    ping, forget = wire.Ping, wire.ForgetSlot

    def __init__(self, pid: int, pidfd: int, sock: socket.socket) -> None:
        """Take over a started carrier process; watch it on the running loop.

        :param pidfd: of the process. :param sock: connected to it. Both are closed at
            its end.
        """
        self._serving: set[int] = set()
        super().__init__(pid, pidfd, sock)
        self.on_exit = self._exited
        self.port = 0
        self.certificate_hash = ""
        self.receivers: dict[int, Callable[[int], object]] = {}
        """Callbacks by transfer, with the bytes pulled so far, after each pong."""
        self.ends: list[Callable[[], object]] = []
        """Callbacks on the loop when the process has ended."""
        self._listens: asyncio.Future[wire.Listening] = self._loop.create_future()

    @classmethod
    async def start(cls, host: str, port: int = 0) -> Carrier:
        """Start a carrier process, and wait until it listens at ``host``.

        :param host: IP address of this member.
        :param port: the first port that it tries; 0 means any.
        :raises CarrierDied: it cannot listen, or did not within ``START_TIMEOUT_S``; it
            is killed, and details are on its stderr.
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
                raise CarrierDied(f"transfer process {carrier.pid} (carrier) cannot start: {listening.text}")
        except BaseException:
            carrier.kill()
            raise
        if listening.text:
            logger.warning("trying other ports for transfer process %d: %s", carrier.pid, listening.text)
        carrier.port = listening.port
        return carrier

    process: subprocess.Popen[bytes]

    @property
    def at_work(self) -> bool:
        """True if a request is open or a transfer served: then it is pinged often."""
        return bool(self._pending or self._serving)

    def kill(self, reason: str = "killed") -> None:
        """Kill the process by SIGKILL; do not wait. Pending requests raise CarrierDied.

        The callbacks in :attr:`ends` are called when it has ended.

        :param reason: text for these errors.
        """
        super().kill(reason)
        self.on_exit = self._call_ends

    def _exited(self, reason: str) -> None:
        """Log that the process ended unasked, and call the callbacks in ``ends``.

        Called on the loop, with the reason for the log.
        """
        logger.warning("%s", reason)
        self._call_ends(reason)

    def _call_ends(self, reason: str) -> None:
        """Call all callbacks of :attr:`ends`, after the process has ended.

        Ignore the reason.
        """
        for end in self.ends:
            end()

    def certify(self, pem: bytes) -> None:
        """Send the carrier its private key and certificate, and set
        :attr:`certificate_hash`; do not wait.

        Call it once, before the first encrypted transfer. Nothing is sent to a carrier
        that has died.

        :param pem: both, as PEM text.
        """
        self.certificate_hash = certificate_hash(pem)
        if self.usable:
            self._send(wire.Certify(pem))

    def serve(
        self,
        transfer: int,
        secret: bytes,
        memory: HelperMemory,
        place: tuple[int, int],
        filled: int,
        base: Lent | None = None,
        regions: Sequence[tuple[int, int, int]] = (),
        *,
        encrypt: bool = False,
    ) -> None:
        """Have the carrier serve a version to pullers that know ``secret``. No wait.

        It does so until :meth:`withdraw`. Does nothing if the carrier has died.

        :param transfer: the transfer's number, by which pullers name it.
        :param memory: the memory of the version, which the carrier maps.
        :param place: (offset, bytes) of the version in ``memory``.
        :param filled: bytes of it that are there already.
        :param base: an older version that pullers may have, for deltas.
        :param regions: (first byte, end, bytes of an element) of parts of the version.
        :param encrypt: over TLS only.
        """
        if self.usable:
            for one in (memory,) if base is None else (memory, base[0]):
                self._memories.map(one)
            self._serving.add(transfer)
            self._look_soon()
            where, old = wire.Place(memory.key, *place), _place_of(base)
            self._send(wire.Serve(transfer, secret, where, filled, old, tuple(regions), encrypt))

    def filled(self, transfer: int, nbytes: int) -> None:
        """Tell the carrier that the version's first ``nbytes`` are packed. No wait.

        Does nothing if the carrier has died.

        :param transfer: number of the transfer that serves the version.
        """
        if self.usable:
            self._send(wire.Filled(transfer, nbytes))

    async def pull(
        self,
        transfer: int,
        secret: bytes,
        memory: HelperMemory,
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
        """Have the carrier pull a version into ``memory``; wait for the end, and return
        the carrier's report: digest, seconds, bytes by holder, holders given up.

        Called again with the same memory, it resumes the pull. The carrier serves what
        has arrived to other hosts, too, until :meth:`withdraw`, also after PullFailed.

        :param transfer: the transfer's number. ``secret``: known to all its members.
        :param place: (offset, bytes) of the version in ``memory``.
        :param holders: carriers that have the version, in order of preference.
        :param source: address to connect from; "" means any.
        :param digest: of the version; "" if not known yet.
        :param base: an older version that holders may have, for deltas.
        :param encrypt: pull and serve over TLS only.
        :param numbers: the transfer's number at each holder; empty if it is
            ``transfer``.
        :raises PullFailed: no holder is left, or the time was up.
        :raises InternalError: the carrier refused: ``memory`` is too small, or cannot
            be mapped.
        :raises CarrierDied: the carrier died, or was killed as it did not answer.
        """
        number, where, given = next(self._numbers), wire.Place(memory.key, *place), tuple(holders)
        old = _place_of(base)
        self._serving.add(transfer)  # the bytes received, until it is withdrawn
        request = wire.StartPull(
            number, transfer, secret, where, given, timeout_s, source, digest, old, encrypt, numbers
        )
        memories = (memory,) if base is None else (memory, base[0])
        return await self._ask(request, timeout_s, wire.Pulled, *memories)

    async def drop_base(self, transfer: int) -> None:
        """Have the carrier stop making deltas; wait until it does not read the base.

        The base is the older version that the deltas are computed against. The carrier
        still serves the transfer, as bytes and by deltas that exist.

        :raises CarrierDied: the carrier is dead or killed, and reads nothing more.
        """
        await self._ask(wire.DropBase(next(self._numbers), transfer), WITHDRAW_TIMEOUT_S, wire.Dropped)

    async def withdraw(self, transfer: int, why: str) -> int:
        """Have the carrier end the transfer; wait until it does not use its memory.

        Return how many bytes it sent to all pullers. The memory stays mapped.

        :param why: the reason, for the error of a pull that is ended by this.
        :raises CarrierDied: the carrier is dead or killed, and uses the memory no more.
        """
        request = wire.Withdraw(next(self._numbers), transfer, why)
        self._serving.discard(transfer)
        return (await self._ask(request, WITHDRAW_TIMEOUT_S, wire.Withdrawn)).sent_nbytes

    def _failure(self, reply: Any, text: str) -> Exception:
        """Return (do not raise) the error for a reply that is not the one asked for.

        It is PullFailed for a pull that failed, InternalError for other replies.

        :param text: of the InternalError, unless the carrier gave a reason.
        """
        if isinstance(reply, wire.PullFailed):
            return PullFailed(reply)
        return errors.InternalError(f"carrier {self.pid}: {reply.text}" if isinstance(reply, wire.Refused) else text)

    def _answers_ping(self, reply: wire.Reply) -> bool:
        """Handle a Pong or the carrier's first message (which ends the wait of
        :meth:`start`), and return True.

        Of a Pong, pass the received bytes of each transfer to its callback in
        :attr:`receivers`. Return False for other replies, which answer a request.
        """
        if isinstance(reply, wire.Listening) and not self._listens.done():
            self._listens.set_result(reply)
            return True
        if isinstance(reply, wire.Pong):
            for transfer, nbytes in reply.received.items():
                if (receiver := self.receivers.get(transfer)) is not None:
                    receiver(nbytes)
            return True
        return False


def _place_of(base: Lent | None) -> wire.Place | None:
    """Return the place of an older version for a message; None if ``base`` is None."""
    return None if base is None else wire.Place(base[0].key, *base[1])


@naming_limits()
def _spawn(host: str, port: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a carrier process; return our end of its channel, and the process.

    :param host: IP address at which it listens. :param port: first port that it tries.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            ends = ("--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
            options = (*ends, "--host", host, "--port", str(port))
            command = python_module("replicas.carry.carrier", *options)
            return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], **popen_arguments(os.environ))
    except BaseException:
        ours.close()
        raise

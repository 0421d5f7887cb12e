"""The carrier: the process beside a rank that serves its slots, and pulls into them.

    python -m replicas.carry.carrier --fd N --parent PID --host ADDRESS [--port PORT]

The main thread reads requests, accepts connections and answers pings; it never waits
for a peer, the disk or a lock that a peer holds. Each connection and each pull has its
own thread. The process does not import torch. It exits when its channel closes or its
rank ends (a forked child of the rank may keep the channel open); if it is stopped
(SIGSTOP) at that moment, the kernel kills it.

Without a free descriptor the carrier keeps using its connections, and tries to accept
again every :data:`REST_S`.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from replicas.carry import endpoint, wire
from replicas.carry.differences import DeltaChoice, Deltas
from replicas.carry.holders import Holder
from replicas.carry.image import Image
from replicas.carry.pull import Failed, Pull
from replicas.carry.serve import Server
from replicas.common.logs import end_process
from replicas.linux import frames
from replicas.linux.processes import die_with_parent, name_process
from replicas.trust.certificate import certificate_hash, context_of

_END = select.POLLHUP | select.POLLRDHUP | select.POLLERR
_BACKLOG = 1024
REST_S = 0.1
"""Pause in accepting connections after a failure."""


class Slot:
    """The memory of a slot (place of one version): its file's descriptor, mappings."""

    def __init__(self, fd: int) -> None:
        """Take over descriptor ``fd`` of a slot's file; map nothing yet."""
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._mapped: dict[int, mmap.mmap] = {}

    @property
    def memory(self) -> mmap.mmap:
        """The whole file of the slot, mapped for writing on first use."""
        return self._map(mmap.ACCESS_WRITE)

    def _map(self, access: int) -> mmap.mmap:
        """Return the slot's mapping with this access, made on first use.

        :param access: ``mmap.ACCESS_READ`` or ``mmap.ACCESS_WRITE``.
        """
        if access not in self._mapped:
            self._mapped[access] = mmap.mmap(self.fd, 0, access=access)
        return self._mapped[access]

    def view(self, place: wire.Place) -> memoryview:
        """Return a read-only view of the bytes at ``place``, mapped on first use.

        A view that is in use keeps the mapping when the slot is closed.
        """
        return memoryview(self._map(mmap.ACCESS_READ))[place.offset : place.offset + place.nbytes]

    def image(self, place: wire.Place, *, full: bool = False, mapped: bool = False) -> Image:
        """Return a new :class:`Image` of the bytes at ``place``.

        :param full: all bytes are there already; else none is.
        :param mapped: also map the bytes into memory, to serve them over TLS.
        :raises ValueError: the slot is too small.
        """
        if place.offset + place.nbytes > self.nbytes:
            raise ValueError(f"the slot has {self.nbytes} bytes, not {place.offset + place.nbytes}")
        return Image(self.fd, place.offset, place.nbytes, full=full, data=self.view(place) if mapped else None)

    def close(self) -> None:
        """Unmap and close the memory; a view that is in use keeps its mapping."""
        for mapped in self._mapped.values():
            with contextlib.suppress(BufferError):  # a transfer's view goes with its last reference
                mapped.close()
        os.close(self.fd)


class Carrier:
    """Serves and pulls versions at its rank's requests; runs long ones on threads."""

    def __init__(self, channel: socket.socket, listener: socket.socket) -> None:
        """Keep both sockets; read and accept nothing yet (:func:`serve` does).

        :param channel: connected to the rank; replies go there.
        :param listener: the socket at which pullers connect.
        """
        self._channel = channel
        self._writing = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._images: dict[int, Image] = {}
        self._pulls: dict[int, Pull] = {}
        self._deltas: dict[int, Deltas] = {}
        self._choice = DeltaChoice()
        self._trips: dict[str, float] = {}
        self.server = Server(listener, _start)

    def handle(self, request: wire.Request, fds: list[int]) -> None:
        """Main thread: carry out a request, or start a thread for it; never wait.

        Replies go to the rank, now or later, by :meth:`reply`. An exception is meant to
        end this process.

        :param fds: descriptors that came with it, owned by this call.
        """
        match request:
            case wire.MapSlot(key=key):
                self._slots[key] = Slot(fds[0])
            case wire.ForgetSlot(key=key):
                if (slot := self._slots.pop(key, None)) is not None:
                    slot.close()
            case wire.Certify(pem=pem):
                self.server.certify(context_of(pem), certificate_hash(pem))
            case wire.Serve():
                self._serve(request)
            case wire.Filled(transfer=transfer, nbytes=nbytes):
                if (known := self._images.get(transfer)) is not None:
                    known.mark_present(0, nbytes)
            case wire.StartPull():
                self._start_pull(request)
            case wire.DropBase(id=number, transfer=transfer):
                _start(lambda: self._drop_base(number, transfer))
            case wire.Withdraw():
                self._withdraw(request)
            case wire.Ping(id=number):
                going_on = {
                    transfer: pull.received.landed_nbytes for transfer, pull in self._pulls.items() if pull.active
                }
                self.reply(wire.Pong(number, going_on))

    def reply(self, message: wire.Reply) -> None:
        """Any thread: send a message to the rank; block while its socket is full."""
        with self._writing:
            frames.write_frame(self._channel, message)

    def _serve(self, request: wire.Serve) -> None:
        """Main thread: offer a version to pullers on other hosts, until its withdrawal.

        If the request names a base (an older version), also offer deltas against it.

        :raises KeyError, ValueError: a slot is unknown, or too small.
        """
        transfer, place, filled, base = request.transfer, request.place, request.filled, request.base
        slot = self._slots[place.key]
        image = slot.image(place, full=filled == place.nbytes, mapped=request.encrypt)
        self._images[transfer] = image
        image.mark_present(0, filled)
        deltas = None
        if base is not None:
            old, new = self._slots[base.key].view(base), slot.view(place)
            self._deltas[transfer] = deltas = Deltas(image.nbytes, old, new, request.regions)
        self.server.offer(transfer, image, request.secret, deltas, encrypt=request.encrypt)

    def _drop_base(self, number: int, transfer: int) -> None:
        """On a thread: make no further deltas for a transfer; stop reading its base.

        Blocks until no thread reads the base, the older version; then replies Dropped.
        The base's slot stays mapped.

        :param number: the request's id.
        """
        if (deltas := self._deltas.pop(transfer, None)) is not None:
            deltas.release_base()
        self.reply(wire.Dropped(number))

    def _start_pull(self, request: wire.StartPull) -> None:
        """Start or resume the pull that ``request`` asks for, on a thread; do not wait.

        Its bytes are also offered to other hosts as they arrive. If it cannot start,
        reply Refused.
        """
        transfer, pull = request.transfer, self._pulls.get(request.transfer)
        if pull is None:
            try:
                slot = self._slots[request.place.key]
                image, memory = slot.image(request.place, mapped=request.encrypt), slot.memory
                base = None
                if request.base is not None and request.holders and self._choice.choose_delta(request.holders[0].host):
                    base = self._slots[request.base.key].view(request.base)
            except (KeyError, ValueError, OSError) as error:
                self.reply(wire.Refused(request.id, str(error)))
                return
            encrypt = request.encrypt
            pull = Pull(image, memory, transfer, request.secret, request.source, base, self._trips, encrypt=encrypt)
            self._pulls[transfer], self._images[transfer] = pull, image
            self.server.offer(transfer, image, request.secret, pull.received.deltas, encrypt=encrypt)
        _start(lambda: self._run(pull, request))

    def _run(self, pull: Pull, request: wire.StartPull) -> None:
        """Run the pull on this thread; block until it ends, then reply Pulled or
        PullFailed. After either, the received bytes are still served.

        :param request: the rank's request, with the holders and the time limit.
        """
        began = time.monotonic()
        numbers = request.numbers or (request.transfer,) * len(request.holders)
        holders = [
            Holder(one.name, one.host, one.port, one.certificate_hash, number)
            for one, number in zip(request.holders, numbers, strict=True)
        ]
        received = pull.received
        try:
            digest = pull.run(holders, began + request.timeout_s, _start, request.digest)
        except Failed as error:
            self.reply(wire.PullFailed(request.id, error.why, dict(received.nbytes), tuple(pull.holders.cut)))
            return
        seconds, nbytes, why = time.monotonic() - began, received.image.nbytes, pull.holders.why
        if not why and holders and received.landed_nbytes == nbytes:
            by_delta = received.base is not None
            self._choice.record_pull(holders[0].host, by_delta=by_delta, nbytes=nbytes, seconds=seconds)
        counts, wrong, cut = dict(received.nbytes), dict(received.wrong), tuple(pull.holders.cut)
        self.reply(wire.Pulled(request.id, digest, seconds, counts, received.again, dict(why), wrong, cut))

    def _withdraw(self, request: wire.Withdraw) -> None:
        """End the transfer of ``request``, on a new thread.

        The thread replies to the rank when no thread uses the slot.
        """
        pull = self._pulls.pop(request.transfer, None)
        self._images.pop(request.transfer, None)
        deltas = self._deltas.pop(request.transfer, None)

        def end() -> None:
            """Stop the pull and the connections, release the base; reply Withdrawn."""
            if pull is not None:
                pull.stop(request.why)
            sent = self.server.withdraw(request.transfer, request.why)
            if deltas is not None:
                deltas.release_base()
            if pull is not None:
                pull.received.release_base()
            self.reply(wire.Withdrawn(request.id, sent))

        _start(end)


def _start(function: Callable[[], None]) -> None:
    """Run ``function`` on a new daemon thread.

    An exception in it is printed, and ends this process with status 1.

    :raises RuntimeError: this process can have no more threads.
    """

    def run() -> None:
        """Call the function.

        Print an exception of it, and end the process with status 1.
        """
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # the rank would wait in vain for a dead thread
            _print_error(error)
            end_process(1)

    threading.Thread(target=run, daemon=True).start()


def _print_error(error: BaseException) -> None:
    """Print one line about ``error`` on stderr."""
    print(f"replicas: carrier {os.getpid()} ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def serve(channel: socket.socket, listener: socket.socket, pidfd: int) -> None:
    """Serve the rank at the other end of ``channel`` until it closes or the rank ends.

    Blocks this thread; longer requests run on threads that are started here. At its
    return these may still run, and all sockets are open: the caller ends the process.

    :param listener: socket at which pullers connect.
    :param pidfd: of the rank's process, whose end is noticed by it.
    :raises ConnectionError: a request came with a wrong number of descriptors.
    """
    carrier, reader = Carrier(channel, listener), frames.FrameReader(channel)
    poller = select.poll()
    poller.register(channel, select.POLLIN | _END)
    poller.register(pidfd, select.POLLIN)
    poller.register(listener, select.POLLIN)
    rests = False
    while True:
        found = poller.poll(int(REST_S * 1000) if rests else None)
        if rests:
            poller.register(listener, select.POLLIN)
            rests = False
        for fd, event in found:
            if fd == pidfd or (fd == channel.fileno() and event & _END):
                return
            if fd == listener.fileno():
                if not carrier.server.accept():
                    poller.unregister(listener)
                    rests = True
                continue
            came = reader.receive()
            if came is None:
                return
            for body, fds in came:
                request = wire.decode_request(body)
                if len(fds) != isinstance(request, wire.MapSlot):
                    raise ConnectionError(f"a {type(request).__name__} came with {len(fds)} descriptors")
                carrier.handle(request, fds)


def main() -> None:
    """Listen for other hosts at ``--host``, report the port to the rank, and carry its
    versions until the rank closes its socket or ends.

    Does not return: ends this process then, with status 1 after an error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    name_process(endpoint.NAME)
    die_with_parent(options.parent)
    channel = socket.socket(fileno=options.fd)
    try:
        listener, warning = endpoint.listen(options.host, options.port, _BACKLOG)
    except OSError as error:
        frames.write_frame(channel, wire.Listening(0, 0, error.strerror or str(error)))
        end_process(1)
    listener.setblocking(False)
    frames.write_frame(channel, wire.Listening(0, listener.getsockname()[1], warning))
    try:
        serve(channel, listener, os.pidfd_open(options.parent))
    except BaseException as error:  # noqa: BLE001  # print the cause; the rank starts another carrier
        _print_error(error)
        end_process(1)
    end_process(0)  # without joining threads, which may be busy with peers


if __name__ == "__main__":
    main()

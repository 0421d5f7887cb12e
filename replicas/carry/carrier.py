"""The carrier: the process beside a rank that serves its slots, and pulls into them.

    python -m replicas.carry.carrier --fd N --parent PID --host ADDRESS [--port PORT]

The main thread never waits for a peer, the disk or a lock that a peer holds: it reads
requests, accepts connections and answers pings. Each connection and each pull has a
thread of its own. The process has no torch, and is ended by the end of its channel, or
of its rank (a forked child of the rank may keep the channel open); one that is stopped
(SIGSTOP) then, by the kernel.

Out of descriptors it serves and pulls over the connections that it has, and looks again
every :data:`REST_S` whether it can take more.
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

from replicas.carry import wire
from replicas.carry.holders import Holder
from replicas.carry.image import Image
from replicas.carry.pull import Failed, Pull
from replicas.carry.serve import Server
from replicas.common.logs import end_process
from replicas.linux import frames
from replicas.linux.processes import die_with_parent, name_process

_END = select.POLLHUP | select.POLLRDHUP | select.POLLERR
_BACKLOG = 256
REST_S = 0.1
"""Before connections are accepted again after that has failed."""


class Slot:
    """The memory of a slot: one descriptor and one mapping, for all its transfers."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._memory: mmap.mmap | None = None

    @property
    def memory(self) -> mmap.mmap:
        """Mapped for writing, when it is first pulled into; else it is only read."""
        if self._memory is None:
            self._memory = mmap.mmap(self.fd, 0)
        return self._memory

    def image(self, place: wire.Place, *, full: bool = False) -> Image:
        if place.offset + place.nbytes > self.nbytes:
            raise ValueError(f"the slot has {self.nbytes} bytes, not {place.offset + place.nbytes}")
        return Image(self.fd, place.offset, place.nbytes, full=full)

    def close(self) -> None:
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # a pull's view goes with its last reference
                self._memory.close()
        os.close(self.fd)


class Carrier:
    """What the rank has asked for, and the threads that do it."""

    def __init__(self, channel: socket.socket, listener: socket.socket) -> None:
        self._channel = channel
        self._writing = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._images: dict[int, Image] = {}
        self._pulls: dict[int, Pull] = {}
        self.server = Server(listener, _start)

    def handle(self, request: wire.Request, fds: list[int]) -> None:
        """Do it, or start a thread that does; never wait. Takes over ``fds``."""
        match request:
            case wire.MapSlot(key=key):
                self._slots[key] = Slot(fds[0])
            case wire.ForgetSlot(key=key):
                if (slot := self._slots.pop(key, None)) is not None:
                    slot.close()
            case wire.Serve(transfer=transfer, secret=secret, place=place, filled=filled):
                image = self._slots[place.key].image(place, full=filled == place.nbytes)
                image.fill(0, filled)
                self._images[transfer] = image
                self.server.offer(transfer, image, secret)
            case wire.Filled(transfer=transfer, nbytes=nbytes):
                if (known := self._images.get(transfer)) is not None:
                    known.fill(0, nbytes)
            case wire.StartPull():
                self._start_pull(request)
            case wire.Expect(transfer=transfer, digests=digests):
                if (pull := self._pulls.get(transfer)) is not None:
                    pull.expect(digests)
            case wire.Withdraw():
                self._withdraw(request)
            case wire.Ping(id=number):
                going_on = {transfer: pull.received_nbytes for transfer, pull in self._pulls.items() if pull.active}
                self.reply(wire.Pong(number, going_on))

    def reply(self, message: wire.Reply) -> None:
        with self._writing:
            frames.write_frame(self._channel, message)

    def _start_pull(self, request: wire.StartPull) -> None:
        transfer, pull = request.transfer, self._pulls.get(request.transfer)
        if pull is None:
            try:
                slot = self._slots[request.place.key]
                image, memory = slot.image(request.place), slot.memory
            except (KeyError, ValueError, OSError) as error:
                self.reply(wire.Refused(request.id, str(error)))
                return
            pull = Pull(image, memory, transfer, request.secret, request.source)
            self._pulls[transfer], self._images[transfer] = pull, image
            self.server.offer(transfer, image, request.secret)
        _start(lambda: self._run(pull, request))

    def _run(self, pull: Pull, request: wire.StartPull) -> None:
        began = time.monotonic()
        holders = [Holder(one.name, one.host, one.port) for one in request.holders]
        try:
            digest = pull.run(holders, began + request.timeout_s, _start)
        except Failed as error:
            self.reply(wire.PullFailed(request.id, error.why, dict(pull.received), tuple(pull.cut)))
            return
        seconds = time.monotonic() - began
        received, why, cut = dict(pull.received), dict(pull.why), tuple(pull.cut)
        self.reply(wire.Pulled(request.id, digest, seconds, received, pull.again, why, cut))

    def _withdraw(self, request: wire.Withdraw) -> None:
        pull = self._pulls.pop(request.transfer, None)
        self._images.pop(request.transfer, None)

        def end() -> None:
            if pull is not None:
                pull.stop(request.why)
            sent = self.server.withdraw(request.transfer, request.why)
            self.reply(wire.Withdrawn(request.id, sent))

        _start(end)


def _start(function: Callable[[], None]) -> None:
    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # a carrier with a dead thread would be waited for in vain
            _tell(error)
            end_process(1)

    threading.Thread(target=run, daemon=True).start()


def _tell(error: BaseException) -> None:
    print(f"carrier {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def serve(channel: socket.socket, listener: socket.socket, pidfd: int) -> None:
    """Serve the rank at the other end of ``channel`` until it ends."""
    carrier, reader = Carrier(channel, listener), frames.FrameReader(channel)
    carrier.reply(wire.Listening(0, listener.getsockname()[1]))
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    name_process("replicas-carry")
    die_with_parent(options.parent)
    channel = socket.socket(fileno=options.fd)
    listener = socket.create_server((options.host, options.port), family=_family(options.host), backlog=_BACKLOG)
    listener.setblocking(False)
    try:
        serve(channel, listener, os.pidfd_open(options.parent))
    except BaseException as error:  # noqa: BLE001  # its rank starts another one; what ended this one is told
        _tell(error)
        end_process(1)
    end_process(0)  # at once: threads may be at work for peers


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


if __name__ == "__main__":
    main()

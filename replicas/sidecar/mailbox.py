"""Mailbox: the sidecar's end of its channel to the rank; requests in, replies out.

Theory of operation
===================

While the main thread is idle, it reads the channel itself, without a hand-over between
threads. While it handles a request it may be stuck inside Gloo, NCCL or a store client
for any time. So a second thread, the *watch*, checks ten times a second whether the
main thread has been busy for :data:`BUSY_S`, and then reads the channel in its place:
it answers each :class:`~replicas.sidecar.wire.Ping` immediately and queues every other
request. When the main thread has finished, it interrupts the watch and reads again. An
idle sidecar has no periodic wake-ups.

The watch needs the GIL, so every call of the main thread must release it; calls that do
not (pre-faulting memory, :func:`replicas.weights.memory.mappings._populate`) are made
in small steps.

The reading thread ends the process as soon as the channel ends or the rank is dead. (It
also watches the rank's pidfd, because a forked child of the rank may keep the channel
open.) Both are watched even while a request is half read. There is one ping at a time,
and replies are small, so that a write never waits for the rank to read.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from replicas.common.logs import end_process
from replicas.linux import frames
from replicas.sidecar import wire
from replicas.sidecar.traffic import Traffic

BUSY_S = 0.1
QUIET_LOOKS = 50
"""Idle polls (of 0.1 s) after which the watch sleeps until the next request."""
_POLL_END = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class Mailbox:
    """A sidecar's end of its socket to the rank: receives requests and sends replies.

    :param pidfd: of the rank at the other end of ``channel``.
    :ivar traffic: progress of the main thread's current request, sent with each pong.
    """

    def __init__(self, channel: socket.socket, pidfd: int) -> None:
        """Start the watch: a thread that reads the channel while this one is busy.

        :param channel: socket to the rank; read and written here, never closed.
        :param pidfd: of the rank's process.
        """
        self._channel = channel
        self._pidfd = pidfd
        self._frames = frames.FrameReader(channel)
        self._requests: queue.SimpleQueue[tuple[wire.Request, list[int]]] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self.traffic = Traffic()
        self._interrupt = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._working = threading.Event()
        self._busy_since: float | None = None
        self._poller = self._new_poller()
        threading.Thread(target=self._or_end, args=(self._watch_for_interrupt,), name="mailbox", daemon=True).start()

    def get(self) -> tuple[wire.Request, list[int]]:
        """Main thread: wait for the next request; return it with its descriptors.

        The caller owns these. Ends the process when the rank or the channel is gone.
        """
        self._busy_since = None
        self._read_until(lambda: not self._requests.empty())
        self._busy_since = time.monotonic()
        if not self._working.is_set():
            self._working.set()
        return self._requests.get_nowait()

    def reply(self, message: wire.Reply) -> None:
        """Any thread: send a reply to the rank; block until it is written.

        :raises OSError: the channel has ended.
        """
        with self._writing:
            frames.write_frame(self._channel, message)

    def _read_until(self, found: Callable[[], bool]) -> None:
        """Main thread: have the watch thread stop reading, and read the channel here
        until ``found()`` returns True; then the watch thread continues."""
        if not self._reading.acquire(blocking=False):
            os.eventfd_write(self._interrupt, 1)
            self._reading.acquire()

        def read() -> None:
            """Wait for data, and handle it, until ``found()``."""
            while not found():
                self._read(self._poller.poll())

        self._or_end(read)
        self._reading.release()

    def _new_poller(self) -> select.poll:
        """Return a poller of the channel and the rank's pidfd."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._channel, select.POLLIN | _POLL_END)
        return poller

    def _read(self, events: list[tuple[int, int]]) -> None:
        """Queue incoming requests, and answer pings; the caller holds the reading lock.

        Ends the process if the rank or the channel is gone.

        :param events: (descriptor, poll event) pairs that have come.
        :raises ConnectionError: a request came with the wrong number of descriptors.
        """
        for fd, event in events:
            if fd == self._pidfd or event & _POLL_END:
                end_process(0)
        frames = self._frames.receive()
        if frames is None:
            end_process(0)
        for body, fds in frames:
            request = wire.decode_request(body)
            if len(fds) != isinstance(request, wire.MapBuffer):
                raise ConnectionError(f"a {type(request).__name__} came with {len(fds)} descriptors")
            match request:
                case wire.Ping(id=number):
                    self.reply(wire.Pong(number, self.traffic.progress()))
                case _:
                    self._requests.put((request, fds))

    @staticmethod
    def _or_end(do: Callable[[], None]) -> None:
        """Run ``do``; if it raises anything, end this process.

        An OSError, by which the channel failed, is printed before.
        """
        code = 1
        try:
            do()
            code = 0
        except OSError as error:
            print(f"replicas: helper process (sidecar) {os.getpid()} ends: {error}", file=sys.stderr, flush=True)
        finally:
            if code:
                end_process(code)

    def _watch_for_interrupt(self) -> None:
        """The watch thread's function: read the channel while the main thread is busy.

        Never returns.
        """
        poller = self._new_poller()
        poller.register(self._interrupt, select.POLLIN)
        ticker = select.poll()  # polls nothing: a timer
        while True:
            self._working.wait()
            quiet = 0
            while quiet < QUIET_LOOKS:
                ticker.poll(BUSY_S * 1000)
                since = self._busy_since
                quiet = quiet + 1 if since is None else 0
                if since is not None and time.monotonic() - since >= BUSY_S and self._reading.acquire(blocking=False):
                    try:
                        while self._interrupt not in (events := dict(poller.poll())):
                            self._read(list(events.items()))
                        os.eventfd_read(self._interrupt)
                    finally:
                        self._reading.release()
            self._working.clear()
            if self._busy_since is not None:  # a request has just begun
                self._working.set()

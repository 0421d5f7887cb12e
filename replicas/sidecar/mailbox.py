"""The sidecar's end of its channel, read by a thread of its own.

Theory of operation
===================

The main thread may be stuck inside Gloo, NCCL or a store client for as long as it likes, so another thread reads the
channel: it answers each :class:`~replicas.sidecar.wire.Ping` at once and queues every other request for the main thread. It
needs Python's lock for that, so whatever the main thread calls must release it; what does not (pre-faulting memory,
:func:`replicas.weights.arena._populate`) is done in small steps.

The same thread ends the process at once when the channel ends or the rank is dead (its pidfd; a forked child of the rank
may keep the channel open). Both are watched while a request is half read. Pings are one at a time, and replies are small,
so that a write never waits for the rank to read.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading

from replicas.sidecar import wire

__all__ = ["Mailbox"]

_POLL_END = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class Mailbox:
    """Requests in, replies out. ``pidfd`` is of the rank at the other end of ``channel``."""

    def __init__(self, channel: socket.socket, pidfd: int) -> None:
        self._channel = channel
        self._pidfd = pidfd
        self._frames = wire.FrameReader(channel)
        self._requests: queue.SimpleQueue[tuple[wire.Request, list[int]]] = queue.SimpleQueue()
        self._writing = threading.Lock()
        threading.Thread(target=self._run, name="mailbox", daemon=True).start()

    def get(self) -> tuple[wire.Request, list[int]]:
        """The next request and its descriptors, which are the caller's from now on; waits for it."""
        return self._requests.get()

    def reply(self, message: wire.Reply) -> None:
        with self._writing:
            wire.write_frame(self._channel, message)

    def _run(self) -> None:
        """Read until the end, which is the end of the process."""
        code = 1
        try:
            self._read_all()
            code = 0
        except OSError as error:
            print(f"sidecar {os.getpid()}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _read_all(self) -> None:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._channel, select.POLLIN | _POLL_END)
        while True:
            events = dict(poller.poll())
            if self._pidfd in events or events.get(self._channel.fileno(), 0) & _POLL_END:
                return
            frames = self._frames.receive()
            if frames is None:
                return
            for body, fds in frames:
                self._take(wire.decode_request(body), fds)

    def _take(self, request: wire.Request, fds: list[int]) -> None:
        if isinstance(request, wire.Ping):
            self.reply(wire.Pong(request.id))
        else:
            self._requests.put((request, fds))

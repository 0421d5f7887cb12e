"""Lines for people on the supervisor's stderr, which must never hold up its event loop.

A terminal that is stopped (Ctrl-S, the scroll mode of tmux), a paused pager or a
journal that stalls takes no more, for as long as it likes. So a thread of its own
writes, from a queue; what does not fit is left out, counted, and said once there is
room. It is all in the events.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from replicas.common.foreign import hanging, lines

__all__ = ["Console"]

_LINES = 1000


class Console:
    """:param descriptor: where lines go; its mode is left alone, as others share it."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._queue: queue.Queue[bytes] = queue.Queue(_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """One line (or several, of which the others are indented), with the time of
        day. Never waits."""
        self.write(f"{time.strftime('%H:%M:%S')} replicas: {hanging(text)}")

    def write(self, text: str) -> None:
        """Lines of printable characters. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="console", daemon=True)
            self._thread.start()
        dropped = self._dropped
        note = f"({dropped} lines before this one are left out: nobody took them)\n" if dropped else ""
        try:
            self._queue.put_nowait(f"{note}{lines(text)}\n".encode())
        except queue.Full:
            self._dropped += 1
        else:
            self._dropped -= dropped

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, but no longer than that. False: something is
        left."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Have it show what loggers say, unless this process has set up something else
        for that."""
        root = logging.getLogger()
        handler = _Handler(self) if not root.handlers else None
        if handler is not None:
            root.addHandler(handler)
        try:
            yield
        finally:
            if handler is not None:
                root.removeHandler(handler)

    def _run(self) -> None:
        while True:
            data = self._queue.get()
            try:
                self._put(data)
            except OSError:
                continue  # the terminal is gone, or its disk is full: the run goes on, and the events are on disk
            finally:
                self._queue.task_done()

    def _put(self, data: bytes) -> None:
        """Not by :data:`sys.stderr`: a thread that hangs in it would have the
        interpreter fail at its end."""
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody else has made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


class _Handler(logging.Handler):
    """Warnings and worse, with the time as all other lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.say(self.format(record))
        except Exception:  # noqa: BLE001  # what every handler does: a message that cannot be formatted ends nothing
            self.handleError(record)

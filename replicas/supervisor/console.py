"""Write human-readable lines to stderr from a thread, never blocking the event loop.

A stopped terminal (Ctrl-S, the scroll mode of tmux), a paused pager or a stalled
journal can block a writer indefinitely. So a thread writes, from a bounded queue. Lines
that do not fit are dropped and counted, and the count is printed when there is room.
The event file is complete.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from replicas.common import logs
from replicas.common.background_queue import BackgroundQueue
from replicas.common.foreign import hanging, lines


class Console:
    """Line output to a descriptor, whose mode is not changed, as others share it."""

    def __init__(self, descriptor: int = 2) -> None:
        """Write to this descriptor, stderr by default.

        The first line starts the thread that writes all of them.
        """
        self._descriptor = descriptor
        self._lines: BackgroundQueue[str] = BackgroundQueue("console", self._show, self._missing)

    def say(self, text: str) -> None:
        """Queue a line with the time of day (local time), and indent its further lines.

        Never waits. The console's thread prints it, or drops and counts it if the queue
        is full.
        """
        self.write(f"{time.strftime('%H:%M:%S')} replicas: {hanging(text)}")

    def write(self, text: str) -> None:
        """Queue text as lines of printable characters, without a time. Never waits."""
        self._lines.put(text)

    def flush(self, timeout_s: float) -> bool:
        """Block until all queued lines are written, or for ``timeout_s``.

        Return True if all are written.
        """
        return self._lines.flush(timeout_s)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Print logged warnings and errors on this console during the block.

        Does so only if the root logger has no handler yet. At the end, also after an
        error, flush the queued log records and remove the handler again.
        """
        root = logging.getLogger()
        handler = _Handler(self) if not root.handlers else None
        if handler is not None:
            root.addHandler(handler)
        try:
            yield
        finally:
            logs.flush()
            if handler is not None:
                root.removeHandler(handler)

    def _missing(self, count: int) -> None:
        """Print a note in the place of ``count`` lines that a full queue has dropped.

        Blocks; on the console's thread.
        """
        self._show(f"({count} lines before this one were dropped: the output was blocked)")

    def _show(self, text: str) -> None:
        """Write the text as lines to the descriptor, and ignore errors. Blocks.

        Runs in the console's thread only.
        """
        with suppress(
            OSError
        ):  # the terminal is gone, or its disk is full: the run continues, and the events are on disk
            self._put(f"{lines(text)}\n".encode())

    def _put(self, data: bytes) -> None:
        """Write all bytes to the descriptor. Blocks.

        Does not use :data:`sys.stderr`, as a hang in it blocks the exit.
        """
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process that shares it made it non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


class _Handler(logging.Handler):
    """Prints logged warnings and errors as lines of a console."""

    def __init__(self, console: Console) -> None:
        """Handle warnings and errors as lines of ``console``; install nothing."""
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the formatted record as a line of the console. Never waits."""
        try:
            self._console.say(self.format(record))
        except Exception:  # noqa: BLE001  # as every handler: an unformattable message must not raise
            self.handleError(record)

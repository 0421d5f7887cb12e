"""Fold progress bars: turn a process's output into the lines of its log.

Pure: bytes in, bytes out, the time is an argument. Lines are kept as they are, byte for
byte, whatever their encoding. Output that a terminal would have overwritten is folded:

* a redrawn line (``12%\\r13%\\r14%\\n``) is logged in its last state; ``\\r\\n`` ends a
  line;
* the latest state of a growing bar, which has no end of line yet, is logged every
  ``BAR_INTERVAL_S``;
* lines that move the cursor up (nested bars) are frames of one picture: one frame per
  ``BAR_INTERVAL_S``, and the last one.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

BAR_INTERVAL_S = 10.0
"""Interval at which a growing progress bar is logged, in seconds."""
_UP = re.compile(rb"\x1b\[\d*A")


class Folded(NamedTuple):
    """Complete lines, each with its end, and the number of consumed bytes."""

    lines: bytes
    used: int


class Folder:
    """Turns one output stream into log lines, redrawn ones in their last state."""

    def __init__(self) -> None:
        """Begin a stream, without a line or bar kept back."""
        self._frame = b""
        self._frame_at = float("-inf")
        self._bar = b""
        self._bar_at = math.inf
        self._shown = b""

    @property
    def due(self) -> float:
        """When :meth:`take_due_lines` has lines to return; inf for never."""
        frame_at = self._frame_at if self._frame else math.inf
        return min(frame_at, self._bar_at if self._bar else math.inf) + BAR_INTERVAL_S

    def fold(self, data: bytes, now: float) -> Folded:
        """Fold all complete lines of ``data``; leave an unfinished last line unused.

        :param data: the bytes that the previous call did not use, and new ones.
        :param now: time of a steady clock, in seconds.
        :returns: the text for the log, and how many bytes of ``data`` are done with.
        """
        end = data.rfind(b"\n") + 1
        lines = data[:end]
        if b"\r" in lines or self._frame or _UP.search(lines):
            lines = b"".join(self._line(line, now) for line in lines.split(b"\n")[:-1])
        if end:
            self._bar, self._bar_at, self._shown = b"", math.inf, b""
        return Folded(lines, end + self._look_at_bar(data, end, now))

    def _line(self, line: bytes, now: float) -> bytes:
        """Return the log's text for a complete line, or b"" if it is not logged now.

        A line that redraws nested bars (moves the cursor up) is kept if one was logged
        less than 10 s ago; :meth:`take_due_lines` or a later line returns it. A bar's
        state that was logged before is not logged again.
        """
        is_frame = _UP.search(line) is not None
        shown, self._shown = self._shown, b""
        text = _last_state(line)
        if not is_frame:
            frame, self._frame = self._frame, b""
            again = shown and text == shown
            return frame + (b"" if again else text + b"\n")
        text = _UP.sub(b"", text)
        if now - self._frame_at < BAR_INTERVAL_S:
            self._frame = text + b"\n"
            return b""
        self._frame, self._frame_at = b"", now
        return text + b"\n"

    def _look_at_bar(self, data: bytes, start: int, now: float) -> int:
        """Keep the last state of the unfinished line, in case it is a progress bar.

        :param start: where the unfinished line starts in ``data``.
        :return: how many bytes from there are states that were overwritten.
        """
        last = data.rfind(b"\r", start)
        if last < 0:
            return 0
        while last > start and data[last - 1 : last] == b"\r":
            last -= 1
        if last == start:  # only a \r at the end, which \n may follow
            return 0
        begin = data.rfind(b"\r", start, last) + 1 or start
        self._bar = data[begin:last]
        self._bar_at = min(self._bar_at, now)
        return begin - start

    def take_due_lines(self, now: float) -> bytes:
        """Return the lines that are due now, as text for the log, or b"" for none.

        They are a progress bar's new state, and the last kept line of nested bars.
        """
        lines = b""
        if self._frame and now >= self._frame_at + BAR_INTERVAL_S:
            lines, self._frame, self._frame_at = self._frame, b"", now
        if self._bar and now >= self._bar_at + BAR_INTERVAL_S:
            self._bar_at = now
            if self._bar != self._shown:
                self._shown = self._bar
                lines += self._bar + b"\n"
        return lines

    def finish(self, data: bytes) -> bytes:
        """End the stream, and return the rest of its text for the log.

        That is the kept line of nested bars, and ``data``, the unfinished last line.
        """
        frame, self._frame = self._frame, b""
        shown, self._shown = self._shown, b""
        text = _last_state(data)
        self._bar, self._bar_at = b"", math.inf
        return frame + (text + b"\n" if text and text != shown else b"")


def _last_state(line: bytes) -> bytes:
    """Return the last state of a redrawn line: its text after the last ``\\r``."""
    if b"\r" in line:
        line = line.rstrip(b"\r")
        return line[line.rfind(b"\r") + 1 :]
    return line

"""From what a process wrote to the lines that go into its log. Pure: bytes in, bytes
out, the time is an argument.

Lines are kept as they are, byte for byte, whatever their encoding. What a terminal
would have overwritten is folded:

* of a line that was drawn again and again (``12%\\r13%\\r14%\\n``) the last state is
  kept; ``\\r\\n`` ends a line;
* of a bar that is still growing, which has no end of line yet, the latest state is
  logged every ``BAR_INTERVAL_S``;
* lines that move the cursor up again (nested bars) are pictures of one and the same
  thing: one in ``BAR_INTERVAL_S``, and the last one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["BAR_INTERVAL_S", "Folded", "Folder"]

BAR_INTERVAL_S = 10.0
"""How often a growing progress bar is logged."""
_UP = re.compile(rb"\x1b\[\d*A")


class Folded(NamedTuple):
    """``lines``: complete lines, each with its end; ``used``: how many bytes of the
    input are done with."""

    lines: bytes
    used: int


class Folder:
    """The state of one stream. A stream's input is given again, from the first byte
    that was not yet used."""

    def __init__(self) -> None:
        self._frame = b""
        self._frame_at = float("-inf")
        self._bar = b""
        self._bar_at: float | None = None
        self._shown = b""

    @property
    def due(self) -> float | None:
        """When :meth:`late` has something to tell."""
        times = [self._frame_at + BAR_INTERVAL_S] if self._frame else []
        times += [] if self._bar_at is None or not self._bar else [self._bar_at + BAR_INTERVAL_S]
        return min(times, default=None)

    def fold(self, data: bytes, now: float) -> Folded:
        """Take all that is there; the end of it, which may be half a line, is not used
        yet."""
        end = data.rfind(b"\n") + 1
        lines = data[:end]
        if b"\r" in lines or self._frame or _UP.search(lines):
            lines = b"".join(self._line(line, now) for line in lines.split(b"\n")[:-1])
        if end:
            self._bar, self._bar_at, self._shown = b"", None, b""
        return Folded(lines, end + self._look_at_bar(data, end, now))

    def _line(self, line: bytes, now: float) -> bytes:
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
        """The unfinished line: returns how much of it is overwritten already."""
        last = data.rfind(b"\r", start)
        if last < 0:
            return 0
        while last > start and data[last - 1 : last] == b"\r":
            last -= 1
        if last == start:  # nothing but an end that may be followed by \n
            return 0
        begin = data.rfind(b"\r", start, last) + 1 or start
        self._bar = data[begin:last]
        if self._bar_at is None:
            self._bar_at = now
        return begin - start

    def late(self, now: float) -> bytes:
        """Lines that are due by their time: the state of a bar that grows, the last
        picture of nested ones."""
        lines = b""
        if self._frame and now >= self._frame_at + BAR_INTERVAL_S:
            lines, self._frame, self._frame_at = self._frame, b"", now
        if self._bar and self._bar_at is not None and now >= self._bar_at + BAR_INTERVAL_S:
            self._bar_at = now
            if self._bar != self._shown:
                self._shown = self._bar
                lines += self._bar + b"\n"
        return lines

    def finish(self, data: bytes) -> bytes:
        """No more will come: what is left becomes a line of its own."""
        frame, self._frame = self._frame, b""
        shown, self._shown = self._shown, b""
        text = _last_state(data)
        self._bar, self._bar_at = b"", None
        return frame + (text + b"\n" if text and text != shown else b"")


def _last_state(line: bytes) -> bytes:
    """What is left of a line after its carriage returns."""
    if b"\r" in line:
        line = line.rstrip(b"\r")
        return line[line.rfind(b"\r") + 1 :]
    return line

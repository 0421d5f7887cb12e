"""A program in a terminal of its own: what a person would see on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte

ALTERNATE, NORMAL = b"\x1b[?1049h", b"\x1b[?1049l"
"""The codes that enter and leave the alternate screen."""


class Terminal:
    """The screen, and the keys."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, columns: int, lines: int) -> None:
        self.process, self._fd = process, fd
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self.modes = termios.tcgetattr(fd)
        """How the terminal was set before."""

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def read(self, timeout_s: float) -> bool:
        """Draw what the program has written by now; False: it has ended."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            found = os.read(self._fd, 1 << 16)
        except OSError:  # its last user has closed it
            return False
        self.written += found
        self._stream.feed(found)
        return bool(found)

    def until(self, condition: Callable[[], object], what: str, *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}\n{self.text}"
            if not self.read(0.1):
                assert condition(), f"it ended before {what}\n{self.text}"

    def shows(self, *texts: str, timeout_s: float = 60.0) -> None:
        """Wait until all these texts are on the screen."""
        self.until(lambda: all(text in self.text for text in texts), f"{texts} on the screen", timeout_s=timeout_s)

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)

    def ended(self, *, timeout_s: float = 30.0) -> int:
        """Wait for its end; its exit code."""
        self.until(lambda: self.process.poll() is not None, "its end", timeout_s=timeout_s)
        while self.read(0.0) and select.select([self._fd], [], [], 0.0)[0]:
            pass
        return int(self.process.returncode)

    def assert_given_back(self) -> None:
        """The terminal is as it was: its modes, its cursor, its screen."""
        assert self.written.count(ALTERNATE) == self.written.count(NORMAL) == 1
        assert self.written.rindex(b"\x1b[?25h") > self.written.rindex(b"\x1b[?25l")
        assert termios.tcgetattr(self._fd) == self.modes


@contextmanager
def in_terminal(
    command: Sequence[str], folder: Path, *, columns: int = 80, lines: int = 24, **env: str
) -> Iterator[Terminal]:
    """Run a program in a terminal of this size, and end it at the end of the block."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        stack.callback(os.close, theirs)  # open until then: its modes are looked at when the program is gone
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, "TERM": "xterm-256color", **env},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_own_terminal,
        )
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        yield Terminal(process, ours, columns, lines)


def _own_terminal() -> None:
    """Make the terminal the controlling one of a new session: Ctrl-C signals."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

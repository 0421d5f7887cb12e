"""The live view of a run in a terminal: ``top``, and ``status --watch``.

Theory of operation
===================

Two threads send requests, and the main thread draws, so that a key acts at once while a
supervisor is slow, or away::

    status, once each interval ─┐
                                ├──▶ _Seen ──▶ a frame, when something is new, a key
    events, as they come ───────┘              was pressed, or the terminal has changed

While no supervisor answers, the last state stays, with its age, until the next
supervisor of the run answers. A frame has a head (troubles), a part that scrolls
(groups, replicas, channels, nodes), the newest events, and a line of keys. Rich owns
the alternate screen; at any end, also by a signal, the terminal is restored.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from replicas.cli import render
from replicas.cli.base import Screen, ThisRun, command
from replicas.cli.find_run import RunAddress
from replicas.errors import ReplicasError, UsageError
from replicas.status import RunStatus
from replicas.telemetry import words
from replicas.telemetry.events import Record
from replicas.telemetry.verdict import Verdict, verdict
from replicas.telemetry.words import duration_text

_EVENTS = 200
_TICK_S = 0.1
_AGAIN_S = 1.0
_SENTENCE = 3
"""Most lines of the sentence about the worst trouble."""
_TROUBLES = 3
"""Sentences in the head; further ones are counted."""
_KEYS = {b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1, b"\r": 1, b"\n": 1}
_KEY = re.compile(rb"\x1b\[[0-9;]*.|\x1bO.|.", re.DOTALL)
_PAGES = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
_ENDS = {b"\x1b[H": 0, b"\x1b[1~": 0, b"g": 0, b"\x1b[F": 1 << 30, b"\x1b[4~": 1 << 30, b"G": 1 << 30}
_HELP = "q quit   up, down, space, b, g, G scroll"


@command()
def top(
    *,
    place: ThisRun,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks.")] = 1.0,
) -> None:
    """Show a live view of a run in the terminal.

    First what is wrong, in sentences; then groups, replicas, channels, nodes and the
    newest events. It continues with the next supervisor of the run. Keys: q ends it;
    arrows, space, b, g and G scroll. `status --watch` is the same in a terminal.
    """
    if not show_live(place, interval):
        raise UsageError("top needs a terminal", hint="for a pipe or a file use: replicas status --watch")


def show_live(place: RunAddress, interval: float) -> bool:
    """Draw the view of a run on the terminal until a key ends it or the run is over.

    Return True then, but False immediately where there is no terminal. Starts two
    daemon threads, which ask the supervisor.

    :param interval: between two requests for the status, in seconds.
    """
    screen = Screen()
    if not screen.is_terminal or screen.is_dumb_terminal:
        return False
    seen = _Seen(place, place.status())
    threads = [threading.Thread(target=one, daemon=True) for one in (lambda: seen.poll_status(interval), seen.follow)]
    for thread in threads:
        thread.start()
    while _suspended(seen, screen):
        signal.raise_signal(signal.SIGTSTP)  # it continues when the shell says so (fg)
    if seen.over:
        screen.print(f"the run is over: {seen.over}")
    return True


def _suspended(seen: _Seen, screen: Screen) -> bool:
    """Draw until the end of the view; return True if it ends by Ctrl-Z.

    The caller then stops this process, and calls this again when it is continued.
    """
    suspends: list[int] = []
    frame = _Frame(seen, screen)
    with _signals(suspends), _keys() as keys, Live(console=screen, screen=True, auto_refresh=False) as live:
        while not (seen.over or suspends) and all(frame.handle_key(key) for key in keys(_TICK_S)):
            if frame.stale(screen.size):
                live.update(frame, refresh=True)
    return bool(suspends)


class _Seen:
    """The known state of the run; each thread writes attributes of its own."""

    def __init__(self, place: RunAddress, status: RunStatus) -> None:
        """Begin with this status of the run; start no thread."""
        self._place = place
        self.status, self.at = status, time.time()
        self.events: deque[Record] = deque(maxlen=_EVENTS)
        self.error = self.over = ""
        self.changes = 0
        """Grows with each change."""

    def poll_status(self, interval_s: float) -> None:
        """Thread: update ``status`` and ``error`` regularly until the run is over.

        Then set ``over`` to the text how it ended.

        :param interval_s: seconds between two requests.
        """
        while not self.over:
            time.sleep(interval_s)
            try:
                self.status, self.error = self._place.status(), ""
                self.at = time.time()
            except ReplicasError as error:
                self.error = error.message
                ended = self.status.exit_code is not None
                self.over = verdict(self.status, time.time()).sentence if ended else self._place.how_it_ended()
            self.changes += 1

    def follow(self) -> None:
        """Thread: append new events to ``events`` as they come, until the run is over.

        Continues after a lost connection, and with a next supervisor.
        """
        after = max(0, self.status.newest_event - _EVENTS)
        while not self.over:
            with contextlib.suppress(ReplicasError):  # the status shows that there is no answer
                for record in self._place.client().events(after):
                    after = record.seq
                    self.events.append(record)
                    self.changes += 1
            time.sleep(_AGAIN_S)  # also after a stream that ended in order: a supervisor that stops ends each


class _Frame:
    """One frame of the view, drawn from ``seen``, as long as the terminal is high."""

    def __init__(self, seen: _Seen, screen: Screen) -> None:
        """Begin scrolled to the top; draw nothing yet.

        :param seen: the state of the run, read at each drawing; threads update it.
        :param screen: the console, whose height limits a frame.
        """
        self._seen, self._screen = seen, screen
        self._first = self._page = self._lines = 0
        self._drawn: object = None

    def handle_key(self, key: bytes) -> bool:
        """Scroll by a key, or ignore it; return False if the key ends the command."""
        before = self._first
        self._first += _KEYS.get(key, 0) + _PAGES.get(key, 0) * max(1, self._page - 1)
        self._first = max(0, min(_ENDS.get(key, self._first), self._lines - self._page))
        if self._first != before:
            self._drawn = None
        return key != b"q"

    def stale(self, size: object) -> bool:
        """Return True if a frame must be drawn; the caller then draws it.

        State, scroll position or the terminal's ``size`` have changed since the last
        call, which remembers them.
        """
        now = (self._seen.changes, size)
        before, self._drawn = self._drawn, now
        return before != now

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        """Yield the frame's lines as segments, as many as the terminal is high.

        Also limits the scroll position to the lines that there are now.
        """
        seen, height = self._seen, options.height or self._screen.height
        flat = options.update(height=None, highlight=False)

        def lines_of(*parts: RenderableType) -> list[list[Segment]]:
            """Render these parts, one below the other; return lines of segments."""
            return self._screen.render_lines(Group(*parts), flat, pad=False)

        first, sentence, *others = _head(seen, verdict(seen.status, seen.at))
        head = [*lines_of(first), *lines_of(sentence)[:_SENTENCE], *lines_of(*others, "")][: max(1, height // 2)]
        told = list(seen.events)
        room = max(0, min(8, height // 5, height - len(head) - 4))
        news = [_one_line(render.event_line(record)) for record in told if not words.routine(record.event)][-room:]
        foot = lines_of("", *news) if room and news else []
        body = render.top_lines(seen.status, seen.at, options.max_width)
        self._page = max(0, height - len(head) - len(foot) - 1)
        self._lines = len(body)
        self._first = max(0, min(self._first, self._lines - self._page))
        rows = body[self._first : self._first + self._page]
        shown = lines_of(*map(_one_line, rows)) if rows else []
        shown += [[] for _ in range(self._page - len(shown))]
        last = min(self._lines, self._first + self._page)
        where = f"   lines {self._first + 1} to {last} of {self._lines}" if self._lines > self._page else ""
        bar = lines_of(_one_line(Text(f"{_HELP}{where}", style="reverse")))
        for line in [*head, *shown, *foot, *bar][:height]:
            yield from line
            yield Segment.line()


def _one_line(text: Text) -> Text:
    """Change the text so that Rich cuts it to one line, and return it."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _head(seen: _Seen, found: Verdict) -> Iterator[Text]:
    """Yield the head of a frame: the run, its worst trouble, and further ones.

    While no supervisor answers, say since when in place of the troubles.

    :param seen: the known state. :param found: the judgement of its status.
    """
    status = seen.status
    now = time.strftime("%H:%M:%S", time.localtime(seen.at))
    about = f"  {status.endpoint}  up {duration_text(status.uptime_s)}  {now}"
    yield _one_line(Text.assemble((status.run, "bold"), about))
    if seen.error:
        yield Text(f"No answer for {duration_text(round(time.time() - seen.at))}: {seen.error}", style="bold red")
        return
    yield Text(found.sentence, style=render.LEVEL_STYLES[found.level])
    others = [one for one in found.troubles if one.text != found.sentence]
    for one in others[: _TROUBLES - 1]:
        yield _one_line(Text(one.text, style=render.LEVEL_STYLES[one.level].removeprefix("bold ")))
    if len(others) >= _TROUBLES:
        yield Text(f"... and {len(others) - _TROUBLES + 1} more, in: replicas status", style="dim")


@contextlib.contextmanager
def _signals(suspends: list[int]) -> Iterator[None]:
    """Context manager: replace signal handlers during the block.

    SIGTERM and SIGHUP raise SystemExit; Ctrl-Z (SIGTSTP) only adds its number to
    ``suspends``.
    """

    def end(signum: int, _frame: object) -> None:
        """Signal handler: raise SystemExit with the shell's code of the signal."""
        raise SystemExit(128 + signum)

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, lambda signum, _: suspends.append(signum))
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[bytes]]]:
    """Context manager: let the terminal deliver keys at once, without echo.

    Its settings are restored on leaving. Yields a function that waits up to a number of
    seconds for keys, and returns them. A key that is held down comes several times in
    one read.
    """
    fd = sys.stdin.fileno()
    fds = [fd] if os.isatty(fd) else []

    def keys(timeout_s: float) -> list[bytes]:
        """Wait for keys, ``timeout_s`` at most; return them, or an empty list.

        Without a terminal only wait.
        """
        return _KEY.findall(os.read(fd, 256)) if select.select(fds, [], [], timeout_s)[0] else []

    if not fds:  # only wait
        yield keys
        return
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)  # Ctrl-C still interrupts
    try:
        yield keys
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)

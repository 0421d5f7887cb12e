"""The terminal output of all commands; the only module that creates a Rich console."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from replicas.common.foreign import characters, hanging

__all__ = ["Screen", "complain"]


class Screen(Console):
    """A Rich console that escapes control characters in any text.

    Text is never read as markup. Unprintable characters are replaced during rendering,
    also in live displays.

    :param to_stderr: draw on stderr, not stdout.
    :param soft_wrap: leave long lines to the terminal.
    """

    def __init__(self, *, to_stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=to_stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():  # control: Rich's own codes, for live displays
                yield segment
            else:
                yield Segment(characters(segment.text), segment.style)


def complain(text: str) -> None:
    """Print a message to stderr, in one or more lines."""
    print(f"replicas: {hanging(text)}", file=sys.stderr)

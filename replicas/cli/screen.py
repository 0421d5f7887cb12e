"""Where tables and lines for people are drawn. The only place that makes a Rich
console."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from replicas.common.foreign import characters, hanging

__all__ = ["Screen", "complain"]


class Screen(Console):
    """A Rich console on which nothing but our own styles controls the terminal,
    whatever stands in the text.

    Text is never read as markup. What is not printable is replaced as it is rendered,
    also in what is shown live.

    :param to_stderr: draw on stderr, not stdout.
    :param soft_wrap: leave long lines to the terminal.
    """

    def __init__(self, *, to_stderr: bool = False, soft_wrap: bool = False) -> None:
        super().__init__(stderr=to_stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():  # control: of Rich's own, such as for what is shown live
                yield segment
            else:
                yield Segment(characters(segment.text), segment.style)


def complain(text: str) -> None:
    """A message to people on stderr, in one or more lines."""
    print(f"replicas: {hanging(text)}", file=sys.stderr)

"""Docstrings as Markdown: the little of reStructuredText that this package uses."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

__all__ = ["bullets", "markdown", "page", "sentence"]

_WIDTH = 88
_ROLE = re.compile(r":\w+:`(~?)([^`]+)`")
_FIELD = re.compile(r":(param|ivar|raises|return|returns) ?([^:]*): *(.*)", re.DOTALL)
_START = re.compile(r"^(?=[*-] |\d+\. )|(?:^|\s)(?=:(?:param|ivar|raises|returns?)\b)", re.MULTILINE)


def page(title: str, body: str) -> str:
    """A whole page: it says itself where it comes from."""
    note = "<!-- Made from the code by `make docs-reference`: change the code, not this page. -->"
    return f"# {title}\n\n{note}\n\n{body.strip()}\n"


def markdown(docstring: str | None) -> str:
    """The docstring as Markdown, wrapped anew; literal blocks become code blocks."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(docstring or ""))
    found: list[str] = []
    literal = False
    for block in filter(str.strip, blocks):
        if literal and block.startswith((" ", "\t")):
            found.append(f"```\n{textwrap.dedent(block)}\n```")
            continue
        literal = block.rstrip().endswith("::")
        text = re.sub(r"(^|\s)::$", "", block.rstrip()).removesuffix(":" if literal else "")
        found.append("\n".join(_wrapped(part) for part in _START.split(text) if part.strip()))
    return "\n\n".join(filter(None, found))


def sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, in one line."""
    first = _inline(" ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split()))
    return re.split(r"(?<=\.)\s", first)[0]


def bullets(lines: Iterable[str]) -> str:
    """A list, each of its items wrapped."""
    return "\n".join(_wrapped(f"- {line}") for line in lines)


def _wrapped(part: str) -> str:
    field = _FIELD.match(part)
    if field is not None:
        part = _as_item(field[1], field[2], field[3])
    bullet = re.match(r"([*-]|\d+\.) +", part)
    indent = " " * (len(bullet[0]) if bullet else 0)
    lines = textwrap.wrap(
        _inline(" ".join(part.split())),
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def _as_item(kind: str, name: str, text: str) -> str:
    if kind in ("param", "ivar"):
        return f"- ``{name}``: {text}"
    if kind == "raises":
        return f"- raises ``{name.removeprefix('replicas.')}``: {text}"
    return f"- returns {text}"


def _inline(text: str) -> str:
    text = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    text = re.sub(r"``?([\w-]+)\.md``?", r"[\1](\1.md)", text).replace("``", "`")
    return "".join(
        part if index % 2 else part.replace("<", "&lt;").replace("|", "\\|")
        for index, part in enumerate(re.split(r"(`[^`]*`)", text))
    )

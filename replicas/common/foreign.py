"""Text from elsewhere, made fit to be shown. Standard library only: shims use it too.

What a program wrote, the command line of another user's process, the text of an
exception and the answer of a server may contain anything: escape sequences that retitle
or clear a terminal, line breaks that forge a line of ours, marks that turn the
direction of writing. Two lines of defence:

* where such a text comes in, it becomes :func:`one_line` (reasons, names, command
  lines), :func:`lines` (tracebacks) or :func:`visible` (values of a config); lines of
  logs, with or without colours, :func:`readable` or :func:`last_lines`;
* where text goes out to people (the supervisor's
  :class:`~replicas.supervisor.console.Console`, the commands'
  :mod:`~replicas.cli.screen`, JSON) it passes :func:`lines`, :func:`hanging`,
  :func:`characters` or :func:`ascii_controls` once more.

Invariant: nothing but printable characters, line breaks and styles of our own reaches a
terminal, except the colours of logs.
"""

from __future__ import annotations

import re

__all__ = [
    "LINE_NCHARS",
    "ascii_controls",
    "characters",
    "hanging",
    "last_lines",
    "lines",
    "one_line",
    "readable",
    "visible",
]

LINE_NCHARS = 2000
"""Where :func:`one_line` cuts, unless it is told otherwise."""
_CUT = "..."
_SEQUENCE = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, and what moves the cursor or clears the screen
    r"|\x1b[P\]X^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and the like: titles, links, the clipboard
)
_DIRECTION = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SEQUENCES = re.compile(_SEQUENCE)
_CONTROL = re.compile(rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION}]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HALF_COLOUR = re.compile(rb"\x1b[^m]*\Z")
_COLOURS_OFF = b"\x1b[0m"
_BREAKS = re.compile(r"[ \t]*[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029][\s\x1c-\x1f]*")


# ------------------------------------------------------------ where it comes in


def one_line(text: str, most: int = LINE_NCHARS) -> str:
    """``text`` as one line of printable characters, at most ``most`` of them.

    Escape sequences go, line breaks and tabs become a space, what else cannot be
    printed is written as Python would (``\\x07``, ``\\u202e``).
    """
    if not text.isprintable():
        text = _BREAKS.sub(" ", _SEQUENCES.sub("", text)).strip()
        text = visible(text)
    return text if len(text) <= most else text[: max(0, most - len(_CUT))] + _CUT


def lines(text: str) -> str:
    """``text`` line by line, indented as it was, of printable characters; without a
    line break at its end."""
    if text.isprintable():
        return text
    return "\n".join(visible(_SEQUENCES.sub("", line).expandtabs()) for line in text.splitlines())


def visible(text: str) -> str:
    """``text`` with all that cannot be printed, line breaks included, as escapes:
    nothing of it is lost."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def readable(data: bytes, prefix: bytes, limit: int) -> list[bytes]:
    """Complete lines of a log as they go to a terminal: valid UTF-8 with colours, but
    no other control codes; prefixed.

    :param limit: size that no line exceeds, prefix and end included; what is longer is
        cut, and says so.
    """
    result = []
    for line in data.split(b"\n")[:-1]:
        text = _CONTROL.sub(_keep_colours, line[:limit].decode(errors="replace")).encode()
        ending = (_COLOURS_OFF if b"\x1b" in text else b"") + b"\n"
        room = limit - len(prefix) - len(ending)
        if len(line) > limit or len(text) > room:
            mark = f"… ({len(line)} bytes)".encode()
            text = _HALF_COLOUR.sub(b"", text[: room - len(mark)].decode(errors="ignore").encode()) + mark
        result.append(prefix + text + ending)
    return result


def _keep_colours(found: re.Match[str]) -> str:
    return found[0] if _COLOUR.fullmatch(found[0]) else ""


def last_lines(data: bytes, count: int, limit: int) -> tuple[str, ...]:
    """The last lines of a log as text without control codes, at most ``count``, each
    cut to ``limit`` characters."""
    found = [_CONTROL.sub("", line).rstrip() for line in data.decode(errors="replace").split("\n")]
    while found and not found[-1]:
        found.pop()
    while found and not found[0]:
        found.pop(0)
    return tuple(line[:limit] for line in found[-count:])


# ------------------------------------------------------------ where it goes out


def hanging(text: str) -> str:
    """:func:`lines`, of which all but the first are indented: none of them looks like a
    line that begins anew."""
    first, *others = lines(text).split("\n")
    return "\n".join((first, *(line if line.startswith("  ") or not line else f"  {line}" for line in others)))


def characters(text: str) -> str:
    """``text`` with another character in place of each one that is no printable one, no
    line break and no tab.

    For text whose place on the screen is settled: its length stays.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def ascii_controls(text: str) -> str:
    """JSON with what is not printable in its texts as escapes, so that it says the
    same, and can be shown."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n" else _json_escape(one) for one in text)


def _json_escape(one: str) -> str:
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))

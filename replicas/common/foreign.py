"""Sanitise untrusted text, so that a terminal, a log or JSON can show it safely.

Standard library only, as shims use it too. The output of a program, the command line of
another user's process, the text of an exception and the answer of a server may contain
anything: escape sequences that retitle or clear a terminal, line breaks that forge a
log line, marks that change the direction of writing. Such a text is sanitised on input
and, for people, on output once more.

Invariant: only printable characters, line breaks and our own styles reach a terminal,
and the colours of logs.
"""

from __future__ import annotations

import re

LINE_NCHARS = 2000
"""Default length at which :func:`one_line` cuts."""
_CUT = "..."
_SEQUENCE = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement, clearing the screen
    r"|\x1b[P\]X^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and the like: titles, links, the clipboard
)
_DIRECTION = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SEQUENCES = re.compile(_SEQUENCE)
_CONTROL = re.compile(rf"{_SEQUENCE}|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION}]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HALF_COLOUR = re.compile(rb"\x1b[^m]*\Z")
_COLOURS_OFF = b"\x1b[0m"
_BREAKS = re.compile(r"[ \t]*[\t\n\x0b\x0c\r\x1c-\x1e\x85\u2028\u2029][\s\x1c-\x1f]*")


def one_line(text: str, most: int = LINE_NCHARS) -> str:
    """Return ``text`` as one line of at most ``most`` printable characters.

    Escape sequences are removed, line breaks and tabs become a space, other unprintable
    characters are written as Python escapes. A longer text is cut, and ends with "...".
    """
    if not text.isprintable():
        text = _BREAKS.sub(" ", _SEQUENCES.sub("", text)).strip()
        text = visible(text)
    return text if len(text) <= most else text[: max(0, most - len(_CUT))] + _CUT


def lines(text: str) -> str:
    """Return ``text`` as printable lines without a final line break; indentation stays.

    Escape sequences are removed, tabs become spaces, and other unprintable characters
    are written as Python escapes.
    """
    if text.isprintable():
        return text
    return "\n".join(visible(_SEQUENCES.sub("", line).expandtabs()) for line in text.splitlines())


def visible(text: str) -> str:
    """Return ``text`` with its unprintable characters, line breaks too, as Python
    escapes.

    No character is removed.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def readable(data: bytes, prefix: bytes, limit: int) -> list[bytes]:
    """Return the complete lines of ``data`` for a terminal, each after ``prefix``.

    Bytes after the last line break are left out. The lines are valid UTF-8, with
    colours but no other control codes, and end with a line break.

    :param data: bytes of a log file.
    :param prefix: bytes to put before each line, such as the name of the rank.
    :param limit: most bytes of a line, with prefix and end; a longer one is cut, and
        ends with the number of its bytes.
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
    """Return the text that ``found`` matched if it sets a colour, else an empty
    text."""
    return found[0] if _COLOUR.fullmatch(found[0]) else ""


def last_lines(data: bytes, count: int, limit: int) -> tuple[str, ...]:
    """Return the last ``count`` lines of a log as texts, without any control codes.

    Each is cut to ``limit`` characters; empty lines at both ends of the log are left
    out. The result is shorter than ``count`` if the log has fewer lines.

    :param data: bytes of the log.
    """
    found = [_CONTROL.sub("", line).rstrip() for line in data.decode(errors="replace").split("\n")]
    while found and not found[-1]:
        found.pop()
    while found and not found[0]:
        found.pop(0)
    return tuple(line[:limit] for line in found[-count:])


def hanging(text: str) -> str:
    """Return :func:`lines` of ``text``, all but the first indented by two spaces.

    So no line of a foreign text can look like an entry of the log that quotes it.
    """
    first, *others = lines(text).split("\n")
    return "\n".join((first, *(line if line.startswith("  ") or not line else f"  {line}" for line in others)))


def characters(text: str) -> str:
    """Return ``text`` without unprintable characters, in the same length.

    Each one that is neither a line break nor a tab becomes the replacement character.
    For text with a fixed layout.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def ascii_controls(text: str) -> str:
    """Return the JSON text ``text`` with its unprintable characters as JSON escapes.

    A parser reads the same value from it. Line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n" else _json_escape(one) for one in text)


def _json_escape(one: str) -> str:
    """Return the character ``one`` as JSON escapes of its UTF-16 units."""
    units = one.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))

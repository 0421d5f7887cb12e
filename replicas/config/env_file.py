"""Parse environment files: ``NAME=value`` lines, without expansion.

As systemd, Docker and shells read them: a line is empty, a comment (``#``), or
``NAME=value`` with an optional ``export`` before it. A value in single quotes is
literal; in double quotes ``\\n``, ``\\t``, ``\\"``, ``\\\\`` and ``\\$`` are escapes.
Without quotes it ends at a blank and a ``#`` (``COLOR=#fff`` has no comment) or at the
end of the line, without surrounding blanks. The last line of a name wins. ``$NAME`` is
not expanded.
"""

from __future__ import annotations

import re

__all__ = ["BadLine", "parse"]

_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=(.*)", re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_ESCAPE = re.compile(r"\\(.)")
_COMMENT = re.compile(r"\s+#.*")
_ESCAPES = {"n": "\n", "t": "\t"}


class BadLine(ValueError):
    """A line is no ``NAME=value``. Not quoted in the text: it may hold a secret."""


def parse(text: str) -> dict[str, str]:
    """Return the variables of an environment file.

    :raises BadLine: at the first malformed line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise BadLine(f"line {number}: expected NAME=value")
        if "\0" in line:
            raise BadLine(f"line {number}: contains a NUL character")
        variables[match[1]] = _value(match[2], number)
    return variables


def _value(text: str, number: int) -> str:
    quoted = text.lstrip()
    if not quoted.startswith(("'", '"')):
        return _COMMENT.sub("", text).strip()
    match = (_SINGLE if quoted[0] == "'" else _DOUBLE).fullmatch(quoted)
    if match is None:
        raise BadLine(f"line {number}: the value begins with a quote that does not end it")
    return match[1] if quoted[0] == "'" else _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), match[1])

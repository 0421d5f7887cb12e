"""Read config and environment files within limits, and find the line of a key.

tomllib reports the line of a syntax error, but not the line of a key. A key is in the
last statement of the shortest prefix of the text that is valid TOML and has the key.
:class:`Lines` finds it by bisection, without a grammar of its own.

Paths keep their symbolic links, as the links may lead to another file at a reload.

An environment file is read as systemd, Docker and shells do. A line is empty, a comment
(``#``), or ``NAME=value`` with an optional ``export`` before it. A value in single
quotes is literal; in double quotes ``\\n``, ``\\t``, ``\\"``, ``\\\\`` and ``\\$`` are
escapes. Without quotes it ends at a blank and a ``#`` (``COLOR=#fff`` has no comment)
or at the end of the line, without surrounding blanks. The last line of a name wins.
``$NAME`` is not expanded.
"""

from __future__ import annotations

import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicas.common.foreign import one_line

CONFIG_NBYTES = 1 << 20
"""Maximum size of a config file or an environment file."""
DEPTH = 32
"""Maximum nesting of tables and lists."""
TOO_DEEP = f"tables or lists are nested more than {DEPTH} deep"
_LOOKS_NCHARS = 1 << 20
"""Most text that :class:`Lines` parses to find lines; beyond it, lines are unknown."""
_KEY_NCHARS = 40
_REASON_NCHARS = 200
_LINE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)[ \t]*=(.*)", re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'\s*(?:#.*)?")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(?:#.*)?')
_ESCAPE = re.compile(r"\\(.)")
_COMMENT = re.compile(r"\s+#.*")
_ESCAPES = {"n": "\n", "t": "\t"}


def absolute(path: Path) -> Path:
    """Return an absolute path that keeps its symbolic links; it need not exist.

    It also keeps links in the path of the working folder, if ``PWD`` has them.
    """
    if path.is_absolute():
        return path
    told = Path(os.environ.get("PWD", ""))
    here = Path.cwd()
    try:
        logical = told if told.is_absolute() and told.samefile(here) else here
    except OSError:  # PWD no longer exists
        logical = here
    return logical / path


def state_home(path: Path) -> Path:
    """Return the default folder for the state of the run of a config.

    It is the folder of the file itself, with symbolic links resolved, so that a run has
    one state, and one supervisor, for all paths of its config. But a link to a place
    below its own folder (``current -> releases/7``, or a file of Kubernetes' ConfigMap)
    changes with each release: then it is the link's own folder, so that the state, and
    the lock that makes a run unique, stay.

    :param path: absolute path of the file, or of a folder of configs.
    """
    root = here = Path(path.anchor)
    for part in path.parts[1:]:
        step = here / part
        there = step.resolve()
        if here != root and step.is_symlink() and here in there.parents:
            return here
        here = there
    return here if here.is_dir() else here.parent


def read(path: Path) -> str:
    """Return the text of the file, which need not be a regular one.

    :raises OSError: the file cannot be read.
    :raises ValueError: its name, size or encoding is bad; the text has the reason.
    """
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_NBYTES + 1)
    except ValueError as error:  # an impossible file name
        raise ValueError(f"cannot be read: {error}") from error
    if len(data) > CONFIG_NBYTES:
        raise ValueError(f"is larger than {CONFIG_NBYTES:,} bytes: is it the right file?")
    try:
        return data.decode("utf-8-sig")  # editors on Windows write a mark of the order of bytes
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from error


def decode(text: str) -> dict[str, Any]:
    """Parse TOML, and return its tables; refuse what nests too deep.

    :raises ValueError: the text is not valid, or nests too deep; the error names the
        reason and the line.
    """
    try:
        mapping = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).rpartition(" (at ")
        raise ValueError(f"is not valid TOML: {one_line(reason, _REASON_NCHARS)} (at {place}") from error
    except RecursionError:
        reason = TOO_DEEP
    except ValueError as error:  # e.g. a number with too many digits for int()
        reason = str(error).partition(";")[0]
    else:
        if not is_too_deep(mapping):
            return mapping
        reason = TOO_DEEP
    raise ValueError(_located(text, reason))


def _located(text: str, reason: str) -> str:
    """Return ``line N (key): reason``, to name the line that makes a TOML text
    unusable: the text up to that line already fails (see :func:`fails`).

    :param reason: why the whole text is refused; only put into the result.
    """

    def fails(some: str) -> bool:
        """Return True if the TOML text ``some`` nests too deep or has an impossible
        value."""
        try:
            return is_too_deep(tomllib.loads(some))
        except tomllib.TOMLDecodeError:
            return False
        except (ValueError, RecursionError):
            return True

    lines = text.split("\n")
    number = 1 + bisect_left(range(1, len(lines)), True, key=lambda count: fails("\n".join(lines[:count])))
    key = lines[number - 1].partition("=")[0].strip()
    named = f" ({key if len(key) <= _KEY_NCHARS else f'{key[:_KEY_NCHARS]}…'})" if "=" in lines[number - 1] else ""
    return f"line {number}{named}: {reason}"


def is_too_deep(value: object) -> bool:
    """Return True if tables and lists nest deeper than :data:`DEPTH`."""
    level: dict[int, object] = {id(value): value}
    for _ in range(DEPTH + 1):
        inner = (one for container in level.values() for one in _contents(container))
        level = {id(one): one for one in inner if isinstance(one, Mapping | list | tuple)}
        if not level:
            return False
    return True


def _contents(container: object) -> Sequence[object]:
    """Return the values in a table or list, or () for any other value."""
    if isinstance(container, Mapping):
        return list(container.values())
    return container if isinstance(container, list | tuple) else ()


class Lines:
    """Finds the line of a key in a valid TOML text.

    :param whole: the parsed text.
    """

    def __init__(self, text: str, whole: Mapping[str, Any]) -> None:
        """Keep the text and its parsed form ``whole``; look for no key yet."""
        self._lines, self._whole = text.split("\n"), whole
        self._budget = _LOOKS_NCHARS
        self._known: dict[int, Mapping[str, Any] | None] = {0: {}}

    def of(self, path: Sequence[str]) -> int | None:
        """Return the line number of a key, counted from 1, or None if it is unknown.

        For a missing key, return the line of its table.
        """
        while path:
            if _has(self._whole, path):
                return self._line(path)
            path = path[:-1]
        return None

    def _line(self, path: Sequence[str]) -> int | None:
        """Return the line of a key that the text has, or None if finding it would take
        too long."""
        counts = range(len(self._lines) + 1)
        end = bisect_left(counts, True, key=lambda count: _has(self._longest_valid(count)[1], path))
        line, _ = self._longest_valid(end - 1)  # the lines of the key's statement follow
        while not self._lines[line].strip() or self._lines[line].lstrip().startswith("#"):
            line += 1
        return None if self._budget <= 0 else line + 1

    def _longest_valid(self, count: int) -> tuple[int, Mapping[str, Any]]:
        """Return the longest prefix of up to ``count`` lines that is valid TOML, as
        (number of lines, parsed)."""
        while (found := self._parsed(count)) is None:
            count -= 1
        return count, found

    def _parsed(self, count: int) -> Mapping[str, Any] | None:
        """Return the first ``count`` lines as parsed TOML, or None if they are not
        valid, or too much was parsed already. Each result is kept."""
        if count not in self._known:
            text = "\n".join(self._lines[:count])
            self._budget -= len(text)
            try:
                self._known[count] = tomllib.loads(text) if self._budget > 0 else None
            except (ValueError, RecursionError):
                self._known[count] = None
        return self._known[count]


def _has(mapping: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Return True if the nested mapping has this path of keys."""
    value: object = mapping
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


class BadLine(ValueError):
    """A line is not ``NAME=value``. The text does not show it: it may be a secret."""


def parse_env(text: str) -> dict[str, str]:
    """Return the variables of an environment file's text.

    :raises BadLine: a line is malformed; the text names the line, not its content.
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
    """Return the value in ``text``, which follows ``NAME=``: without quotes, escapes or
    a comment.

    :param number: number of the line, for the error.
    :raises BadLine: a quote is not closed, or text follows the closing one.
    """
    quoted = text.lstrip()
    if not quoted.startswith(("'", '"')):
        return _COMMENT.sub("", text).strip()
    match = (_SINGLE if quoted[0] == "'" else _DOUBLE).fullmatch(quoted)
    if match is None:
        raise BadLine(f"line {number}: the value begins with a quote that does not end it")
    return match[1] if quoted[0] == "'" else _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), match[1])

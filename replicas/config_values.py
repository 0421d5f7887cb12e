"""Readers: the small parts from which :mod:`replicas.config_file` is put together.

Theory of operation
===================

A :class:`Reader` turns one value of a TOML file (or of a Python mapping) into its resolved form. It never raises for
bad input: it notes a problem at its :class:`Place` and returns ``UNSET``, so that one pass finds every problem.
:func:`table` reads a table by a schema (keys with their readers) and names the nearest known key for each unknown one.
What was read is handed to a ``build`` function even when an optional key was bad (with its default in place of it), so
that checks across keys still run; the notes alone decide whether the config is used.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from replicas.foreign import one_line, visible
from replicas.messages.bounds import SECONDS_MAX, shown

__all__ = [
    "NAMED_MAX",
    "NAME_ONE",
    "NBYTES_MAX",
    "PROBLEMS_SHOWN",
    "Key",
    "Located",
    "Place",
    "Reader",
    "address",
    "duration",
    "each",
    "file",
    "folder",
    "in_order_of",
    "listen",
    "name",
    "nearest",
    "one_of",
    "plain",
    "show",
    "size",
    "table",
]

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")
_BEYOND_S = 10**12
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|[kKMGT]B|[KMGT]iB)\s*")
_UNITS_NBYTES = {"B": 1, "kB": 10**3} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("iB", 1 << 10), ("B", 10**3))
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_EVERY_ADDRESS = ("0.0.0.0", "0")
NAME_ONE = "name the one by which the machines of the run reach this one, or 127.0.0.1"
PROBLEMS_SHOWN = 100
NAMED_MAX = 256
"""Groups, or channels, of one run. What may run at once is looked for among them, and a chain of them must fit a stack."""
NBYTES_MAX = 1 << 60
_KEY_NCHARS = 100
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")


class Place:
    """Where in the config a value stands, and where its problems are noted.

    :param base: folder that relative folders are relative to.
    :param home: folder that has the state of runs by default (default: the same).
    """

    def __init__(
        self,
        base: Path,
        path: tuple[str, ...] = (),
        problems: list[tuple[tuple[str, ...], str]] | None = None,
        home: Path | None = None,
    ):
        self.base = base
        self.home = base if home is None else home
        self.path = path
        self.problems = [] if problems is None else problems

    def at(self, *keys: str) -> Place:
        return Place(self.base, (*self.path, *keys), self.problems, self.home)

    def has_problems(self) -> bool:
        """Whether one was noted here or below."""
        return any(path[: len(self.path)] == self.path for path, _ in self.problems)

    def is_crowded(self) -> bool:
        """Whether there are so many problems already that no other will be shown."""
        return len(self.problems) >= PROBLEMS_SHOWN

    def problem(self, message: str) -> UnsetType:
        where = ".".join(map(_shown_key, self.path))
        shown = one_line(visible(message))
        self.problems.append((self.path, f"{where}: {shown}" if where else shown))
        return UNSET


def _shown_key(key: str) -> str:
    key = key if len(key) <= _KEY_NCHARS else f"{key[: _KEY_NCHARS - 3]}..."
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key)


Reader = Callable[[Place, object], Any]
"""``(place, value)`` to the resolved value, or UNSET after a problem was noted."""


class Key(NamedTuple):
    """A key of a table: its reader, the field that it fills (default: its own name), and whether it must be there."""

    read: Reader
    field: str = ""
    required: bool = False
    stand_in: Any = UNSET
    """Used in place of a required key that is missing or bad, so that the checks beyond it still run."""


def show(value: object) -> str:
    """A value as the file would have it, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except Exception:  # noqa: BLE001  # an embedding program's own object, of which anything may raise
        text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _instead(value: object) -> str:
    """What stands where a table should be. Lists are not shown: they may hold tables with secrets in them."""
    return "a list" if isinstance(value, list | tuple) else show(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean "x"?`` for the nearest known name, or the list of all of them."""
    names = list(known)
    if len(word) > _KEY_NCHARS:
        return ""
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if found:
        return f'; did you mean "{found[0]}"?'
    listed = ", ".join(f'"{known_name}"' for known_name in names)
    return f"; known: {listed}" if listed else ""


def plain(kind: object, description: str) -> Reader:
    """A value that msgspec converts strictly to ``kind``."""

    def read(place: Place, value: object) -> Any:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return place.problem(f"expected {description}, got {show(value)}")

    return read


def one_of(*words: str) -> Reader:
    def read(place: Place, value: object) -> Any:
        if isinstance(value, str) and value in words:
            return value
        listed = ", ".join(f'"{word}"' for word in words[:-1]) + f' or "{words[-1]}"'
        close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
        hint = f'; did you mean "{close[0]}"?' if close else ""
        return place.problem(f"expected {listed}, got {show(value)}{hint}")

    return read


def name(place: Place, value: object) -> Any:
    """A name that is safe as a folder, a metric label and a part of ``group/replica/rank``."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    return place.problem(f"expected a name of at most 63 letters, digits, '-', '_' and '.', got {show(value)}")


def duration(*, zero: bool = False) -> Reader:
    """Seconds as a float, from ``"500ms"``, ``"30s"``, ``"10m"``, ``"2h"``, ``"1d"`` or a number of seconds."""

    def read(place: Place, value: object) -> Any:
        seconds = _seconds(value)
        if seconds is None or not math.isfinite(seconds):
            return place.problem(f'expected a duration such as "500ms", "30s" or "10m", got {show(value)}')
        if seconds > SECONDS_MAX:
            return place.problem(f"expected a duration of at most {SECONDS_MAX:g} seconds, got {show(value)}")
        if seconds < 0 or (seconds == 0 and not zero):
            return place.problem(f"expected a duration {'of 0 or more' if zero else 'above 0'}, got {show(value)}")
        return seconds

    return read


def _seconds(value: object) -> float | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return float(min(max(value, -1), _BEYOND_S))  # of more digits than a float has: too long all the same
    if isinstance(value, float):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else float(match[1]) * _UNITS_S[match[2]]


def size(least: int = 1) -> Reader:
    """Bytes as an int of at least ``least``, from ``"64MiB"``, ``"1.5GiB"``, ``"10MB"`` (decimal) or a number of bytes."""

    def read(place: Place, value: object) -> Any:
        nbytes = _nbytes(value)
        if nbytes is None:
            return place.problem(f'expected a size such as "64MiB" or "8GiB", got {show(value)}')
        if nbytes > NBYTES_MAX:
            return place.problem(f"expected a size of at most {NBYTES_MAX:,} bytes, got {show(value)}")
        if nbytes < least:
            return place.problem(f"expected a size of at least {least} bytes, got {show(value)}")
        return nbytes

    return read


def _nbytes(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    nbytes = None if match is None else float(match[1]) * _UNITS_NBYTES[match[2]]
    return None if nbytes is None or not math.isfinite(nbytes) else int(nbytes)


def folder(place: Place, value: object) -> Any:
    """An absolute folder, from a path relative to the config's own."""
    return _path(place, value, "folder")


def file(place: Place, value: object) -> Any:
    """The absolute path of a file, from one relative to the config's own folder."""
    return _path(place, value, "file")


def _path(place: Place, value: object, what: str) -> Any:
    if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        try:
            return Path(place.base, Path(value).expanduser()).resolve()
        except (OSError, RuntimeError) as error:
            return place.problem(f"{show(value)} is not a usable {what}: {error}")
    return place.problem(f"expected a {what}, got {show(value)}")


def address(place: Place, value: object) -> Any:
    """An IP address to listen on."""
    try:
        if isinstance(value, str):
            found = ipaddress.ip_address(value)
            return _one_address(place, found) if found.is_unspecified else str(found)
    except ValueError:
        pass  # said below, for every kind of value alike
    return place.problem(f'expected an IP address such as "127.0.0.1", got {show(value)}')


def listen(place: Place, value: object) -> Any:
    """``(host, port)`` from ``"host:port"`` or ``"[ipv6]:port"``; port 0 lets the system choose."""
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    numeric = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if numeric and (_is_ipv6(host) if bracketed else _HOST_NAME.fullmatch(host)):
        if host in _EVERY_ADDRESS or (bracketed and ipaddress.ip_address(host).is_unspecified):
            return _one_address(place, host)
        return host, int(port)
    return place.problem(f'expected "host:port" such as "127.0.0.1:9477" (port 0 to 65535), got {show(value)}')


def _one_address(place: Place, found: object) -> Any:
    return place.problem(f"{found} means every address of this machine, and tells others none: {NAME_ONE}")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def table(schema: Mapping[str, Key], build: Callable[[Place, dict[str, Any]], Any]) -> Reader:
    """A table with the keys of ``schema`` only, built by ``build(place, fields)`` when all required ones are good."""

    def read(place: Place, value: object) -> Any:
        if not isinstance(value, Mapping):
            return place.problem(f"expected a table, got {_instead(value)}")
        fields: dict[str, Any] = {}
        for key, item in value.items():
            known = schema.get(key)
            if known is None:
                close = "" if place.is_crowded() else nearest(str(key), schema)
                place.at(str(key)).problem(f"unknown key{close}")
                continue
            result = known.read(place.at(key), item)
            if result is not UNSET:
                fields[known.field or key] = result
        for key, known in schema.items():
            if known.required and key not in value:
                place.at(key).problem("missing; this key is required")
        for key, known in schema.items():
            if known.stand_in is not UNSET:
                fields.setdefault(known.field or key, known.stand_in)
        usable = all((known.field or key) in fields for key, known in schema.items() if known.required)
        return build(place, fields) if usable else UNSET

    return read


def each(read: Reader) -> Reader:
    """A table of named things; those that could not be read are left out."""

    def read_all(place: Place, value: object) -> Any:
        if not isinstance(value, Mapping):
            return place.problem(f"expected a table, got {_instead(value)}")
        if len(value) > NAMED_MAX:
            return place.problem(f"expected at most {NAMED_MAX} tables, got {len(value):,}")
        results = {}
        for key, item in value.items():
            here = place.at(str(key))
            result = read(here, item) if name(here, key) is not UNSET else UNSET
            if result is not UNSET:
                results[str(key)] = result
        return results

    return read_all


class Located(Protocol):
    """Knows on which line of the file a key stands."""

    def of(self, path: Sequence[str]) -> int | None: ...


def in_order_of(
    mapping: object, problems: Sequence[tuple[tuple[str, ...], str]], lines: Located | None = None
) -> list[str]:
    """The problems' texts, in the order in which their keys stand in the file; of very many the first ones."""
    order: dict[tuple[str, ...], int] = {}

    def visit(path: tuple[str, ...], value: object) -> None:
        order[path] = len(order)
        for key, item in value.items() if isinstance(value, Mapping) else ():
            visit((*path, str(key)), item)

    def position(path: tuple[str, ...]) -> int:
        while path not in order:
            path = path[:-1]
        return order[path]

    visit((), mapping)
    found: list[str] = []
    for path, message in sorted(problems, key=lambda problem: position(problem[0]))[:PROBLEMS_SHOWN]:
        line = lines.of(path) if lines is not None else None
        found.append(f"line {line}: {message}" if line is not None else message)
    rest = len(problems) - len(found)
    return [*found, f"and {rest:,} more problems"] if rest else found

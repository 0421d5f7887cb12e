"""Readers of single config values: durations, sizes, addresses, paths and names.

A :class:`Form` converts one value of a TOML file (or of a Python mapping) to its
resolved form, and describes in words what it accepts. It never raises for bad input: it
adds a problem to the value's :class:`Place` and returns ``UNSET``, so that one pass
finds every problem. :mod:`replicas.config.tables` reads tables with forms.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from replicas import errors
from replicas.common.foreign import one_line, visible
from replicas.common.sizes import list_text
from replicas.messages.bounds import RANKS_MAX, SECONDS_MAX, encodable, shown

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*")
_BEYOND_S = 10**12
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS_NBYTES = {"B": 1, "kB": 10**3} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("iB", 1 << 10), ("B", 10**3))
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
NAME_ONE = "name the one by which the machines of the run reach this one, or 127.0.0.1"
PROBLEMS_SHOWN = 100
NAMED_MAX = 256
"""Maximum number of groups, and of channels, of one run.

Searches go over all groups, and recursion follows a chain of them.
"""
SCHEMA_VERSION = 1
"""The only ``schema_version`` that this release reads."""
NBYTES_MAX = 1 << 60
_KEY_NCHARS = 100
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")


@dataclass(frozen=True)
class Place:
    """Position of a value in the config, which collects the problems found there.

    :param base: base of relative folders.
    :param home: default folder of runs' state (default: ``base``).
    """

    base: Path
    path: tuple[str, ...] = ()
    problems: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    home: Path | None = None

    def at(self, *keys: str) -> Place:
        """Return the place of a value below this one.

        Both share one list of problems.
        """
        return replace(self, path=(*self.path, *keys))

    def problem(self, message: str) -> UnsetType:
        """Add a problem of the value at this place to the common list, and return
        UNSET."""
        keys = (key if len(key) <= _KEY_NCHARS else f"{key[: _KEY_NCHARS - 3]}..." for key in self.path)
        where = ".".join(key if _BARE_KEY.fullmatch(key) else json.dumps(key) for key in keys)
        shown = one_line(visible(message))
        self.problems.append((self.path, f"{where}: {shown}" if where else shown))
        return UNSET


class Form(NamedTuple):
    """The form of a value: its reader and its description.

    :param read: returns the resolved value of ``(place, value)``, or UNSET after adding
        a problem.
    :param type: its kind, and :param range: its allowed values, in words for a
        reference.
    """

    read: Callable[[Place, object], Any]
    type: str
    range: str = ""


def checked(what: str, form: Form, value: object) -> Any:
    """Return what ``form`` reads from a value outside a file, such as an option.

    :param what: its name in the message, such as ``--label``.
    :raises replicas.errors.UsageError: ``form`` does not accept the value.
    """
    place = Place(Path(), (what,))
    found = form.read(place, value)
    if place.problems:
        raise errors.UsageError(place.problems[0][1])
    return found


def form(type: str, range: str = "") -> Callable[[Callable[[Place, object], Any]], Form]:
    """Return a decorator that makes a :class:`Form` of the reader below it.

    :param type: the kind of the values, and :param range: those allowed, in words.
    """
    return lambda read: Form(read, type, range)


def show(value: object) -> str:
    """Return any value as JSON or Python text, cut to 60 characters; never raise."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except Exception:  # noqa: BLE001  # any method of a foreign object may raise
        text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean "x"?`` for the known name that is nearest to ``word``. If
    none is near, list some names; "" for a very long word."""
    names = list(known)
    if len(word) > _KEY_NCHARS:
        return ""
    # "nproc" is too short to be close
    begun = [known_name for known_name in names if word and known_name.startswith(word)]
    found = begun if len(begun) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if found:
        return f'; did you mean "{found[0]}"?'
    return "; known: " + list_text([f'"{known_name}"' for known_name in names], 12) if names else ""


def whole(least: int, most: int = RANKS_MAX) -> Form:
    """Return a form (the reader of a value) that accepts ints from ``least`` to
    ``most``."""

    def read(place: Place, value: object) -> Any:
        """Return ``value`` if it is an int in the range.

        For any other value add a problem to ``place``, and return UNSET.
        """
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            return place.problem(f"expected a whole number of at least {least}, got {show(value)}")
        return value if value <= most else place.problem(f"expected at most {most:,}, got {show(value)}")

    return Form(read, "whole number", f"{least} to {most:,}")


@form("port", "0 to 65535")
def port(place: Place, value: object) -> Any:
    """Return ``value`` if it is a port; else add a problem to ``place``, and return
    UNSET."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535:
        return value
    return place.problem(f"expected a port from 0 to 65535, got {show(value)}")


@form("whole number", str(SCHEMA_VERSION))
def schema_version(place: Place, value: object) -> Any:
    """Return ``value`` if it is 1; else add a problem to ``place``, and return
    UNSET."""
    if value == SCHEMA_VERSION and type(value) is int:
        return value
    return place.problem(f"expected {SCHEMA_VERSION}, the only version that this release reads, got {show(value)}")


def one_of(*words: str) -> Form:
    """Return a form (the reader of a value) that accepts one of these strings."""
    listed = ", ".join(f'"{word}"' for word in words[:-1]) + f' or "{words[-1]}"'

    def read(place: Place, value: object) -> Any:
        """Return ``value`` if it is one of the form's words.

        For any other value add a problem to ``place``, and return UNSET.
        """
        if isinstance(value, str) and value in words:
            return value
        close = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
        hint = f'; did you mean "{close[0]}"?' if close else ""
        return place.problem(f"expected {listed}, got {show(value)}{hint}")

    return Form(read, "string", listed)


@form("name", "at most 63 letters, digits, '-', '_' and '.'")
def name(place: Place, value: object) -> Any:
    """Return ``value`` if it is usable as folder, metric label and part of
    ``group/replica/rank``; else add a problem to ``place``, and return UNSET."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    return place.problem(f"expected a name of at most 63 letters, digits, '-', '_' and '.', got {show(value)}")


def _strings(place: Place, value: object, what: str) -> Any:
    """Return ``value``, a list of strings, as a tuple.

    For any other value add a problem to ``place``, and return UNSET.

    :param what: the expected strings, for the problem.
    """
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    return place.problem(f"expected a list of {what}, got {show(value)}")


@form("list of group names", f"at most {NAMED_MAX}")
def names(place: Place, value: object) -> Any:
    """Return group names as a tuple; else add a problem to ``place``, return UNSET."""
    found = _strings(place, value, "group names")
    if found is not UNSET and len(found) > NAMED_MAX:
        return place.problem(f"expected at most {NAMED_MAX} group names, got {len(found):,}")
    return found


@form("list of strings")
def command(place: Place, value: object) -> Any:
    """Return ``value``, the words of a command, as a tuple.

    For any other value add a problem to ``place``, and return UNSET.
    """
    words = _strings(place, value, 'strings such as ["train.py", "--steps", "200"]')
    if words is UNSET:
        return words
    if not words or not words[0]:
        return place.problem("is empty; name a program")
    if words == ("-m",):
        return place.problem('the name of a module must follow "-m"')
    if any("\0" in word for word in words):
        return place.problem("contains a NUL character")
    return words


@form("list of modules", 'each as in an import, such as "torch"')
def modules(place: Place, value: object) -> Any:
    """Return names of modules as a tuple, or UNSET if they are not a list of strings;
    add a problem to ``place`` for that, and for each bad name, which stays."""
    found = _strings(place, value, 'modules such as ["torch", "transformers"]')
    for one in () if found is UNSET else found:
        if not all(part.isidentifier() for part in one.split(".")):
            place.problem(f'expected modules such as "torch", got {show(one)}')
    return found


@form("list of options", 'each as one string, such as "--account=grpo"')
def options(place: Place, value: object) -> Any:
    """Return options for another program's script, as a tuple; add a problem to
    ``place`` for each that is not one line with a dash. Return UNSET if they are not a
    list of strings."""
    words = _strings(place, value, 'options such as ["--account=grpo"]')
    for word in () if words is UNSET else words:
        if not word.startswith("-") or not word.isprintable():
            place.problem(f'expected options such as "--account=grpo", got {show(word)}')
    return words


@form("table of strings")
def environment(place: Place, value: object) -> Any:
    """Return environment variables by name, without those that are not strings; return
    UNSET if ``value`` is not a table. Add a problem to ``place`` for each of both; it
    shows no value, as that may be a secret."""
    if not isinstance(value, Mapping):
        return place.problem('expected a table of strings such as { NAME = "value" }')
    for variable, text in value.items():
        if not isinstance(text, str):
            place.at(str(variable)).problem("expected a string; put its value in quotes")
    return {str(variable): text for variable, text in value.items() if isinstance(text, str)}


@form("table of labels", "names of at most 63 letters, digits, '-', '_' and '.', also as values")
def labels(place: Place, value: object) -> Any:
    """Return labels of a node, such as ``{ pool = "rollout" }``, without bad values, or
    UNSET if ``value`` is not a table. Add a problem to ``place`` for that, and for each
    bad name or value."""
    if not isinstance(value, Mapping):
        return place.problem(f'expected a table such as {{ pool = "rollout" }}, got {show(value)}')
    read = {str(key): name.read(place.at(str(key)), text) for key, text in value.items()}
    for key in read:
        name.read(place.at(key), key)
    return {key: text for key, text in read.items() if text is not UNSET}


@form("true or false")
def flag(place: Place, value: object) -> Any:
    """Return ``value`` if a bool; else add a problem to ``place``, return UNSET."""
    return value if isinstance(value, bool) else place.problem(f"expected true or false, got {show(value)}")


@form("number")
def number(place: Place, value: object) -> Any:
    """Return a number as a float; else add a problem to ``place``, return UNSET."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return place.problem(f"expected a number, got {show(value)}")


@form("share", 'above 0 % and below 100 %, such as "10%" or 0.1')
def share(place: Place, value: object) -> Any:
    """Return the share ``value`` as a float between 0 and 1.

    For any other value add a problem to ``place``, and return UNSET.
    """
    found = in_units(value, {"%": 0.01})
    if isinstance(value, float):
        found = value
    if found is None or not 0 < found < 1:
        return place.problem(f'expected a share above 0 % and below 100 %, such as "10%" or 0.1, got {show(value)}')
    return found


def in_units(text: object, units: Mapping[str, float]) -> float | None:
    """Return the number of a text such as ``1.5h`` in base units; None for other texts.

    :param units: the factor of each unit.
    """
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    return float(match[1]) * units[match[2]] if match is not None and match[2] in units else None


def duration(least: float = 0.0, *, zero: bool = False) -> Form:
    """Return a form (the reader of a value) of durations, such as ``"500ms"``,
    ``"30s"`` or a number of seconds. It accepts 0 only with ``zero``, and reads them as
    seconds.

    :param least: the smallest accepted number of seconds.
    """

    def read(place: Place, value: object) -> Any:
        """Return the seconds of the duration ``value``, or UNSET after adding a problem
        to ``place``."""
        seconds = value if isinstance(value, float) else in_units(value, UNITS_S)
        if isinstance(value, int) and not isinstance(value, bool):
            seconds = float(min(max(value, -1), _BEYOND_S))  # ints may be too large for a float
        if seconds is None or not math.isfinite(seconds):
            return place.problem(f'expected a duration such as "500ms", "30s" or "10m", got {show(value)}')
        if seconds > SECONDS_MAX:
            return place.problem(f"expected a duration of at most {SECONDS_MAX:g} seconds, got {show(value)}")
        if seconds < 0 or (seconds == 0 and not zero):
            return place.problem(f"expected a duration {'of 0 or more' if zero else 'above 0'}, got {show(value)}")
        if seconds < least:
            return place.problem(f"expected a duration of at least {least:g} seconds, got {show(value)}")
        return seconds

    lowest = f"{least:g} s" if least else "0" if zero else "above 0"
    return Form(read, "duration", f"{lowest} to {SECONDS_MAX:,.0f} s")


def size(least: int = 1) -> Form:
    """Return a form (the reader of a value) of sizes, at least ``least`` bytes:
    ``"64MiB"``, or a number of bytes."""

    def read(place: Place, value: object) -> Any:
        """Return the bytes of the size ``value``, or UNSET after adding a problem to
        ``place``."""
        nbytes = value if isinstance(value, int) and not isinstance(value, bool) else in_units(value, _UNITS_NBYTES)
        if nbytes is None or nbytes == math.inf:
            return place.problem(f'expected a size such as "64MiB" or "8GiB", got {show(value)}')
        if nbytes > NBYTES_MAX:
            return place.problem(f"expected a size of at most {NBYTES_MAX:,} bytes, got {show(value)}")
        if nbytes < least:
            return place.problem(f"expected a size of at least {least} bytes, got {show(value)}")
        return int(nbytes)

    return Form(read, "size", f"{least:,} bytes to {NBYTES_MAX >> 60} EiB")


def no_text(path: Path) -> str:
    """Return the text of the problem that the path is not UTF-8; it asks to rename
    it."""
    return f"the name of {visible(str(path))} is not UTF-8 text; rename it"


def path(what: str) -> Form:
    """Return a form (the reader of a value) of paths: absolute, links resolved. The
    file need not exist; a relative path is relative to the config's folder.

    :param what: "file" or "folder", for messages.
    """

    def read(place: Place, value: object) -> Any:
        """Return the absolute path that ``value`` names, or UNSET after adding a
        problem to ``place``."""
        if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
            try:
                found = Path(place.base, Path(value).expanduser()).resolve()
                return found if encodable(str(found)) else place.problem(no_text(found))
            except (OSError, RuntimeError) as error:
                return place.problem(f"{show(value)} is not a usable {what}: {error}")
        return place.problem(f"expected a {what}, got {show(value)}")

    return Form(read, f"path of a {what}")


folder = path("folder")


@form("IP address or host name", "one address of this machine")
def address(place: Place, value: object) -> Any:
    """Return an IP address to listen on, or a host name, which is resolved later.

    Return UNSET after adding a problem, also for an address that means all addresses.
    """
    found = ip_address(value)
    if found is None and not (isinstance(value, str) and _HOST_NAME.fullmatch(value)):
        return place.problem(f'expected an IP address such as "127.0.0.1", or a host name, got {show(value)}')
    return _every_address(place, found) if found is not None and found.is_unspecified else str(found or value)


@form('"host:port"', "one host; port 0 to 65535")
def listen(place: Place, value: object) -> Any:
    """Return ``(host, port)`` from ``"host:port"`` or ``"[ipv6]:port"``.

    Return UNSET after adding a problem, also for a host that means all addresses.
    """
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    found = ip_address(host)
    numeric = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not numeric or not (found is not None and found.version == 6 if bracketed else _HOST_NAME.fullmatch(host)):
        return place.problem(f'expected "host:port" such as "127.0.0.1:9477" (port 0 to 65535), got {show(value)}')
    if host == "0" or (found is not None and found.is_unspecified):
        return _every_address(place, host)
    return host, int(port)


def ip_address(text: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of this text, None if it is not an IP address."""
    try:
        return ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, or ``localhost``; resolve no other name."""
    found = ip_address(host)
    return host == "localhost" if found is None else found.is_loopback


def _every_address(place: Place, found: object) -> Any:
    """Add a problem to ``place``: the address ``found`` (such as ``0.0.0.0``) means all
    addresses of this machine. Return UNSET, always."""
    return place.problem(f"{found} means every address of this machine; other machines need a certain one: {NAME_ONE}")

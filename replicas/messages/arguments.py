"""Arguments of the public API, each turned into its wire form in the call that was
given it, or refused there by its name.

Theory of operation
===================

What a call hands on travels to other processes, or is waited with on another thread;
there is nobody there who could be told that it is of no use. So each public method
passes its arguments through here first. A function takes the argument's name for the
message (``what``) and the value, and gives a plain int, float, bool, str or dict,
within the bounds that the other side checks (:mod:`replicas.messages.bounds`), or
raises :class:`~replicas.errors.UsageError`: one bad call fails alone.

Numbers are those that say so themselves: whole ones by ``__index__``, seconds by
``__index__`` or ``__float__``; so numpy's and torch's scalars will do, and a bool, a
text or a complex number will not. Takes no torch.
"""

from __future__ import annotations

import math
import numbers
import operator
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from replicas import errors
from replicas.messages import Meta
from replicas.messages.bounds import (
    INFO_ENTRIES,
    INFO_LENGTH,
    INTEGER_MAX,
    META_NBYTES,
    SECONDS_MAX,
    VERSION_MAX,
    encodable,
    is_name,
    plain,
    shown,
)

__all__ = [
    "bound",
    "endpoint",
    "flag",
    "integer",
    "integers",
    "meta",
    "name",
    "patience",
    "seconds",
    "text",
    "texts",
    "token",
]

_TOKEN_LENGTH = 4096


def _refuse(text: str, hint: str = "", cause: BaseException | None = None) -> NoReturn:
    raise errors.UsageError(text, hint=hint) from cause


def integer(what: str, value: object, *, least: int = -INTEGER_MAX, most: int = INTEGER_MAX) -> int:
    """A whole number from ``least`` to ``most``."""
    found, cause = None, None
    if not isinstance(value, bool) and not _is_bool(value):
        try:
            found = operator.index(value)  # type: ignore[arg-type]  # that is the question
        except Exception as error:  # noqa: BLE001  # somebody else's __index__
            cause = error
    if found is None or not least <= found <= most:
        _refuse(f"{what} must be a whole number from {least} to {most}, not {shown(value)}", cause=cause)
    return found


def integers(what: str, value: object) -> tuple[int, ...]:
    """Whole numbers, one for each dimension."""
    found: tuple[object, ...]
    try:
        found = tuple(value)  # type: ignore[arg-type]  # that is the question
    except Exception as error:  # noqa: BLE001  # somebody else's
        _refuse(f"{what} must be a sequence of whole numbers, not {shown(value)}", cause=error)
    return tuple(integer(what, one) for one in found)


def seconds(what: str, value: object, *, zero: bool = False) -> float:
    """A finite time above 0 (or of ``zero``), of at most 1e9 seconds."""
    found = _float(value)
    if found is None or not (found > 0 or (zero and found == 0)) or found > SECONDS_MAX:
        above = "0" if zero else "above 0"
        _refuse(f"{what} must be a number of seconds from {above} to {SECONDS_MAX:g}, not {shown(value)}")
    return found


def patience(what: str, value: object) -> float | None:
    """How long somebody waits: None is for ever, what is below 0 is over, and no other
    is longer than 1e9 seconds."""
    if value is None:
        return None
    found = _float(value)
    if found is None or not -SECONDS_MAX <= found <= SECONDS_MAX:
        _refuse(
            f"{what} must be a finite number of seconds, at most {SECONDS_MAX:g}, not {shown(value)}",
            "pass None to wait as long as it takes",
        )
    return max(0.0, found)


def bound(what: str, value: object) -> tuple[int | float, str]:
    """A version's number, or a number by its name in ``meta``: the number, and the name
    or an empty text. None: no bound."""
    if value is None:
        return 0, ""
    if not isinstance(value, (tuple, list)):
        return integer(what, value, least=0, most=VERSION_MAX), ""
    if len(value) != 2 or not isinstance(value[0], str) or not value[0]:
        _refuse(f"{what} must be a version's number or a pair of a key of meta and a number, not {shown(value)}")
    key, number = value
    found = _scalar(what, number)
    if isinstance(found, (bool, str)) or found is None or not math.isfinite(found):
        _refuse(f"{what}: the bound of meta[{shown(key)}] must be a finite number, not {shown(number)}")
    return found, text(f"{what}: a key", key)


def _float(value: object) -> float | None:
    """A real number; None for what is none."""
    if isinstance(value, (bool, str, bytes, bytearray)) or _is_bool(value) or getattr(value, "ndim", 0) != 0:
        return None
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # that is the question
    except Exception:  # noqa: BLE001  # somebody else's __float__
        return None


def _is_bool(value: object) -> bool:
    """Whether it is a bool of numpy's or torch's."""
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def flag(what: str, value: object) -> bool:
    """True or False."""
    if isinstance(value, bool):
        return value
    try:
        if _is_bool(value) or operator.index(value) in (0, 1):  # type: ignore[arg-type]  # that is the question
            return bool(value)
    except Exception:  # noqa: BLE001, S110  # somebody else's; refused below, as all others
        pass
    _refuse(f"{what} must be True or False, not {shown(value)}")


def text(what: str, value: object, *, most: int = INFO_LENGTH) -> str:
    """A text of at most ``most`` characters that UTF-8 can say."""
    if not isinstance(value, str) or len(value) > most or not encodable(value):
        _refuse(f"{what} must be a text of at most {most} characters, all of which UTF-8 can say, not {shown(value)}")
    return plain(value)


def name(what: str, value: object) -> str:
    """A name of a channel or a group."""
    if not isinstance(value, str) or not is_name(value):
        _refuse(f"{what} must be a name of at most 128 visible characters without a slash, not {shown(value)}")
    return plain(value)


def token(what: str, value: object) -> str:
    """A run's token, which no message shows."""
    good = isinstance(value, str) and value.isascii() and value.isprintable() and value == value.strip()
    if not isinstance(value, str) or not good or not 0 < len(value) <= _TOKEN_LENGTH:
        _refuse(f"{what} must be a text of 1 to {_TOKEN_LENGTH} visible ASCII characters")
    return plain(value)


def endpoint(what: str, value: object) -> str:
    """``host:port`` of a control port."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(" /?#@\\") and encodable(value):
        try:
            found = urllib.parse.urlsplit(f"ws://{value}/")
            if found.hostname and found.port and value.rpartition(":")[2].isascii():
                return plain(value)
        except ValueError:
            pass  # refused below, as all others
    _refuse(f"{what} must be host:port, not {shown(value)}", "e.g. 127.0.0.1:9477")


def texts(what: str, value: object) -> dict[str, str]:
    """Some short texts, by name."""
    try:
        found = dict(value)  # type: ignore[call-overload]  # that is the question
    except Exception as error:  # noqa: BLE001  # somebody else's mapping
        _refuse(f"{what} must map text to text, not be {shown(value)}", cause=error)
    if len(found) > INFO_ENTRIES:
        _refuse(f"{what} has {len(found)} entries: at most {INFO_ENTRIES} are taken")
    return {text(f"{what}: a key", key): text(f"{what}[{shown(key)}]", one) for key, one in found.items()}


_META_HINT = "pass scalars, lists and dicts of scalars"


def meta(what: str, value: object) -> Meta:
    """What a publisher says of its weights: scalars, and lists and dicts of scalars, of
    at most 1 MiB in all."""
    try:
        given = dict(value or {})  # type: ignore[call-overload]  # that is the question
    except Exception as error:  # noqa: BLE001  # somebody else's mapping
        _refuse(f"{what} must be a mapping, not {shown(value)}", _META_HINT, error)
    found: Meta = {}
    for key, one in given.items():
        here = f"{what}[{shown(key)}]"
        found[_meta_text(f"{what}: a key", key)] = _meta_value(here, one)
    nbytes = len(msgspec.msgpack.encode(found))
    if nbytes > META_NBYTES:
        _refuse(
            f"{what} takes {nbytes:,} bytes: at most {META_NBYTES:,} travel", "keep it in a file, and pass its path"
        )
    return found


def _meta_value(here: str, value: object) -> Any:
    if isinstance(value, Mapping):
        return {_meta_text(f"{here}: a key", key): _scalar(f"{here}[{shown(key)}]", one) for key, one in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return [_scalar(f"{here}[{number}]", one) for number, one in enumerate(value)]
    return _scalar(here, value)


def _meta_text(what: str, value: object) -> str:
    return text(what, value, most=META_NBYTES)


def _scalar(what: str, value: object) -> bool | int | float | str | None:
    """A value that any other process can have as it is: of numpy's and torch's scalars
    the plain number."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _meta_text(what, value)
    if isinstance(value, int):
        return integer(what, value, least=-(2**63), most=2**64 - 1)
    if isinstance(value, float):
        return float(value)
    if _is_bool(value):
        return flag(what, value)
    if hasattr(type(value), "__index__") and not _is_floating(value):
        return integer(what, value, least=-(2**63), most=2**64 - 1)
    found = _float(value) if hasattr(type(value), "__float__") else None
    if found is None:
        _refuse(f"{what} is {shown(value)}, which cannot travel", _META_HINT)
    return found


def _is_floating(value: object) -> bool:
    """Of a torch tensor, which has both ``__index__`` and ``__float__``."""
    return "float" in str(getattr(value, "dtype", ""))

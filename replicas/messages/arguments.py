"""Validate the public API's arguments and convert them to their wire form.

They are sent to other processes, or used later on another thread, where an error could
not reach the caller. A function takes the argument's name for the message (``what``)
and the value. It returns a plain int, float, bool, str or dict within the limits that
the other side checks (:mod:`replicas.messages.bounds`), or raises
:class:`~replicas.errors.UsageError`: only the bad call fails.

Integers are accepted by ``__index__``, seconds by ``__index__`` or ``__float__``; so
numpy's and torch's scalars are valid, while a bool, a text or a complex number is not.
Does not import torch.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from replicas import errors
from replicas.messages import Meta, bounds
from replicas.messages.bounds import encodable, is_name, plain, shown

_TOKEN_LENGTH = 4096
Class = TypeVar("Class")
Word = TypeVar("Word", bound=str)


def _refuse(text: str, hint: str = "", cause: BaseException | None = None) -> NoReturn:
    """Raise UsageError with this text and hint.

    :param hint: what the caller can do about it; "" for nothing.
    :param cause: the exception that it follows from, or None.
    """
    raise errors.UsageError(text, hint=hint) from cause


def refuse_unknown_keywords(api: type[Class]) -> type[Class]:
    """Make public methods of a class raise UsageError, not TypeError, for unknown
    keywords.

    A class decorator: it replaces the methods of ``api`` by wrappers, and returns
    ``api``. The error names the known keywords. (Some methods take a ``deadline``,
    others a ``timeout``.)
    """
    for name, method in [*vars(api).items()]:
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(api, name, _named(f"{api.__name__}.{name}", method, [*inspect.signature(method).parameters][1:]))
    return api


def _named(what: str, method: Callable[..., Any], known: Sequence[str]) -> Callable[..., Any]:
    """Return ``method`` wrapped: a call with a keyword not in ``known`` raises
    UsageError.

    :param what: the method's name in the error.
    :param known: names of the method's parameters.
    """

    @functools.wraps(method)
    def checked(*given: object, **by_name: object) -> object:
        """Call the method, and return its result.

        Raise UsageError if a keyword is unknown.
        """
        if wrong := by_name.keys() - known:
            _refuse(f"{what} takes no {', '.join(sorted(wrong))}", f"it takes: {', '.join(known) or 'nothing'}")
        return method(*given, **by_name)

    return checked


def integer(what: str, value: object, *, least: int = -bounds.INTEGER_MAX, most: int = bounds.INTEGER_MAX) -> int:
    """Return ``value`` as an int from ``least`` to ``most``, or raise UsageError.

    Any type with ``__index__`` will do, such as numpy's, but no bool.

    :param what: the argument's name in the error.
    """
    found, cause = None, None
    if not isinstance(value, bool) and not _is_bool(value):
        try:
            found = operator.index(value)  # type: ignore[arg-type]  # tested here
        except Exception as error:  # noqa: BLE001  # a foreign __index__
            cause = error
    if found is None or not least <= found <= most:
        _refuse(f"{what} must be a whole number from {least} to {most}, not {shown(value)}", cause=cause)
    return found


def integers(what: str, value: object) -> tuple[int, ...]:
    """Return ``value``, an iterable such as a shape, as a tuple of ints.

    :param what: the argument's name in the error.
    :raises replicas.errors.UsageError: it is no iterable, or an item is no integer.
    """
    try:
        found: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]  # tested here
    except Exception as error:  # noqa: BLE001  # a foreign __iter__
        _refuse(f"{what} must be a sequence of whole numbers, not {shown(value)}", cause=error)
    return tuple(integer(what, one) for one in found)


def seconds(what: str, value: object, *, zero: bool = False, least: float = 0.0) -> float:
    """Return ``value`` as a float of at most 1e9 seconds, or raise UsageError.

    :param what: the argument's name in the error.
    :param zero: also accept 0; otherwise the value must be above 0.
    :param least: the smallest value to accept.
    """
    found = _float(value)
    if found is None or not (found > 0 or (zero and found == 0)) or not least <= found <= bounds.SECONDS_MAX:
        above = f"{least:g}" if least else "0" if zero else "above 0"
        _refuse(f"{what} must be a number of seconds from {above} to {bounds.SECONDS_MAX:g}, not {shown(value)}")
    return found


def patience(what: str, value: object) -> float | None:
    """Return a timeout as seconds from 0 to 1e9, or raise UsageError.

    A negative value becomes 0; None (no limit) stays None.

    :param what: the argument's name in the error.
    """
    if value is None:
        return None
    found = _float(value)
    if found is None or not -bounds.SECONDS_MAX <= found <= bounds.SECONDS_MAX:
        _refuse(
            f"{what} must be a finite number of seconds, at most {bounds.SECONDS_MAX:g}, not {shown(value)}",
            "pass None to wait as long as it takes",
        )
    return max(0.0, found)


def bound(what: str, value: object) -> tuple[int | float, str]:
    """Return the lower bound of a receive as (number, key), or raise UsageError.

    With the key "" the number is the lowest version that will do. With another key it
    is the lowest value that will do of that key in the publisher's ``meta``.

    :param what: the argument's name in the error.
    :param value: a version's number, a pair of a key and a number, or None, which gives
        ``(0, "")``.
    """
    if value is None:
        return 0, ""
    if not isinstance(value, (tuple, list)):
        return integer(what, value, least=0, most=bounds.VERSION_MAX), ""
    if len(value) != 2 or not isinstance(value[0], str) or not value[0]:
        _refuse(f"{what} must be a version's number or a pair of a key of meta and a number, not {shown(value)}")
    key, number = value
    found = _scalar(what, number)
    if isinstance(found, (bool, str)) or found is None or not math.isfinite(found):
        _refuse(f"{what}: the bound of meta[{shown(key)}] must be a finite number, not {shown(number)}")
    return found, text(f"{what}: a key", key)


def finite(what: str, value: object) -> float:
    """Return ``value`` as a finite float, or raise UsageError.

    :param what: the argument's name in the error.
    """
    found = _float(value)
    if found is None or not math.isfinite(found):
        _refuse(f"{what} must be a finite number, not {shown(value)}")
    return found


def _float(value: object) -> float | None:
    """Return the value as a float; None if it is a bool, a text, or not one real
    number.

    It may be NaN or infinite.
    """
    if isinstance(value, (bool, str, bytes, bytearray)) or _is_bool(value) or getattr(value, "ndim", 0) != 0:
        return None
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)  # type: ignore[arg-type]  # tested here
    except Exception:  # noqa: BLE001  # a foreign __float__
        return None


def _is_bool(value: object) -> bool:
    """Return True if the value is a bool of numpy or torch; False for Python's own."""
    return str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def flag(what: str, value: object) -> bool:
    """Return ``value`` as a bool, or raise UsageError.

    Bools of Python, numpy and torch, and 0 and 1, are accepted.

    :param what: the argument's name in the error.
    """
    if isinstance(value, bool):
        return value
    try:
        if _is_bool(value) or operator.index(value) in (0, 1):  # type: ignore[arg-type]  # tested here
            return bool(value)
    except Exception:  # noqa: BLE001, S110  # a foreign method; refused below
        pass
    _refuse(f"{what} must be True or False, not {shown(value)}")


def text(what: str, value: object, *, most: int = bounds.INFO_LENGTH) -> str:
    """Return ``value`` as a plain str of at most ``most`` characters, or raise
    UsageError.

    It must be a str that can be encoded in UTF-8.

    :param what: the argument's name in the error.
    """
    if not isinstance(value, str) or len(value) > most or not encodable(value):
        _refuse(f"{what} must be a text of at most {most} characters that UTF-8 can encode, not {shown(value)}")
    return plain(value)


def name(what: str, value: object) -> str:
    """Return ``value`` as a plain str if it can name a channel or group: 1 to 128
    printable characters without a slash. Else raise UsageError.

    :param what: the argument's name in the error.
    """
    if not isinstance(value, str) or not is_name(value):
        _refuse(f"{what} must be a name of at most 128 visible characters without a slash, not {shown(value)}")
    return plain(value)


def one_of(what: str, value: object, known: Sequence[Word]) -> Word:
    """Return the word of ``known`` that equals ``value``.

    Raise UsageError if there is none.

    :param what: the argument's name in the error, which lists the known words.
    """
    for word in known:
        if isinstance(value, str) and value == word:
            return word
    _refuse(f"{what} must be one of {', '.join(known)}, not {shown(value)}")


def token(what: str, value: object) -> str:
    """Return ``value`` as a plain str if it can be a run's token (a secret).

    :raises replicas.errors.UsageError: the value cannot be a token; the error names
        the argument as ``what``, and does not show the value.
    """
    good = isinstance(value, str) and value.isascii() and value.isprintable() and value == value.strip()
    if not isinstance(value, str) or not good or not 0 < len(value) <= _TOKEN_LENGTH:
        _refuse(f"{what} must be a text of 1 to {_TOKEN_LENGTH} visible ASCII characters")
    return plain(value)


def endpoint(what: str, value: object) -> str:
    """Return ``value`` as a plain str if it is ``host:port``, or raise UsageError.

    It is not resolved, nor connected to.

    :param what: the argument's name in the error.
    """
    if isinstance(value, str) and value.isprintable() and not set(value) & set(" /?#@\\") and encodable(value):
        try:
            found = urllib.parse.urlsplit(f"ws://{value}/")
            if found.hostname and found.port and value.rpartition(":")[2].isascii():
                return plain(value)
        except ValueError:
            pass  # refused below
    _refuse(f"{what} must be host:port, not {shown(value)}", "e.g. 127.0.0.1:9477")


def texts(what: str, value: object) -> dict[str, str]:
    """Return a mapping of texts as a dict of plain strs. Raise UsageError if it is
    another type, has too many entries, or a key or text is too long.

    :param what: the argument's name in the error.
    """
    try:
        found = dict(value)  # type: ignore[call-overload]  # tested here
    except Exception as error:  # noqa: BLE001  # a foreign mapping
        _refuse(f"{what} must map text to text, not be {shown(value)}", cause=error)
    if len(found) > bounds.INFO_ENTRIES:
        _refuse(f"{what} has {len(found)} entries, above the limit of {bounds.INFO_ENTRIES}")
    texts = {text(f"{what}: a key", key): text(f"{what}[{shown(key)}]", one) for key, one in found.items()}
    _check_size(what, texts, bounds.INFO_NBYTES)
    return texts


def _check_size(what: str, found: object, most: int, hint: str = "") -> None:
    """Raise UsageError if ``found``, encoded as MessagePack, has more than ``most``
    bytes.

    :param what: the argument's name in the error. :param hint: the remedy in the error.
    """
    nbytes = len(msgspec.msgpack.encode(found))
    if nbytes > most:
        _refuse(f"{what} takes {nbytes:,} bytes, above the limit of {most:,}", hint)


_META_HINT = "pass scalars, lists and dicts of scalars"


def meta(what: str, value: object) -> Meta:
    """Return a publisher's ``meta`` (facts about a version) as plain data.

    :param what: the argument's name in the error.
    :param value: a mapping of texts to scalars, or to lists or dicts of scalars; None
        gives {}.
    :raises replicas.errors.UsageError: the value is something else, or above 1 MiB.
    """
    try:
        given = dict(value or {})  # type: ignore[call-overload]  # tested here
    except Exception as error:  # noqa: BLE001  # a foreign mapping
        _refuse(f"{what} must be a mapping, not {shown(value)}", _META_HINT, error)
    found: Meta = {}
    for key, one in given.items():
        here = f"{what}[{shown(key)}]"
        found[text(f"{what}: a key", key, most=bounds.META_NBYTES)] = _meta_value(here, one)
    _check_size(what, found, bounds.META_NBYTES, "keep it in a file, and pass its path")
    return found


def with_adapter(
    what: str, given: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None, adapter: object, weights: object
) -> Meta | Callable[[], Mapping[str, Any]]:
    """Return a publisher's ``meta`` with two entries added, if there is an adapter: its
    name as ``adapter``, and its configuration as ``adapter_config``.

    A mapping is checked, and returned as a dict. For a function return a function that
    calls it and adds the two; it is not called here, and what it returns is not
    checked.

    :param what: name of the publisher's call, for errors.
    :param given: the meta, or the user's function that returns it.
    :param adapter: name of the LoRA adapter; None: there is none.
    :param weights: the published weights, which have ``adapter_config`` (a text).
    :raises replicas.errors.UsageError: a value is not valid.
    """
    if adapter is None:
        return given if callable(given) else meta(f"{what}: meta", given)
    config = getattr(weights, "adapter_config", None)
    if not isinstance(config, str):
        _refuse(f"{what}: adapter={shown(adapter)} of weights without adapter_config", 'pass hf(model, adapter="only")')
    added = {"adapter": name(f"{what}: adapter", adapter), "adapter_config": config}
    if callable(given):
        function = given
        return lambda: {**function(), **added}
    return meta(f"{what}: meta", {**meta(f"{what}: meta", given), **added})


def with_trace(what: str, given: Meta | Callable[[], Mapping[str, Any]]) -> Meta | Callable[[], Mapping[str, Any]]:
    """Return ``given`` with an entry ``traceparent`` (W3C) added: the OpenTelemetry
    span that is open on this thread during this call.

    Without such a span, return ``given`` itself. An entry ``traceparent`` that
    ``given`` has already is kept.

    :param what: name of the publisher's call, for errors.
    :param given: the meta, or a function that returns it. A function is not called
        here: return a function that calls it and adds the entry.
    :raises replicas.errors.UsageError: the meta is too large with the entry.
    """
    tracing = sys.modules.get("opentelemetry.trace")
    caller = tracing.get_current_span().get_span_context() if tracing is not None else None
    if caller is None or not caller.is_valid:
        return given
    added = {"traceparent": f"00-{caller.trace_id:032x}-{caller.span_id:016x}-{caller.trace_flags:02x}"}
    if not callable(given):
        return meta(f"{what}: meta", added | given)
    function = given

    def traced() -> Mapping[str, Any]:
        """Call the user's function; return its meta with the ``traceparent`` added, or
        its result as it is if that is another type."""
        found = function()
        return {**added, **found} if isinstance(found, Mapping) else found

    return traced


def _meta_value(here: str, value: object) -> Any:
    """Return one value of a publisher's ``meta`` as plain data, or raise UsageError.

    A mapping becomes a dict, other collections a list; these may have scalars only.

    :param here: the value's name in the error, such as ``meta['step']``.
    """
    if isinstance(value, Mapping):
        return {
            text(f"{here}: a key", key, most=bounds.META_NBYTES): _scalar(f"{here}[{shown(key)}]", one)
            for key, one in value.items()
        }
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return [_scalar(f"{here}[{number}]", one) for number, one in enumerate(value)]
    return _scalar(here, value)


def _scalar(what: str, value: object) -> bool | int | float | str | None:
    """Return ``value`` as a plain scalar, also if it is numpy's or torch's.

    :param what: the value's name in the error.
    :raises replicas.errors.UsageError: it is no scalar, too large, NaN or infinite.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(what, value, most=bounds.META_NBYTES)
    if _is_bool(value):
        return flag(what, value)
    floating = "float" in str(getattr(value, "dtype", ""))  # floating tensors have __index__, too
    if hasattr(type(value), "__index__") and not floating:
        return integer(what, value, least=-(2**63), most=2**64 - 1)
    found = _float(value) if hasattr(type(value), "__float__") else None
    if found is None:
        _refuse(f"{what} is {shown(value)}, which cannot be sent", _META_HINT)
    if not math.isfinite(found):
        _refuse(
            f"{what} is {found}, which JSON has no number for", 'leave it out, or pass None or a text such as "nan"'
        )
    return found

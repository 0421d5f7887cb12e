"""Describe every key of a config file, for the reference page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from replicas.config import tables as config_tables
from replicas.config.structs import Config
from replicas.config.values import Form

__all__ = ["Key", "keys"]

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NBYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


@dataclass(frozen=True)
class Key:
    """A key of the file.

    :param name: dotted, with ``NAME`` for the name of a group or a channel.
    :param type: in words, and so ``range``, which is empty for any value.
    :param default: as in a file, or in words; ``required``: there is none.
    :param sentence: what it sets, and ``when`` to set it, empty where that is obvious.
    """

    name: str
    type: str
    default: str
    range: str
    sentence: str
    when: str


def keys() -> list[Key]:
    """Return all keys, without tables, in the order of the config's structs."""
    return list(_keys(Config, ""))


def _keys(kind: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    for name, key in config_tables.keys_of(kind).items():
        if isinstance(key.type, list):
            yield from _keys(key.type[0], f"{prefix}{name}.NAME.")
        elif isinstance(key.type, Form):
            default = key.doc.default or _default(key.type, key.default)
            yield Key(prefix + name, key.type.type, default, key.type.range, key.doc.sentence, key.doc.when)
        else:
            yield from _keys(key.type, f"{prefix}{name}.")


def _default(form: Form, value: Any) -> str:
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "none"
    if value in ((), {}):
        return "empty"
    if units := {"duration": _SECONDS, "size": _NBYTES}.get(form.type):
        unit = next(unit for unit, many in units.items() if value % many == 0)
        return f'"{value / units[unit]:g}{unit}"'
    return f'"{value}"' if isinstance(value, str) else str(value)

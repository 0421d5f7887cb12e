"""The page of config keys, from the structs that are its schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from replicas.config import tables as config_tables
from replicas.config.structs import Config
from replicas.config.values import Form
from tests.support.reference.source import fields
from tests.support.reference.text import bullets, markdown

__all__ = ["Key", "body", "keys"]

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NBYTES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


@dataclass(frozen=True)
class Key:
    """A key of the file: its dotted name, with ``NAME`` for the name of a group or a
    channel; its type, default and range (empty: any value) in words; what it sets, and
    when to set it (empty: that is obvious)."""

    name: str
    type: str
    default: str
    range: str
    sentence: str
    when: str


def keys() -> list[Key]:
    """All keys, without tables, in the order of the config's structs."""
    return list(_keys(Config, ""))


def _keys(kind: type[msgspec.Struct], prefix: str) -> Iterator[Key]:
    docs = fields(kind)
    for name, key in config_tables.keys_of(kind).items():
        if isinstance(key.type, list):
            yield from _keys(key.type[0], f"{prefix}{name}.NAME.")
        elif isinstance(key.type, Form):
            default = key.more.default or _default(key.type, key.default)
            sentence, *when = re.split(r" (?=Set |Raise )", " ".join(docs[key.field].split()), maxsplit=1)
            yield Key(prefix + name, key.type.type, default, key.type.range, sentence, "".join(when))
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
        unit = next(unit for unit, many in units.items() if value % many == 0) if value else list(units)[-1]
        return f'"{value / units[unit]:g}{unit}"'
    return f'"{value}"' if isinstance(value, str) else str(value)


def body() -> str:
    intro = markdown(
        """A config is a TOML file with ``schema_version = 1``. An unknown key is an error
        that names the nearest key; ``replicas check CONFIG`` shows every problem at once.
        ``NAME`` stands for the name of a group or channel."""
    )
    tables: dict[str, list[Key]] = {}
    for key in keys():
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    return "\n\n".join([intro, *(_table(name, found) for name, found in tables.items())])


def _table(name: str, found: list[Key]) -> str:
    return "\n\n".join([f"## `[{name}]`" if name else "## Top level", *map(_entry, found)])


def _entry(key: Key) -> str:
    facts = [f"type: {key.type}", f"default: {key.default}"]
    facts += [f"range: {key.range}"] if key.range else []
    words = f"{key.sentence} {key.when}".strip()
    return f"### `{key.name}`\n\n{markdown(words)}\n\n{bullets(facts)}"

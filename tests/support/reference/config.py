"""The page of config keys, from the table by which the config is read."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tests.support.reference.text import bullets, markdown

__all__ = ["available", "body", "rows"]

_MODULE = "replicas.config.reference"


def available() -> bool:
    return importlib.util.find_spec(_MODULE) is not None


def rows() -> list[Any]:
    """Each key of a config file: its name, type, default, range, sentence, and when it
    is needed."""
    found: list[Any] = importlib.import_module(_MODULE).keys()
    return found


def body() -> str:
    intro = markdown(
        """A config is a TOML file with ``schema_version = 1``. An unknown key is an error
        that names the nearest key; ``replicas check CONFIG`` shows every problem at once.
        ``NAME`` stands for the name of a group or channel."""
    )
    tables: dict[str, list[Any]] = {}
    for key in rows():
        tables.setdefault(key.name.rpartition(".")[0], []).append(key)
    return "\n\n".join([intro, *(_table(name, found) for name, found in tables.items())])


def _table(name: str, found: list[Any]) -> str:
    return "\n\n".join([f"## `[{name}]`" if name else "## Top level", *map(_entry, found)])


def _entry(key: Any) -> str:
    facts = [f"type: {key.type}", f"default: {key.default}"]
    facts += [f"range: {key.range}"] if key.range else []
    words = f"{key.sentence} {key.when}".strip()
    return f"### `{key.name}`\n\n{markdown(words)}\n\n{bullets(facts)}"

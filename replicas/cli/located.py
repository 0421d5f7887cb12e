"""Find the state folder of a run in its config file, which need not be valid.

A run must be visible and stoppable while its config is being edited. Two values suffice
for that, ``name`` and ``state_dir`` of ``[run]``; in a file that is not valid TOML, the
lines that look like these values are used.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas.config import values as config_values
from replicas.errors import BadConfig
from replicas.messages.bounds import clean

__all__ = ["state_dir_of"]

_TABLE = re.compile(r"\s*\[+\s*([^\[\]]*?)\s*\]+\s*(?:#.*)?")
_VALUE = re.compile(r"""\s*(name|state_dir)\s*=\s*(?:"([^"\\]*)"|'([^']*)')\s*(?:#.*)?""")


def state_dir_of(path: Path) -> Path | None:
    """The absolute state folder by the config at ``path``; None: not in the file.

    :raises BadConfig: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        words = error.strerror if isinstance(error, OSError) else error
        raise BadConfig([f"cannot be read: {words}"], source=clean(str(path))) from error
    base = path.resolve().parent
    run = _run_table(text)
    place = config_values.Place(base)
    if "state_dir" in run:
        found = config_values.folder.read(place, run["state_dir"])
    else:
        found = config_values.name.read(place, run.get("name"))
        found = None if place.problems else base / ".replicas" / found
    return None if place.problems else found


def _run_table(text: str) -> Mapping[str, Any]:
    try:
        run = tomllib.loads(text).get("run", {})
    except (ValueError, RecursionError):  # not TOML, or excessive numbers or nesting
        return _scanned(text)
    return run if isinstance(run, dict) else {}


def _scanned(text: str) -> dict[str, str]:
    table, found = "", dict[str, str]()
    for line in text.splitlines():
        if heading := _TABLE.fullmatch(line):
            table = heading[1]
        elif table == "run" and (value := _VALUE.fullmatch(line)):
            found[value[1]] = value[2] if value[2] is not None else value[3]
    return found

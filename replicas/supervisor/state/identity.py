"""A state folder's identity: a random id, in the environment of its runs' processes.

A path is no identity: two containers that share their processes have the same paths,
and a folder that was removed and made again is a different one under the same name.
Standard library only.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from replicas.linux import private

__all__ = ["ID_FILE", "give_identity", "identity_of"]

ID_FILE = "id"
_FORM = re.compile(rb"[0-9a-f]{32}")


def identity_of(folder: Path) -> str:
    """The id of this state folder; empty: none.

    :raises OSError: the file cannot be read, or is another user's.
    """
    try:
        found = private.read(folder / ID_FILE).strip()
    except FileNotFoundError:
        return ""
    return found.decode() if _FORM.fullmatch(found) else ""


def give_identity(folder: Path) -> str:
    """The id of this state folder, created if missing. Hold the run's lock.

    :raises OSError: the file cannot be read or written.
    """
    found = identity_of(folder)
    if not found:
        found = secrets.token_hex(16)
        private.replace(folder / ID_FILE, found.encode())
    return found

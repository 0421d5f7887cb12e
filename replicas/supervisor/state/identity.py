"""What a state folder is known by: a random id in it, which the processes of its runs
have in their environment.

A path is no identity. Two containers that share their processes have the same paths,
and a folder that was removed and made again is another one, whatever its name. Standard
library only.
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
    """The id of this state folder; empty: it has none.

    :raises OSError: the file cannot be read, or is somebody else's.
    """
    try:
        found = private.read(folder / ID_FILE).strip()
    except FileNotFoundError:
        return ""
    return found.decode() if _FORM.fullmatch(found) else ""


def give_identity(folder: Path) -> str:
    """The id of this state folder, which gets one if it has none. For whoever holds the
    run's lock.

    :raises OSError: the file cannot be read or written.
    """
    found = identity_of(folder)
    if not found:
        found = secrets.token_hex(16)
        private.replace(folder / ID_FILE, found.encode())
    return found

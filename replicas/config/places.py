"""Locate a config file and its run's state folder, across switched symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["absolute", "state_home"]


def absolute(path: Path) -> Path:
    """Return an absolute path that keeps its symbolic links.

    Also those in the path of the current folder, as far as the shell tells (``PWD``).
    """
    if path.is_absolute():
        return path
    told = Path(os.environ.get("PWD", ""))
    here = Path.cwd()
    try:
        logical = told if told.is_absolute() and told.samefile(here) else here
    except OSError:  # PWD no longer exists
        logical = here
    return logical / path


def state_home(folder: Path) -> Path:
    """Return the default folder for the state of runs whose configs are in ``folder``.

    It is ``folder`` itself, resolved. But a symbolic link to a place below its own
    folder (``current -> releases/7``) is switched with each release: then it is the
    link's own folder, so that the state, and the lock that makes a run unique, stay.

    :param folder: an absolute path.
    """
    root = here = Path(folder.anchor)
    for part in folder.parts[1:]:
        step = here / part
        there = step.resolve()
        if here != root and step.is_symlink() and here in there.parents:
            return here
        here = there
    return here

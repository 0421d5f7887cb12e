"""Where a config file lies, and the state of its run: on a way that may go through
symbolic links which are switched."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["absolute", "state_home"]


def absolute(path: Path) -> Path:
    """``path`` from the root, with its symbolic links: those of the way to the current
    folder, too, as far as the shell tells (``PWD``).
    """
    if path.is_absolute():
        return path
    told = Path(os.environ.get("PWD", ""))
    here = Path.cwd()
    try:
        logical = told if told.is_absolute() and told.samefile(here) else here
    except OSError:  # it is gone
        logical = here
    return logical / path


def state_home(folder: Path) -> Path:
    """The folder in which runs whose configs are in ``folder`` have their state by
    default: that folder itself, resolved.

    A symbolic link that leads to a place below its own folder (``current ->
    releases/7``) is one that is switched, from one release to the next: then it is the
    link's own folder. The state stays, and so does the lock that makes a run one.

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

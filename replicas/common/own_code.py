"""Make child processes import the same copy of this package. Standard library only.

They are started by module name and without the working folder on their path (``-P``),
as other users' files may lie there. A package outside an installation's folders, such
as a checkout, would then not be found, or another release would be.
"""

from __future__ import annotations

import os
import site
from collections.abc import Mapping, MutableMapping
from pathlib import Path

__all__ = ["findable", "undo", "without"]

_HOME = str(Path(__file__).parents[2])
_PATH = "PYTHONPATH"


def findable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with this package's folder first on ``PYTHONPATH``.

    Unchanged where every interpreter of this installation finds the package anyway.
    """
    if _HOME in (*site.getsitepackages(), site.getusersitepackages()):  # first, it would shadow the standard library
        return dict(environment)
    return {**environment, _PATH: os.pathsep.join(filter(None, (_HOME, environment.get(_PATH))))}


def undo(environment: MutableMapping[str, str]) -> None:
    """Undo :func:`findable` in the environment of a process that got it."""
    if _HOME in (*site.getsitepackages(), site.getusersitepackages()):
        return
    first, _, rest = environment.get(_PATH, "").partition(os.pathsep)
    if first == _HOME:
        without(environment, {_PATH: rest} if rest else {})


def without(environment: MutableMapping[str, str], meant: Mapping[str, str]) -> None:
    """Undo :func:`findable` for a user's program: restore the path of ``meant``."""
    if _PATH in meant:
        environment[_PATH] = meant[_PATH]
    else:
        environment.pop(_PATH, None)

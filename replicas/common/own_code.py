"""Have the processes that we start run the code that runs here. Standard library only.

They are started by module name and without the working folder on their path (``-P``),
in which anybody's files may lie. So a package that lies in no folder of an installation
(a checkout, from which somebody runs it) would not be found, or another release of it
would.
"""

from __future__ import annotations

import os
import site
from collections.abc import Mapping, MutableMapping
from pathlib import Path

__all__ = ["findable", "without"]

_HOME = str(Path(__file__).parents[2])
_PATH = "PYTHONPATH"


def findable(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment``, with this package's folder first on the path, unless every
    interpreter of ours looks there anyway."""
    if _HOME in (*site.getsitepackages(), site.getusersitepackages()):  # named first, it would hide standard modules
        return dict(environment)
    return {**environment, _PATH: os.pathsep.join(filter(None, (_HOME, environment.get(_PATH))))}


def without(environment: MutableMapping[str, str], meant: Mapping[str, str]) -> None:
    """Undo :func:`findable` for the programs of users: have the path in ``environment``
    as it is in ``meant``."""
    if _PATH in meant:
        environment[_PATH] = meant[_PATH]
    else:
        environment.pop(_PATH, None)

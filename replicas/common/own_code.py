"""Make child processes import the same copy of this package. Standard library only.

They are started by module name and without the working folder on their path (``-P``),
as it may have other users' files. A package outside an installation's folders, such as
a checkout, would then not be found, or another release would be.
"""

from __future__ import annotations

import os
import site
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_HOME = str(Path(__file__).parents[2])
_PATH = "PYTHONPATH"


def rooted(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """Return a copy of ``environment`` whose ``PYTHONPATH`` has absolute entries only.

    For helper processes, which start in another folder. An empty entry stays: it means
    the working folder of the process that reads it.

    :param folder: base of relative entries; default: this process's working folder.
    """
    path = environment.get(_PATH, "")
    if all(not entry or entry.startswith("/") for entry in path.split(os.pathsep)):
        return dict(environment)
    try:
        here = folder or os.getcwd()  # noqa: PTH109  # no Path is needed
    except FileNotFoundError:  # the working folder was removed, with its files
        return dict(environment)
    entries = (os.path.join(here, entry) if entry else "" for entry in path.split(os.pathsep))  # noqa: PTH118  # as above
    return {**environment, _PATH: os.pathsep.join(entries)}


def findable(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """Return a copy of ``environment`` in which a child finds this copy of the package.

    ``PYTHONPATH`` gets absolute entries (:func:`rooted`), and first this package's
    folder, unless this Python's interpreters find the package anyway.

    :param folder: base of relative entries; default: this process's working folder.
    """
    found = rooted(environment, folder)
    if _HOME in (*site.getsitepackages(), site.getusersitepackages()):  # first, it would shadow the standard library
        return found
    return {**found, _PATH: os.pathsep.join(filter(None, (_HOME, found.get(_PATH))))}


def undo(environment: MutableMapping[str, str]) -> None:
    """Remove this package's folder from ``PYTHONPATH`` of ``environment``, in place.

    For a process that was started with the environment of :func:`findable`. Relative
    entries stay absolute, as its children have other working folders, too. Do nothing
    if that folder is not the first entry.
    """
    if _HOME in (*site.getsitepackages(), site.getusersitepackages()):
        return
    first, _, rest = environment.get(_PATH, "").partition(os.pathsep)
    if first == _HOME:
        restore_path(environment, {_PATH: rest} if rest else {})


def restore_path(environment: MutableMapping[str, str], meant: Mapping[str, str]) -> None:
    """Set ``PYTHONPATH`` of ``environment``, in place, to its value in ``meant``, the
    environment that the process should have.

    Remove the variable if ``meant`` does not have it.
    """
    if _PATH in meant:
        environment[_PATH] = meant[_PATH]
    else:
        environment.pop(_PATH, None)

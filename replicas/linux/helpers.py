"""Start this library's own processes, with only the environment that they need.

The working folder of a helper is ``/``. The folder of its starter may be removed or
unmounted while both run (torch cannot even be loaded in such a folder), and would be
kept busy. Variables with ``PET_`` are options of another torchrun. Standard library
only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicas import errors
from replicas.common import own_code

TORCHRUN = "PET_"
"""Prefix of variables that torchrun takes for its options."""


def interpreter() -> str:
    """Return the path of the Python executable that runs this library's processes.

    :raises replicas.errors.UsageError: ``sys.executable`` is not an interpreter, and
        the folders of this Python have none.
    """
    named = sys.executable or ""
    if Path(named).name.startswith(("python", "pypy")):
        return named
    # A program that embeds Python (uwsgi) has its own path there, or "".
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix))
    names = (f"python{sys.version_info.major}.{sys.version_info.minor}", f"python{sys.version_info.major}")
    found = (
        str(path) for prefix in prefixes for name in names if os.access(path := Path(prefix, "bin", name), os.X_OK)
    )
    if chosen := next(found, ""):
        return chosen
    text = f"no Python interpreter for helper processes: sys.executable is {named!r}, and there is none in "
    raise errors.UsageError(
        text + " or ".join(prefixes), hint="set sys.executable to the path of an interpreter that has this package"
    )


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` in this interpreter.

    ``-P`` keeps the working folder off its import path.
    """
    return [interpreter(), "-P", "-m", module, *arguments]


def popen_arguments(environment: Mapping[str, str], folder: str = "") -> dict[str, Any]:
    """Return keyword arguments of :class:`subprocess.Popen` for a process of ours.

    They are working folder ``/``, environment, empty stdin, and a session of its own.

    :param environment: its environment; variables of torchrun (``PET_``) are left out,
        and the path of this package is added.
    :param folder: base of relative entries of ``PYTHONPATH``; default: the working
        folder.
    """
    return {
        "cwd": "/",
        "env": own_code.findable(
            {name: environment[name] for name in environment if not name.startswith(TORCHRUN)}, folder
        ),
        "stdin": subprocess.DEVNULL,
        "start_new_session": True,
    }

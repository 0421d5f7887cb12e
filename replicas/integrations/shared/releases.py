"""Check that a framework's release is one that its integration supports.

The ranges are those of this package's extras (``pip install torch-replicas[verl]``),
read from its own metadata, so they are declared only there.
"""

from __future__ import annotations

import importlib.metadata
import re

from replicas import errors

__all__ = ["check", "outside"]

_DISTRIBUTION = "torch-replicas"


def check(name: str) -> None:
    """Raise UsageError if the installed release of ``name`` is not one that this
    package's extra ``name`` allows; return if there is no metadata."""
    try:
        found = importlib.metadata.version(name)
        wanted = _range(name, importlib.metadata.requires(_DISTRIBUTION) or [])
    except importlib.metadata.PackageNotFoundError:  # run from a source tree: no metadata
        return
    if outside(found, wanted):
        text = f"{name} {found} is installed, and this integration is written for {name}{wanted}"
        raise errors.UsageError(text, hint=f'pip install "{_DISTRIBUTION}[{name}]" installs one of those')


def outside(release: str, wanted: str) -> bool:
    """Return True if a release does not satisfy ``wanted``, a range such as
    ``>=0.9,<0.10``.

    Only numbers are compared: ``0.9.1.post1`` and ``0.9.1+cpu`` are 0.9.1, and a
    release without numbers is in every range.
    """
    found = _numbers(release)
    if not found:
        return False
    for sign, bound in re.findall(r"(>=|<)\s*([0-9.]+)", wanted):
        below = found < _numbers(bound)
        if below == (sign == ">="):
            return True
    return False


def _range(name: str, requirements: list[str]) -> str:
    """Return the version range of the extra ``name``, such as ``>=0.9,<0.10``, or an
    empty text if there is none.

    :param requirements: lines ``Requires-Dist`` of this package's metadata.
    """
    for line in requirements:
        required = re.match(
            rf"""{re.escape(name)}(\[[^]]*\])?\s*\(?([^;)]*)\)?\s*;.*extra\s*==\s*["']{name}["']""", line
        )
        if required:
            return required[2].strip()
    return ""


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release: (0, 9, 1) for ``0.9.1rc1``, without trailing
    zeros."""
    public = re.match(r"v?(\d+(?:\.\d+)*)", release)
    numbers = [int(part) for part in public[1].split(".")] if public else []
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)

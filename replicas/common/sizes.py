"""Texts of sizes, counts and names."""

from __future__ import annotations

import re
from collections.abc import Sequence


def size_text(nbytes: float) -> str:
    """Return a size as three digits and a binary unit: ``1.5 KiB``, ``269 MiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}"


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 file``, ``2 files``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def list_text(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names as a text, with the number of further ones.

    For instance ``a, b, c and 4 more``.
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def snake_case(name: str) -> str:
    """Return a name of CamelCase in snake_case: ``MemberLost`` as ``member_lost``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()

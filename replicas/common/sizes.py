"""Sizes in words."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """Three digits and a binary unit: ``0 B``, ``1.5 KiB``, ``269 MiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}"

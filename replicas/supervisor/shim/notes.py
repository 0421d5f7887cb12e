"""Notes of the shim and its helpers in their own log. Standard library only."""

from __future__ import annotations

import contextlib
import os

__all__ = ["note"]


def note(text: str) -> None:
    """Write a line to stderr; ignore errors, as stderr's disk may be full."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))

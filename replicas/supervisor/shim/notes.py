"""What the shim and its helpers have to say to their own log. Standard library only."""

from __future__ import annotations

import contextlib
import os

__all__ = ["note"]


def note(text: str) -> None:
    """A line on stderr. That is a file, and its disk may be full: whoever says
    something must not die of it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))

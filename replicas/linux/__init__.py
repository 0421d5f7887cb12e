"""This library runs on Linux alone: pidfds, memfds, /proc and parent-death signals are
what it is made of.

Whoever imports a part that needs them elsewhere gets one sentence, not the first name
that is missing.
"""

from __future__ import annotations

import sys

__all__ = ["LinuxOnly", "require"]


class LinuxOnly(ImportError):
    """This is another system."""


def require() -> None:
    """:raises LinuxOnly: on any other system."""
    if not sys.platform.startswith("linux"):
        raise LinuxOnly(
            f"replicas runs on Linux only, and this is {sys.platform}: use a Linux machine, virtual machine or container"
        )

"""Linux facilities (pidfds, memfds, cgroups, ``/proc``), and a check for the system.

On other systems, importing a part of the library that needs them raises one clear error
instead of an ImportError for the first missing name. The modules know processes, files
and sockets, not replicas or versions.
"""

from __future__ import annotations

import sys

__all__ = ["LinuxOnly", "require"]


class LinuxOnly(ImportError):
    """This library was imported on a system other than Linux."""


def require() -> None:
    """Raise :class:`LinuxOnly` if this system is not Linux; called at import."""
    if not sys.platform.startswith("linux"):
        raise LinuxOnly(
            f"replicas runs on Linux only, and this is {sys.platform}: use a Linux machine, virtual machine or container"
        )

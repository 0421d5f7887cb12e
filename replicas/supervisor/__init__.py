"""The asyncio shell round the pure core: it starts replicas through shims, restarts
them, and leaves nothing behind.

``Supervisor`` is loaded when first used, so that the shim and the launcher, which live
in this package too, stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas import linux

if TYPE_CHECKING:
    from replicas.supervisor.supervisor import Supervisor

__all__ = ["Supervisor"]

linux.require()


def __getattr__(name: str) -> object:
    if name == "Supervisor":
        from replicas.supervisor.supervisor import Supervisor

        return Supervisor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

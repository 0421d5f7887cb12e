"""The asyncio shell of the pure core: start, watch, restart and end replicas via shims.

``Supervisor`` is imported on first use: the shim and the launcher live in this package,
too, and must stay small.
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

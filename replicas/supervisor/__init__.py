"""The supervisor of a run: start, watch, restart and end its replicas.

:class:`Supervisor` (orders, status) -> ``fleet`` (groups, replicas, nodes) -> ``agent``
(a process on each node) -> ``shim`` (a process for each part) -> the user's programs;
reports and logs come back the same way. ``state`` and ``cleanup`` cover a kill.

It does not import torch, and does not move weights: the coordinator and the ranks do.
``Supervisor`` is imported on first use, because the shim and the launcher live in this
package, too, and must stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas import linux

if TYPE_CHECKING:
    from replicas.supervisor.supervisor import Supervisor

__all__ = ["Supervisor"]

linux.require()


def __getattr__(name: str) -> object:
    """Import and return :class:`Supervisor` at its first use.

    Python calls it for names that this package lacks; other names raise AttributeError.
    """
    if name == "Supervisor":
        from replicas.supervisor.supervisor import Supervisor

        return Supervisor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

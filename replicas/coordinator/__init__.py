"""The coordinator: asyncio sessions, store process and decision log around the core.

A connection -> door (queue) -> visits (token) -> websocket -> server, limits (checks)
-> engine -> :class:`~replicas.core.channel_state.ChannelState` -> effects -> decision
log, then the outboxes of sessions. :class:`Coordinator` shows an example.

All of it runs on one event loop. It decides nothing about versions, which is the core's
part, and starts no replicas, which is the supervisor's. Names load their modules when
first used, because the store process lives in this package and needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from replicas import linux

if TYPE_CHECKING:
    from replicas.coordinator.coordinator import Coordinator
    from replicas.coordinator.readiness import Readiness
    from replicas.core.base.effects import Event
    from replicas.core.members.roster import GroupShape

__all__ = ["Coordinator", "Event", "GroupShape", "Readiness"]

_HOMES = {
    "Coordinator": "replicas.coordinator.coordinator",
    "Event": "replicas.core.base.effects",
    "GroupShape": "replicas.core.members.roster",
    "Readiness": "replicas.coordinator.readiness",
}

linux.require()


def __getattr__(name: str) -> object:
    """Return the exported object called ``name``; import its module at the first use.

    :raises AttributeError: the package exports nothing of that name.
    """
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)

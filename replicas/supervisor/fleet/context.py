"""What the parts of one supervisor share: the fleet, its replicas and the nodes.

Each part is given the one :class:`FleetContext` of the run, and the few other parts
that it works with. Tests build a context of fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from replicas import environ, errors
from replicas.config.structs import Config
from replicas.control.socket import SOCKET_FILE
from replicas.coordinator import Coordinator
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.fleet.awaited import Awaited
from replicas.supervisor.fleet.causes import WaitReports
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.state.state import StateDir
from replicas.supervisor.wire.orders import PartSpec
from replicas.telemetry.events import Event


class Save(Protocol):
    def __call__(self, *, order: bool = False) -> bool:
        """Save the state that must survive a kill now; False: it could not be.

        :param order: for good, or WorldError: then the order is refused.
        """
        ...


class Neighbours(Protocol):
    """What a replica asks of the fleet, where other replicas are concerned."""

    def size(self, group: str) -> int: ...
    def waits_for(self, group: str, replica: int, *, first: bool) -> str:
        """What the start of a replica waits for, as in "waits ..."; empty: its share is
        now taken, which a reload may have changed.

        A group that restarts as a whole waits for its last replica, a ``first`` start
        also for other groups.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """Restart the other replicas of a group that restarts as a whole."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """True if this generation made a new step or version; None: on no channel."""
        ...

    def moved(self, transition: Transition) -> None: ...


def _no_agent(spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
    raise OSError("no node has joined")


@dataclass(kw_only=True)
class FleetContext:
    """The shared parts of one run's supervisor. For the event loop's thread only.

    :ivar config: the config in use; a reload replaces it.
    :ivar emit: takes each event of the run.
    :ivar say: takes a line for people.
    :ivar spawn: runs a coroutine function in a task until the supervisor ends.
    :ivar start_shim: starts a shim on the node that its replica holds; is given the
        spec, and what to call after each change. OSError: it cannot be started.
    :ivar changed: set when the fleet's monitor should look at once.
    """

    config: Config
    state: StateDir
    resources: Resources
    emit: Callable[[Event], None]
    say: Callable[[str], None]
    save: Save
    spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
    opened: Coordinator | None = None
    """The coordinator, once it is made."""
    start_shim: Callable[[PartSpec, Callable[[], None]], ShimHandle] = _no_agent
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waits: WaitReports = field(default_factory=WaitReports)
    awaited: Awaited = field(init=False)
    """What of earlier supervisors keeps replicas from starting."""

    def __post_init__(self) -> None:
        self.awaited = Awaited(self.state.leases)

    @property
    def coordinator(self) -> Coordinator:
        """The run's coordinator. UsageError: the supervisor has not been entered."""
        if self.opened is None:
            raise errors.UsageError("the supervisor is not running", hint="use it with `async with`")
        return self.opened

    @property
    def door(self) -> Path:
        """The path of the run's Unix socket."""
        return self.config.control.socket or self.state.path / SOCKET_FILE

    def look(self) -> None:
        """Wake the fleet's monitor: something has changed."""
        self.changed.set()

    def on_channel(self, group: str) -> bool:
        return any(group in one.groups for one in self.config.channels.values())

    def environment(self) -> Mapping[str, str]:
        """What each process of the run has in its environment."""
        return {
            environ.ENDPOINT: self.coordinator.endpoint,
            environ.TOKEN_FILE: str(self.state.token_file),
            environ.RUN: self.config.run.name,
            environ.STATE_ID: self.state.identity,
        }

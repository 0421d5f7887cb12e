"""The context that the parts of one supervisor share: fleet, replicas, nodes.

Each part gets the run's :class:`FleetContext`, and the few other parts that it uses.
Tests build a context of fakes.
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
        """Save the state that must survive a kill. Return False if that fails.

        :param order: sync it to disk, and raise WorldError if that fails.
        """
        ...


class Neighbours(Protocol):
    """The fleet's methods for a replica, about other replicas."""

    def size(self, group: str) -> int: ...
    def waits_for(self, group: str, replica: int, *, first: bool) -> str:
        """Return what the start of a replica waits for ("waits ..."), or "" when its
        share of the nodes is taken.

        A group that restarts as a whole waits for its last replica; a ``first`` start
        also waits for other groups.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """Restart the other replicas of a group that restarts as a whole."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Return True if this generation made a new step or version, None if it is on
        no channel."""
        ...

    def moved(self, transition: Transition) -> None: ...


def _no_agent(spec: PartSpec, changed: Callable[[], None]) -> ShimHandle:
    raise OSError("no node has joined")


@dataclass(kw_only=True)
class FleetContext:
    """The shared parts of one run's supervisor. For the event loop's thread only.

    :ivar config: the config in use; a reload replaces it.
    :ivar emit: called with each event of the run.
    :ivar say: called with a line for people.
    :ivar spawn: runs a coroutine function in a task until the supervisor ends.
    :ivar start_shim: ``start_shim(spec, changed)`` starts a shim on the node that its
        replica holds, and calls ``changed`` after each change; raises OSError.
    :ivar changed: set to wake the fleet's monitor.
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
    """Processes of earlier supervisors for which replicas wait."""

    def __post_init__(self) -> None:
        self.awaited = Awaited(self.state.leases)

    @property
    def coordinator(self) -> Coordinator:
        """The run's coordinator; UsageError before the supervisor is entered."""
        if self.opened is None:
            raise errors.UsageError("the supervisor is not running", hint="use it with `async with`")
        return self.opened

    @property
    def door(self) -> Path:
        """The path of the run's Unix socket."""
        return self.config.control.socket or self.state.path / SOCKET_FILE

    def wake_monitor(self) -> None:
        """Wake the fleet's monitor after a change."""
        self.changed.set()

    def on_channel(self, group: str) -> bool:
        return any(group in one.groups for one in self.config.channels.values())

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of all processes of the run."""
        return {
            environ.ENDPOINT: self.coordinator.endpoint,
            environ.TOKEN_FILE: str(self.state.token_file),
            environ.RUN: self.config.run.name,
            environ.STATE_ID: self.state.identity,
        }

"""The context that the parts of one supervisor share: fleet, replicas, nodes.

Each part gets the run's :class:`FleetContext`, and the few other parts that it uses.
Tests build a context of fakes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from replicas import environ, errors
from replicas.common.reason import Reason
from replicas.config.structs import Config
from replicas.control.socket import SOCKET_FILE
from replicas.coordinator import Coordinator
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.fleet.awaited import PredecessorWaits
from replicas.supervisor.fleet.causes import WaitReports
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.state.state import StateDir
from replicas.supervisor.wire.orders import PartSpec
from replicas.telemetry.events import Event

_TURNS_FOR_EACH_CORE = 2


class Save(Protocol):
    """A function that writes the run's state to disk."""

    def __call__(self, *, order: bool = False) -> bool:
        """Save the state that must survive a kill. Return False if that fails.

        :param order: sync it to disk, and raise WorldError if that fails.
        """
        ...


class Neighbours(Protocol):
    """The fleet's methods for a replica, about other replicas."""

    def size(self, group: str) -> int:
        """Return the wanted number of replicas of a group."""

    def waits_for(self, group: str, replica: int, *, first: bool) -> Reason | None:
        """Assign nodes and GPUs to a replica and return None, or return why it waits.

        The reason is the text after "waits", such as ``for 2 nodes (1 there)``. A group
        that restarts as a whole waits for its last replica; a ``first`` start also
        waits for other groups.
        """
        ...

    def restart_group_with(self, group: str, replica: int, text: str) -> None:
        """Restart the group's other replicas if ``[restart] strategy`` is "group".

        :param replica: index of the replica that has failed.
        :param text: why it has failed.
        """
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Return whether the replica's present generation made a new step or version.

        If the group restarts as a whole, that of any of its replicas counts. None if
        unknown, for example because the replica is on no channel.
        """
        ...

    def on_transition(self, transition: Transition) -> None:
        """Report a replica's new state; free its resources if it has settled.

        Called after each transition, on the event loop; does not wait.
        """


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
    start_shim: Callable[[PartSpec, Callable[[], None]], ShimHandle]
    opened: Coordinator | None = None
    """The coordinator, once it is made."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waits: WaitReports = field(default_factory=WaitReports)
    turns: asyncio.Semaphore = field(init=False)
    """Limits concurrent starts, which load the event loop and the cores."""
    awaited: PredecessorWaits = field(init=False)
    """Processes of earlier supervisors for which replicas wait."""

    def __post_init__(self) -> None:
        """Make the limit of concurrent starts, and begin without awaited processes."""
        self.turns = asyncio.Semaphore(_TURNS_FOR_EACH_CORE * len(os.sched_getaffinity(0)))
        self.awaited = PredecessorWaits(self.state.leases)

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
        """Wake the fleet's monitor, which then checks all replicas."""
        self.changed.set()

    def on_channel(self, group: str) -> bool:
        """Return True if the group is on any channel of the config."""
        return any(group in one.groups for one in self.config.channels.values())

    def environment(self) -> Mapping[str, str]:
        """Return the run's variables for the environment of all rank processes.

        They say how a rank joins the run: endpoint, token file, names.
        """
        return {
            environ.ENDPOINT: self.coordinator.endpoint,
            environ.TOKEN_FILE: str(self.state.token_file),
            environ.RUN: self.config.run.name,
            environ.STATE_ID: self.state.identity,
        }

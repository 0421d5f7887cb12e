"""The supervisor as the fleet sees it, and the fleet as its replicas do.

Tests implement both protocols with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from replicas.config.structs import Config
from replicas.coordinator import Coordinator
from replicas.core.lives.lifecycle import Transition
from replicas.supervisor.fleet.node import Node
from replicas.supervisor.fleet.resources import Resources
from replicas.supervisor.shim.orders import NodeSpec
from replicas.supervisor.state.state import StateDir
from replicas.telemetry.events import Event

__all__ = ["FleetEnvironment", "Host", "ShimStarter"]


class _Ground(Protocol):
    @property
    def state(self) -> StateDir: ...
    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def environment(self) -> Callable[[], Mapping[str, str]]: ...
    @property
    def emit(self) -> Callable[[Event], None]: ...
    @property
    def say(self) -> Callable[[str], None]:
        """Print one human-readable line."""
        ...

    def save(self) -> None:
        """Save the state that must survive a kill now, before what follows."""
        ...


class FleetEnvironment(_Ground, Protocol):
    """The supervisor as the fleet sees it."""

    @property
    def resources(self) -> Resources: ...
    def told(self, transition: Transition, resume_in_s: float) -> None: ...
    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class Host(_Ground, Protocol):
    """The fleet as a replica sees it."""

    @property
    def config(self) -> Config: ...
    def size(self, group: str) -> int: ...
    def share(self, group: str, replica: int, node: int) -> Mapping[str, str]:
        """Environment of one node of a replica with its share of the machine."""
        ...

    def waits_for(self, group: str, replica: int) -> str:
        """What a replica's first start waits for; empty: its share is now taken."""
        ...

    def may_resume(self, group: str, replica: int) -> bool:
        """Whether a replica whose delay is over may start again.

        A group that restarts as a whole waits for its last replica; and the share of
        the machine is taken, which a reload may have changed.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """Handle a failing replica: others of its group may have to end, too."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Whether this generation made a new step or version; None: on no channel."""
        ...

    def on_channel(self, group: str) -> bool: ...
    def moved(self, transition: Transition) -> None: ...


ShimStarter = Callable[[NodeSpec, Callable[[], None], int], Node]
"""Called with the spec, a callback for each change, and the run lock's descriptor."""

"""Protocols of the supervisor, coordinator and shims as a replica sees them.

Tests implement them with fakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from replicas.config.structs import LogsConfig
from replicas.core.lives.lifecycle import Transition
from replicas.core.members.roster import GroupShape
from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.shim.orders import ExitReport, LogLoss, NodeSpec, Remains
from replicas.supervisor.state.state import StateDir
from replicas.telemetry.events import Event

__all__ = ["Host", "Overseer", "Readiness", "ShimHandle", "ShimStarter"]


class Readiness(Protocol):
    """The coordinator's view of one generation of a replica."""

    @property
    def ready(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def heartbeat_age_s(self) -> float | None: ...
    @property
    def versions(self) -> Mapping[str, int]: ...
    @property
    def partial(self) -> bool: ...

    @property
    def stranded(self) -> bool: ...
    @property
    def progressed_s(self) -> float | None: ...


class Overseer(Protocol):
    """The coordinator as a replica sees it."""

    def readiness(self, group: str, replica: int, generation: int) -> Readiness: ...
    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None: ...
    def set_group(self, group: str, shape: GroupShape) -> None: ...
    def set_draining(self, group: str, replica: int, generation: int) -> None: ...
    def busy(self, group: str, replica: int) -> str: ...
    def progress(self, group: str, replica: int) -> tuple[int, ...]: ...


class Host(Protocol):
    """The supervisor as a replica sees it."""

    @property
    def run(self) -> str: ...
    @property
    def state(self) -> StateDir: ...
    @property
    def overseer(self) -> Overseer: ...
    @property
    def logs(self) -> LogsConfig: ...
    def environment(self) -> Mapping[str, str]: ...
    def size(self, group: str) -> int: ...
    def share(self, group: str, replica: int, node: int) -> Mapping[str, str]:
        """Environment of one node of a replica with its share of the machine."""
        ...

    def waits_for(self, group: str, replica: int) -> str:
        """What a replica's first start waits for; empty: its share is now taken."""
        ...

    def may_resume(self, group: str, replica: int) -> bool:
        """Whether a replica whose delay is over may start again.

        A group that restarts as a whole waits for its last replica. If a reload changed
        the replica's share of the machine, the share is taken first.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """Handle a failing replica: others of its group may have to end, too."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Whether this generation made a new step or version; None: on no channel."""
        ...

    def on_channel(self, group: str) -> bool: ...
    def save(self) -> None:
        """Save the state, such as the shims that are about to be started."""
        ...

    def emit(self, event: Event) -> None: ...
    def say(self, text: str) -> None:
        """Print one human-readable line."""
        ...

    def moved(self, transition: Transition, words: str) -> None: ...


class ShimHandle(Protocol):
    """One shim; :class:`replicas.supervisor.fleet.node.Node` implements it."""

    pid: int
    main_pid: int | None
    rendezvous: tuple[str, int] | None
    report: ExitReport | None
    gone: asyncio.Event
    belongings: Belongings
    losses: list[LogLoss]
    """Lost log lines that are not reported yet; the reader takes them out."""

    @property
    def remains(self) -> Remains | None:
        """Processes that SIGKILL has not ended yet."""
        ...

    @property
    def last_stacks(self) -> Mapping[str, str]: ...
    @property
    def cgroup(self) -> str: ...
    async def stacks(self) -> Mapping[str, str]: ...
    def meet(self, host: str, port: int) -> None: ...
    def stop(self, timeout_s: float, *, stacks: bool = False) -> None: ...
    def kill(self) -> None: ...
    def silent_s(self, now: float) -> float: ...
    def abandon(self) -> None: ...


ShimStarter = Callable[[NodeSpec, Callable[[], None], int], ShimHandle]
"""Called with the spec, a callback for each change, and the run lock's descriptor."""

"""What a replica needs of the world around it, as protocols: supervisor, coordinator
and shims, or fakes of them."""

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
    """What the coordinator knows of one generation of a replica."""

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
    """The part of the coordinator that a replica needs."""

    def readiness(self, group: str, replica: int, generation: int) -> Readiness: ...
    def replica_ended(self, group: str, replica: int, generation: int, reason: str) -> None: ...
    def set_group(self, group: str, shape: GroupShape) -> None: ...
    def set_draining(self, group: str, replica: int, generation: int) -> None: ...
    def busy(self, group: str, replica: int) -> str: ...
    def progress(self, group: str, replica: int) -> tuple[int, ...]: ...


class Host(Protocol):
    """The part of the supervisor that a replica needs."""

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
        """Environment of one node of a replica that says what part of the machine is
        its own."""
        ...

    def waits_for(self, group: str, replica: int) -> str:
        """What keeps a replica from its first start, in words; empty: nothing, and what
        it needs is now its own."""
        ...

    def may_resume(self, group: str, replica: int) -> bool:
        """Whether a replica whose delay is over may start again: a group that restarts
        as a whole waits for the last.

        A reload may have changed what it needs of the machine, which is then its own
        first.
        """
        ...

    def fell(self, group: str, replica: int, text: str) -> None:
        """A replica ends badly: others of its group may have to end too."""
        ...

    def progressed(self, group: str, replica: int) -> bool | None:
        """Whether it came to a new step or version in this generation; None: it has
        none to come to."""
        ...

    def on_channel(self, group: str) -> bool: ...
    def save(self) -> None:
        """Write down what must not be forgotten, such as the shims that are about to be
        started."""
        ...

    def emit(self, event: Event) -> None: ...
    def say(self, text: str) -> None:
        """Tell people, in one line."""
        ...

    def moved(self, transition: Transition, words: str) -> None: ...


class ShimHandle(Protocol):
    """One shim, as :class:`replicas.supervisor.fleet.node.Node` is one."""

    pid: int
    main_pid: int | None
    rendezvous: tuple[str, int] | None
    report: ExitReport | None
    gone: asyncio.Event
    belongings: Belongings
    losses: list[LogLoss]
    """Lines of its logs that were lost; whoever tells of them takes them out."""

    @property
    def remains(self) -> Remains | None:
        """What SIGKILL has not ended yet."""
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
"""Called with the spec, what to call at each change, and the descriptor of the run's
lock."""

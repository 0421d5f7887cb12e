"""What a replica needs of the world around it, as protocols: supervisor, coordinator and shims, or fakes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from replicas.core.lifecycle import Transition
from replicas.supervisor.orders import ExitReport, NodeSpec
from replicas.supervisor.state import StateDir

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


class Host(Protocol):
    """The part of the supervisor that a replica needs."""

    @property
    def run(self) -> str: ...
    @property
    def state(self) -> StateDir: ...
    @property
    def overseer(self) -> Overseer: ...
    def environment(self) -> Mapping[str, str]: ...
    def size(self, group: str) -> int: ...
    def may_start(self, group: str) -> bool: ...
    def on_channel(self, group: str) -> bool: ...
    def moved(self, transition: Transition, words: str) -> None: ...


class ShimHandle(Protocol):
    """One shim, as :class:`replicas.supervisor.node.Node` is one."""

    main_pid: int | None
    rendezvous: tuple[str, int] | None
    report: ExitReport | None
    gone: asyncio.Event
    swept: bool

    def meet(self, host: str, port: int) -> None: ...
    def stop(self, timeout_s: float) -> None: ...
    def kill(self) -> None: ...
    def silent_s(self, now: float) -> float: ...
    def abandon(self) -> None: ...


ShimStarter = Callable[[NodeSpec, Callable[[], None], int], ShimHandle]
"""Called with the spec, what to call at each change, and the descriptor of the run's lock."""

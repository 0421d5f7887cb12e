"""The history of a run of `make demo-llm`, for the view and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from servers import Sampler

from replicas.status import ReplicaStatus, RunStatus

__all__ = ["Fault", "History"]


@dataclass
class Fault:
    """A signal to one process of one server.

    :ivar progress: share of the steps at which it is due.
    :ivar in_load: whether it waits for a version that the server is about to load.
    :ivar done_at: monotonic seconds; None: not yet.
    :ivar back_s: seconds until the replica was ready again.
    """

    progress: float
    replica: str
    role: str
    signal: str
    in_load: bool = False
    done_at: float | None = None
    step: int = 0
    generation: int = 0
    back_s: float | None = None


@dataclass
class History:
    """Steps, states and faults of the run, and its problems."""

    steps_wanted: int
    faults: list[Fault]
    steps: list[dict[str, Any]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    status: RunStatus | None = None
    sampler: Sampler | None = None
    exit_code: int | None = None
    wall_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def rewards(self) -> list[float]:
        return [float(step["reward"]) for step in self.steps]

    def servers(self) -> tuple[ReplicaStatus, ...]:
        groups = self.status.groups if self.status else ()
        return next((group.replicas for group in groups if group.name == "server"), ())

    def committed(self) -> int:
        return self.status.channels[0].committed_version if self.status and self.status.channels else 0

    def urls(self) -> dict[str, str]:
        """Return the addresses of the servers whose follower is on the channel, by
        replica."""
        members = self.status.channels[0].members if self.status and self.status.channels else ()
        return {
            one.name.rpartition("/")[0]: one.info["url"]
            for one in members
            if one.state != "gone" and one.role == "target" and "url" in one.info
        }

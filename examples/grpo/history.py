"""The history of a run of the demo: from its ranks' records and the supervisor's
status, for the view and the report."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from records import Record

from replicas.status import ChannelStatus, ReplicaStatus, RunStatus

__all__ = ["History", "Kill", "Step"]

_ENDS = 5
"""Number of steps at each end whose mean is the first and the last reward."""
_RISE = 0.1
"""Least rise of the reward in a successful run."""


@dataclass(frozen=True)
class Step:
    number: int
    time_s: float
    reward: float
    rollouts: int
    sample: str
    version: int | None
    sync_s: float | None
    nbytes: int


@dataclass
class Kill:
    """The rank that the driver killed. ``recovery_s``: seconds until it was ready
    again, with the newest weights loaded."""

    replica: str
    pid: int
    step: int
    time_s: float
    generation: int
    recovery_s: float | None = None
    step_after: int | None = None


@dataclass
class History:
    steps_wanted: int
    steps: list[Step] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)
    failed_syncs: int = 0
    missed: int = 0
    stale: int = 0
    kill: Kill | None = None
    status: RunStatus | None = None
    exit_code: int | None = None
    gave_up: str = ""
    wall_s: float = 0.0

    # ------------------------------------------------------------ writing

    def add(self, record: Record) -> str | None:
        """Add one record; return a line to show, or None."""
        event, source = record["event"], record["source"]
        if event == "step":
            self.steps.append(_step(record))
        elif event == "load":
            return self._loaded(source.replace("-", "/", 1), int(record["version"]))
        elif event == "torn":
            self.torn.append(f"{source}: {record['error']}")
            return f"TORN VERSION {record['version']} on {source}: {record['error']}"
        elif event == "backwards":
            self.backwards.append(f"{record['replica']} sampled with {record['version']} after a newer version")
        elif event == "stale":
            self.stale += 1
        elif event == "missed":
            self.missed += 1
        elif event == "sync_failed" and source == "train":
            self.failed_syncs += 1
            return f"sync after step {record['step']} failed: {record['kind']}: {record['error']}"
        return None

    def _loaded(self, replica: str, version: int) -> str | None:
        before, self.loaded[replica] = self.loaded.get(replica, 0), version
        if version < before:
            self.backwards.append(f"{replica} loaded version {version} after version {before}")
            return f"{replica} WENT BACKWARDS from version {before} to {version}"
        return None

    # ------------------------------------------------------------ reading

    @property
    def step(self) -> int:
        return self.steps[-1].number if self.steps else 0

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    @property
    def sync_seconds(self) -> list[float]:
        return [step.sync_s for step in self.steps if step.sync_s is not None]

    @property
    def reward_first(self) -> float:
        return statistics.fmean(self.rewards[:_ENDS]) if self.steps else 0.0

    @property
    def reward_last(self) -> float:
        return statistics.fmean(self.rewards[-_ENDS:]) if self.steps else 0.0

    def replicas(self, group: str = "") -> list[ReplicaStatus]:
        groups = self.status.groups if self.status else ()
        return [replica for g in groups if group in ("", g.name) for replica in g.replicas]

    @property
    def policy(self) -> ChannelStatus | None:
        """The channel of the weights."""
        channels = self.status.channels if self.status else ()
        return next((channel for channel in channels if channel.name == "policy"), None)

    def problems(self) -> list[str]:
        """Why the demo failed; empty when all is well."""
        found = [f"torn version: {text}" for text in self.torn] + [f"old weights: {text}" for text in self.backwards]
        if self.gave_up:
            found.append(f"given up at step {self.step} of {self.steps_wanted}: {self.gave_up}")
        elif self.exit_code != 0:
            found.append(f"the run ended with exit code {self.exit_code} at step {self.step} of {self.steps_wanted}")
        if self.reward_last < self.reward_first + _RISE:
            found.append(f"the reward did not rise: {self.reward_first:.3f} at first, {self.reward_last:.3f} at last")
        if self.kill is not None and self.kill.recovery_s is None:
            found.append(f"{self.kill.replica} was not ready again before the end of the run")
        return found

    def summary(self) -> dict[str, Any]:
        """The numbers of the table; JSON."""
        syncs = self.sync_seconds
        channel = self.policy
        return {
            "reward_first": round(self.reward_first, 4),
            "reward_last": round(self.reward_last, 4),
            "steps": len(self.steps),
            "versions_committed": channel.committed_version if channel else 0,
            "syncs": dict(channel.syncs) if channel else {},
            "sync_median_s": round(statistics.median(syncs), 4) if syncs else None,
            "sync_worst_s": round(max(syncs), 4) if syncs else None,
            "bytes": channel.bytes_total if channel else 0,
            "restarts": sum(replica.restarts for replica in self.replicas()),
            "killed": self.kill.replica if self.kill else None,
            "recovery_s": round(self.kill.recovery_s, 2) if self.kill and self.kill.recovery_s else None,
            "batches_missed": self.missed,
            "batches_stale": self.stale,
            "torn_versions": len(self.torn),
            "wall_s": round(self.wall_s, 1),
            "exit_code": self.exit_code,
            "problems": self.problems(),
        }


def _step(record: Record) -> Step:
    return Step(
        number=int(record["step"]),
        time_s=float(record["time_s"]),
        reward=float(record["reward"]),
        rollouts=int(record["rollouts"]),
        sample=str(record["sample"]),
        version=record["version"],
        sync_s=record["sync_s"],
        nbytes=int(record["sync_nbytes"]),
    )

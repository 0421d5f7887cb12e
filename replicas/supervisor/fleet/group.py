"""A group of replicas, and the state that outlives its replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Literal

import msgspec

from replicas.common.reason import Reason
from replicas.config.structs import GroupConfig
from replicas.core.lives.ordering import is_done, is_good, is_lost, is_over, needed_replicas
from replicas.core.lives.restarts import Restarts
from replicas.status import GroupStatus, ReplicaState
from replicas.supervisor.fleet.replica import Replica
from replicas.supervisor.state.run_state import SavedGroup, SavedReplica, SavedRestart


class Group:
    """A group's replicas by index, and the state that outlives them.

    :param saved: an earlier supervisor's state of the group.
    :param now: seconds of the loop's clock. :param wall: seconds since 1970.
    """

    def __init__(
        self, config: GroupConfig, *, saved: SavedGroup | None = None, now: float = 0.0, wall: float = 0.0
    ) -> None:
        """Begin without replicas, with the size of the config or of the saved state.

        The saved size counts if the config's number of replicas is the same as then.

        :param saved: an earlier supervisor's state of the group.
        :param now: seconds of the loop's clock. :param wall: seconds since 1970. Both
            serve to restore the times of saved restarts.
        """
        self.config = config
        self.size = self.configured = config.replicas
        """The wanted size, and the number in the config when it was set last.

        A reload sets both only after its rolling restart.
        """
        self.replicas: dict[int, Replica] = {}
        self.rules = Restarts(config.restart)
        self._retired: dict[int, SavedReplica] = {}
        """State of removed replicas, for the next replica of the same index."""
        if saved is not None:
            if saved.configured == config.replicas:
                self.size = saved.size
            self._retired = dict(saved.replicas)
            spent = [(max(0.0, wall - one.at), one.replica) for one in saved.spent]
            cycles = {index: replica.cycles for index, replica in saved.replicas.items()}
            self.rules.restore(spent=spent, cycles=cycles, now=now)

    def saved(self, now: float, wall: float) -> SavedGroup:
        """Return the state of the group that survives a kill of the supervisor.

        :param now: seconds of the loop's clock. :param wall: seconds since 1970.
        """
        cycles = self.rules.cycles
        known = {index: SavedReplica() for index in cycles} | self._retired
        known |= {index: _kept(replica) for index, replica in self.replicas.items()}
        return SavedGroup(
            size=self.size,
            configured=self.configured,
            replicas={
                index: msgspec.structs.replace(one, cycles=cycles.get(index, 0)) for index, one in sorted(known.items())
            },
            spent=tuple(SavedRestart(wall - age, replica) for age, replica in self.rules.ages(now)),
        )

    def use(self, config: GroupConfig) -> None:
        """Use a reloaded config; size and running processes stay as they are."""
        self.config = config
        self.rules.use(config.restart)
        for replica in self.replicas.values():
            replica.group = config

    def enter(self, replica: Replica, *, settled: bool = False) -> None:
        """Add a replica, which continues the state of an earlier one of its index.

        It takes over generation number, counts and the last exit. If the earlier one
        was halted or being ended, the new one is halted or ended, too.

        :param settled: leave a replica that had finished or failed in that state; else
            it starts again.
        """
        self.replicas[replica.index] = replica
        before = self._retired.pop(replica.index, None)
        if before is not None:
            replica.life.generation = max(replica.life.generation, before.generation)
            replica.life.restarts = dict(before.restarts)
            replica.current.last_exit = before.last_exit
            if settled and before.settled:
                replica.life.restore(before.settled, before.last_exit)
            elif before.halted:
                replica.halt()
            elif replica.life.alive:
                replica.current.started_with = before.start
                if before.ending is not None:
                    replica.end_as(before.ending)

    def retire(self, replica: Replica) -> None:
        """Remove an ended replica; keep its state for the next one of its index."""
        del self.replicas[replica.index]
        self._retired[replica.index] = msgspec.structs.replace(_kept(replica), halted=False, settled="")
        self.rules.remove_replica(replica.index)

    def retire_surplus(self, joined: Container[int]) -> None:
        """Remove replicas of an external group that have no members and are too many.

        These have an index beyond the expected number. A replica that waits for a
        program is stopped first; a later call removes it.

        :param joined: indices of the replicas with members.
        """
        for replica in [one for index, one in self.replicas.items() if index >= self.size and index not in joined]:
            if replica.over.is_set():
                self.retire(replica)
            elif replica.life.state == "pending":
                replica.stop(why="its group is smaller now")

    def restarts_by_reason(self) -> dict[str, int]:
        """Return the number of restarts by reason, those of removed replicas too."""
        totals: Counter[str] = Counter()
        retired = (one.restarts for one in self._retired.values())
        for restarts in (*retired, *(replica.life.restarts for replica in self.replicas.values())):
            totals.update(restarts)
        return dict(totals)

    @property
    def states(self) -> dict[int, ReplicaState]:
        """The present state of each replica, by index."""
        return {index: replica.life.state for index, replica in sorted(self.replicas.items())}

    @property
    def staying(self) -> list[ReplicaState]:
        """States of the replicas that are not being stopped for good."""
        return [replica.life.state for replica in self.replicas.values() if not replica.leaving]

    @property
    def finished(self) -> bool:
        """True if all replicas have finished or failed, and enough have finished.

        Enough are ``min_ready`` (default: all), and at least one.
        """
        return is_done(self.staying, self.config.min_ready)

    @property
    def over(self) -> bool:
        """True if all replicas, one at least, have finished or failed.

        Those that are being stopped for good do not count.
        """
        return is_over(self.staying)

    @property
    def needed(self) -> int | None:
        """How many replicas must be ready, or None for all.

        For an external group, the expected number: a program that restarts may get
        another index before the coordinator knows that the earlier one has ended.
        """
        return self.size if self.config.external and self.config.min_ready is None else self.config.min_ready

    @property
    def good(self) -> bool:
        """True if at least :attr:`needed` replicas are ready or have finished."""
        return is_good(list(self.states.values()), self.needed)

    @property
    def failed(self) -> Replica | None:
        """One failed replica, or None if no replica has failed."""
        return next((one for one in self.replicas.values() if one.life.state == "failed"), None)

    def failure(self, least: int) -> Reason | None:
        """Return, in words, why failures of this group end the run, or None.

        :param least: how many replicas must be left.
        """
        ends = self.config.on_failure == "run" or is_lost(self.staying, least)
        return self.words_of_failure() if ends and self.failed is not None else None

    @property
    def hopeless(self) -> bool:
        """True if too many replicas have failed for the group to become ready."""
        states = list(self.states.values())
        return is_lost(states, needed_replicas(self.config.min_ready, len(states)))

    def words_of_failure(self) -> str:
        """Return in words which replica has failed, and why; only after a failure."""
        assert self.failed is not None
        left = len(self.staying) - self.staying.count("failed")
        kept = f" ({left} of {len(self.staying)} replicas are left)" if self.config.on_failure != "run" else ""
        return f"group {self.config.name} failed{kept} with replica {self.failed.name}: {self.failed.life.reason}"

    def status(self, now: float) -> GroupStatus:
        """Return a snapshot for ``replicas status`` and the metrics.

        :param now: seconds of the loop's clock.
        """
        replicas = tuple(replica.status(now) for _, replica in sorted(self.replicas.items()))
        limit, cycles = self.config.restart.no_progress_cycles, max((one.cycles for one in replicas), default=0)
        return GroupStatus(
            name=self.config.name,
            launcher=self.config.launcher,
            size=self.size,
            world_size=self.config.world_size,
            replicas=replicas,
            restarts=self.restarts_by_reason(),
            restart_budget_remaining_ratio=self.rules.remaining_ratio(now),
            no_progress_cycles=limit,
            no_progress_remaining_ratio=max(0.0, 1.0 - cycles / limit) if limit else 1.0,
            on_failure=self.config.on_failure,
            min_ready=self.config.min_ready,
        )


def _kept(replica: Replica) -> SavedReplica:
    """Return what the next replica of the same index takes over from this one."""
    life = replica.life
    settled: Literal["", "finished", "failed"] = (
        life.state if life.state == "finished" or life.state == "failed" else ""
    )
    again = life.alive and replica.asked in ("restart", "fault")
    return SavedReplica(
        generation=life.generation,
        restarts=dict(life.restarts),
        last_exit=replica.current.last_exit,
        start=replica.current.started_with,
        ending=replica.current.cause if again else None,
        halted=replica.halted,
        settled=settled,
    )

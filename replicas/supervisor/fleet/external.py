"""One replica of an external group, which another launcher starts and ends.

:class:`External` is a :class:`~replicas.supervisor.fleet.replica.Replica` whose
generations are the *lives* of a program that joins. It is known only by its members on
the coordinator.

* A life begins with the first member of the replica: pending -> starting. It is ready
  when all ranks have joined and serve the newest version, as any other replica.
* A life ends when all its members are gone, even if others have joined meanwhile:
  -> pending, and the coordinator forgets which ranks left in order. So a program that
  replaces another one between two checks is a new life, too.
* A drain (of the replica, or of the run) ends its part in syncs, not its program. It is
  then drained until a new life begins.

There are no restarts, timeouts or failures, which are its launcher's part. A frozen
member is lost when its lease ends, as on every channel.
"""

from __future__ import annotations

import sys

from replicas import errors
from replicas.core.base.effects import LOSS_WORDS
from replicas.core.lives.lifecycle import RUNNING, ReplicaEvent
from replicas.supervisor.fleet.generation_lifecycle import GenerationLifecycle
from replicas.supervisor.fleet.replica import REQUESTED, Replica
from replicas.supervisor.state.run_state import Cause

_EVERY_GENERATION = sys.maxsize
"""Other launchers number generations as they like."""


class External(Replica):
    """A replica of an external group, seen only through the coordinator."""

    _seen: frozenset[str] = frozenset()
    """Incarnations of the members that this life has had."""
    _end = ""
    """How the last lost member ended."""

    @property
    def _joined(self) -> frozenset[str]:
        """Incarnations (ids) of the replica's present members, by the coordinator."""
        group, index = self._key
        return self._context.coordinator.joined(group).get(index, frozenset())

    def _is_another(self, joined: frozenset[str]) -> bool:
        """Return True if none of the members ``joined`` belongs to the current program.

        Also True if there are none.
        """
        return not joined or joined.isdisjoint(self._seen)

    # ------------------------------------------------------------ requests

    def restart(self, cause: Cause = REQUESTED, *, drain: bool = True) -> None:
        """Refuse: only the launcher of an external replica can restart it.

        :raises replicas.errors.UsageError: always.
        """
        raise errors.UsageError(f"replica {self.name} is external: others start its program", hint="restart it there")

    def halt(self, hurry_s: float | None = None) -> None:
        """Exclude the running program, if there is one, from further syncs.

        The program is not ended, whatever ``hurry_s`` is; its successor takes part
        again. Does not wait.
        """
        super().halt(hurry_s)
        if self.life.state == "drained":  # members of an earlier coordinator may reconnect
            self._context.coordinator.set_draining(*self._key, self.members_generation)

    def _end_processes(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Exclude the program from further syncs; end no process.

        The parameters are those of other replicas, and have no effect here.
        """
        self._context.coordinator.set_draining(*self._key, self.members_generation)
        super()._end_processes(timeout_s, stacks=stacks)

    @property
    def members_generation(self) -> int:
        """A number above all generations, so that a drain excludes all members."""
        return _EVERY_GENERATION

    def member_lost(self, rank: int, reason: str) -> None:
        """Note how a member ended, and wake the replica's task.

        :param reason: "left" if it left in order, or why the coordinator removed it.
        """
        self._end = f"rank {rank} left" if reason == "left" else f"rank {rank}: {LOSS_WORDS.get(reason, reason)}"
        self.wake()

    # ------------------------------------------------------------ its lives

    def check(self, now: float) -> None:
        """Update readiness; wake the task when a program joins or has left.

        :param now: time of the loop's clock.
        """
        if self.life.state not in RUNNING or self._is_another(self._joined):
            self.current.check_sync(now)
            self.wake()
            return
        self._seen |= self._joined
        view = self.current.health.view = self._context.coordinator.readiness(
            *self._key, self.life.generation, external=True
        )
        self._follow(ready=view.ready, now=now)

    def _start_if_due(self) -> bool:
        """Begin a generation if a new program has joined; return True if one is there.

        Also note that the replica waits for a program, for its status.
        """
        joined = self._joined
        if self.life.state == "drained":
            if self._context.coordinator.recovering:
                self._seen |= joined  # they were drained before their coordinator ended
            if self._context.coordinator.recovering or not self._is_another(joined):
                return False
            self._end_life(ReplicaEvent.RESTART, "its drained program has ended")
        self._waits_for = "for a program, which you start, to join"
        if joined and self.life.state == "pending":
            self._seen = joined
            self._apply(ReplicaEvent.START)
            self.current = GenerationLifecycle(self, self._context)
            self.current.apply_event("launched")
        return bool(joined)

    async def _run_generation(self) -> None:
        """Wait until the program's members are gone or the replica is to stop.

        Then report its end.
        """
        self.check(self._now())
        while self.current.state in ("running", "syncing") and not self._is_another(joined := self._joined):
            self._seen |= joined
            await self.wait_for_wake()
        if self.unwanted:
            self.current.last_exit = "stopped"
            self._apply(ReplicaEvent.STOPPED, reason=self.current.last_exit)
        else:
            self.current.last_exit = self._end or "its program has ended"
            self._end_life(ReplicaEvent.LEFT, self.current.last_exit)
        self._ask("done")

    def _end_life(self, event: ReplicaEvent, reason: str) -> None:
        """Have the coordinator forget the members of a program that is gone.

        Then step the replica's states by ``event``, with ``reason`` as its text.
        """
        self._seen, self._end = frozenset(), ""
        self._context.coordinator.forget(*self._key)
        self._apply(event, reason=reason)

    async def stacks(self) -> dict[str, str]:
        """Return, by the replica's name, a note that its stacks cannot be read."""
        return {self.name: 'its program is started by others (launcher = "external"); run py-spy dump --pid there'}

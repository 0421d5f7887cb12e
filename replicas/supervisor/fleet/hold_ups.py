"""Report what holds up a replica: dying processes, and resources that are still held.

Each obstacle is reported once, as a :class:`~replicas.telemetry.events.HeldUp`; the
status shows it as long as it lasts.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.cleanup.still_held import StillHeld, wait_clear
from replicas.supervisor.fleet.environment import Host
from replicas.supervisor.shim.orders import Remains
from replicas.telemetry.events import HeldUp

__all__ = ["HoldUps"]


class HoldUps:
    """Obstacles of one generation.

    :param who: group, index and generation of the replica.
    """

    def __init__(self, host: Host, who: tuple[str, int, int]) -> None:
        self._host = host
        self._group, self._replica, self._generation = who
        self._known: set[tuple[int, str]] = set()
        self._remains: Remains | None = None
        self._waits = ""

    @property
    def text(self) -> str:
        """What holds the replica up now; empty: nothing."""
        if self._remains is None:
            return self._waits
        names = ", ".join(_named(*one) for one in self._remains.processes)
        return f"held up by {names}: not dead {max(0.0, time.time() - self._remains.since):.0f} s after SIGKILL"

    def remain(self, remains: Remains | None, *, gave_up: bool = False) -> bool:
        """Note processes that SIGKILL has not ended; True: there is a new one."""
        self._remains = remains
        if remains is None:
            return False
        new = [one for one in remains.processes if gave_up or one not in self._known]
        self._known.update(new)
        for pid, command in new:
            self._tell("the end of a process", _named(pid, command), gave_up, pid=pid, since=remains.since)
        return bool(new)

    async def until_clear(self, old: Sequence[Belongings], pause: Callable[[float], Awaitable[bool]]) -> None:
        """Wait for the last generation's resources, up to a limit.

        :param pause: as of :func:`wait_clear`.
        """

        def told(held: StillHeld) -> None:
            self._waits = f"waits for {held.what}, held by {held.holder}"
            self._tell(held.what, held.holder, gave_up=False)

        for held in await wait_clear(old, told, pause):
            self._tell(held.what, held.holder, gave_up=True)
        self._waits = ""

    def _tell(self, what: str, holder: str, gave_up: bool, *, pid: int = 0, since: float = 0.0) -> None:
        self._host.emit(
            HeldUp(
                group=self._group,
                replica=self._replica,
                generation=self._generation,
                what=what,
                holder=holder,
                gave_up=gave_up,
                pid=pid,
                since=since,
            )
        )


def _named(pid: int, command: str) -> str:
    return f"process {pid} ({command or 'dying'})" if pid else "a process that is not seen from here"

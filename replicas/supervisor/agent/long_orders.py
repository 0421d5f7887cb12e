"""The slow orders of a supervisor: clean up, read logs, examine the machine.

Each runs as a task and ends with a reply to the supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from replicas.common.logs import Log
from replicas.common.tasks import keep_until_done
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.checks import examine_node
from replicas.supervisor.agent.log_reader import NodeLogReaders
from replicas.supervisor.agent.orphans import clean_up
from replicas.supervisor.agent.shims import Shims

log = Log("replicas.agent")

_CLEAN_AGAIN_S = 1.0


class LongOrders:
    """Carries out an agent's slow orders (kill leftovers, read logs, examine) as tasks.

    The owner cancels ``tasks``.

    :param tell: sends a message to the supervisor.
    :param state_dir: folder of the node's logs.
    """

    def __init__(self, shims: Shims, state_dir: Path, tell: Callable[[wire.AgentMessage], None]) -> None:
        """Keep the arguments; start no task yet.

        :param shims: the shims of this node.
        :param state_dir: folder of the node's logs.
        :param tell: sends a message to the supervisor, without waiting.
        """
        self._shims, self._state_dir, self._tell = shims, state_dir, tell
        self._logs = NodeLogReaders(state_dir / "logs")
        self._examining = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()

    def start_order(self, order: wire.Clean | wire.Query) -> None:
        """Start a task that carries out an order and sends the reply. Does not wait."""
        keep_until_done(asyncio.create_task(self._carry_out(order)), self.tasks)

    async def _carry_out(self, order: wire.Clean | wire.Query) -> None:
        """Carry out an order, and send the supervisor the reply or replies."""
        match order:
            case wire.Clean(shims):
                await self._clean(shims)
            case wire.LogQuery():
                self._tell(await self._logs.answer(order))
            case wire.Examine():
                await self._examine(order)

    async def _clean(self, shims: tuple[wire.ShimLeft, ...]) -> None:
        """Kill the processes of shims of an earlier agent, until none is left.

        After each round of kills, send the supervisor the marks of the shims that have
        no process left. Skip shims of this agent.

        :param shims: marks, pids and control groups of the shims to clean up after.
        """
        left = [shim for shim in shims if shim.nonce not in self._shims]
        while left:
            try:
                gone = await anyio.to_thread.run_sync(clean_up, left)
            except OSError as error:  # e.g. this process has no descriptor left
                log.error("trying again to end the processes of an earlier agent, which failed: %s", error)
                await asyncio.sleep(_CLEAN_AGAIN_S)
                continue
            self._tell(wire.Cleaned(gone))
            left = [shim for shim in left if shim.nonce not in gone]

    async def _examine(self, order: wire.Examine) -> None:
        """Examine the machine in a thread, and send the findings to the supervisor.

        Waits for an examination that is in progress.
        """
        async with self._examining:
            findings = await anyio.to_thread.run_sync(
                examine_node, self._state_dir, order.supervisor, order.demand, abandon_on_cancel=True
            )
        self._tell(wire.Examined(number=order.number, findings=findings))

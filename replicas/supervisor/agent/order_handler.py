"""What an agent does on the orders of its supervisor, but for those about its lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio.to_thread

from replicas.common.logs import Log
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.checks import examine_node
from replicas.supervisor.agent.log_reader import NodeLogReaders
from replicas.supervisor.agent.orphans import clean_up
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.wire.orders import Malformed

log = Log("replicas.agent")

_CLEAN_AGAIN_S = 1.0


class OrderHandler:
    """Carries out orders. What takes longer runs in ``tasks``, for the owner to cancel.

    :param tell: sends a message to the supervisor.
    :param state_dir: folder of the node's logs.
    """

    def __init__(self, shims: Shims, state_dir: Path, tell: Callable[[wire.AgentMessage], None]) -> None:
        self._shims, self._state_dir, self._tell = shims, state_dir, tell
        self._logs = NodeLogReaders(state_dir / "logs")
        self._examining = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()

    def obey(self, order: wire.Order) -> None:
        """Begin to carry an order out."""
        match order:
            case wire.Start():
                try:
                    self._shims.start(order)
                except Malformed as error:
                    log.error("an order to start is malformed: %s", error)
            case wire.Stop(nonce=nonce, timeout_s=timeout_s, stacks=stacks):
                self._shims.stop(nonce, timeout_s, stacks=stacks)
            case wire.Meet(nonce=nonce, host=host, port=port):
                self._shims.meet(nonce, host, port)
            case wire.Kill(nonce):
                self._shims.kill(nonce)
            case wire.AskStacks(nonce):
                self._spawn(self._find_stacks(nonce))
            case wire.Forget(nonce):
                self._shims.forget(nonce)
            case wire.Clean(shims):
                self._spawn(self._clean(shims))
            case wire.LogQuery():
                self._spawn(self._read_logs(order))
            case wire.Examine():
                self._spawn(self._examine(order))
            case _:
                log.error("an unexpected %s of the supervisor", type(order).__name__)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _find_stacks(self, nonce: str) -> None:
        with contextlib.suppress(TimeoutError):  # the supervisor has a deadline of its own
            self._tell(wire.StacksFound(nonce=nonce, found=await self._shims.stacks(nonce)))

    async def _clean(self, shims: tuple[wire.ShimLeft, ...]) -> None:
        left = [shim for shim in shims if shim.nonce not in self._shims]
        while left:
            try:
                gone = await anyio.to_thread.run_sync(clean_up, left)
            except OSError as error:  # e.g. this process has no descriptor left
                log.error("what an earlier agent has left cannot be ended yet: %s", error)
                await asyncio.sleep(_CLEAN_AGAIN_S)
                continue
            self._tell(wire.Cleaned(gone))
            left = [shim for shim in left if shim.nonce not in gone]

    async def _read_logs(self, query: wire.LogQuery) -> None:
        self._tell(await self._logs.answer(query))

    async def _examine(self, order: wire.Examine) -> None:
        async with self._examining:
            findings = await anyio.to_thread.run_sync(
                examine_node, self._state_dir, order.supervisor, order.demand, abandon_on_cancel=True
            )
        self._tell(wire.Examined(number=order.number, findings=findings))

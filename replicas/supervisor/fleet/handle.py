"""The supervisor's side of one shim on a node: its last state, and orders to it.

The state is the last one that its agent has sent. Orders go to the agent, and are
repeated when it comes back after its connection was lost: so the handle keeps the last
of each kind. While the agent is away nothing is known, and nothing is assumed: only the
loss of the node, or the agent's word, ends the shim
(:mod:`replicas.supervisor.fleet.cluster`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from replicas.supervisor.agent.messages import AskStacks, Kill, Meet, Order, ShimLeft, Start, Stop
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, LogLoss, PartState

_STACKS_S = 5.0


class ShimHandle:
    """One shim on ``node``, until nothing of it is left. For the loop's thread only.

    :ivar state: of its part, as last sent, or as the loss of the node ended it.
    :param send: sends an order to its agent; does nothing while that is away.
    :param changed: called after each change of its state.
    :param start: the order to start it; None: an earlier supervisor gave it.
    :param unheard_s: for how long nothing has been heard of its node.
    """

    def __init__(
        self,
        nonce: str,
        node: str,
        send: Callable[[Order], None],
        changed: Callable[[], None] = lambda: None,
        *,
        start: Start | None = None,
        local: bool = False,
        unheard_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.nonce, self.node, self.local = nonce, node, local
        self.unheard_s = unheard_s
        self.start = start
        """The order to start it; None: it has been carried out."""
        self._expected = start is None
        self.changed = changed
        self.state = UNKNOWN._replace(nonce=nonce)
        self.last_stacks: dict[str, str] = {}
        """Stacks by ``group/replica/rank``, as last saved."""
        self.losses: list[LogLoss] = []
        """Lost log lines that are not reported yet; the reader takes them out."""
        self.over_at: float | None = None
        """When its lease is over, on the loop's clock; None: its agent will tell."""
        self._lost: dict[tuple[str, str], int] = {}
        self._kill_at: float | None = None
        """When SIGKILL is due, on the monotonic clock; None: it was not told to end."""
        self._meet: Meet | None = None
        self._send = send
        self._asking: asyncio.Future[dict[str, str]] | None = None

    # ------------------------------------------------------------ orders

    def meet(self, host: str, port: int) -> None:
        """Tell where the parts of the replica meet, unless it knows."""
        if self._meet is None and self.state.rendezvous is None:
            self._meet = Meet(nonce=self.nonce, host=host, port=port)
            self._send(self._meet)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """SIGTERM now, SIGKILL after ``timeout_s``; a later call can only shorten that.

        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        """
        self._kill_at = time.monotonic() + timeout_s
        self._send(Stop(nonce=self.nonce, timeout_s=timeout_s, stacks=stacks))

    def kill(self) -> None:
        """Kill the shim; the processes under it are then swept by its mark."""
        self._send(Kill(self.nonce))

    async def stacks(self, timeout_s: float = _STACKS_S) -> dict[str, str]:
        """Stacks by ``group/replica/rank``; none if the shim ends. TimeoutError."""
        if self.state.report is not None:
            return {}
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            self._send(AskStacks(self.nonce))
        asked = self._asking
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(asked)
        except TimeoutError:
            if self._asking is asked:
                self._asking = None  # the order or the answer is lost: the next call asks again
            raise

    def again(self, *, known: bool) -> list[Order]:
        """The orders to repeat to an agent that has come back; ``known``: it has it."""
        if self.state.gone:
            return []
        orders: list[Order] = [self.start] if self.start is not None and not known else []
        if self._meet is not None:
            orders.append(self._meet)
        if self._kill_at is not None:
            orders.append(Stop(nonce=self.nonce, timeout_s=max(0.0, self._kill_at - time.monotonic())))
        return orders

    # ------------------------------------------------------------ what is known of it

    def take(self, state: PartState) -> None:
        """Take the state that the agent has sent."""
        if self._expected:  # an earlier supervisor has reported what it was told
            self._expected = False
            self._lost = {(loss.where, loss.reason): loss.lines for loss in state.known_losses}
        for loss in state.losses:
            known = self._lost.get((loss.where, loss.reason))
            if known is None or loss.lines > known:
                self.losses.append(loss._replace(lines=loss.lines - (known or 0)))
                self._lost[loss.where, loss.reason] = loss.lines
        report = state.report or self.state.report or (ExitReport("stopped") if state.gone else None)
        self.state = state._replace(report=report)
        if report is not None:
            self._answer({})  # what has ended shows no stacks
        self.changed()

    def found(self, stacks: dict[str, str]) -> None:
        """Take the stacks that were asked for, or saved at its end."""
        self.last_stacks = stacks
        self._answer(stacks)
        self.changed()

    def lose(self, report: ExitReport) -> None:
        """Note that its processes are ending, though something of them may be left."""
        self.state = self.state._replace(report=self.state.report or report)
        self._answer({})
        self.changed()

    def end(self, report: ExitReport) -> None:
        """Note that nothing of it is left."""
        self.state = self.state._replace(remains=None, gone=True)
        self.lose(report)

    def _answer(self, stacks: dict[str, str]) -> None:
        asked, self._asking = self._asking, None
        if asked is not None and not asked.done():
            asked.set_result(stacks)

    @property
    def stopping(self) -> bool:
        """Whether it was told to end, by this supervisor or an earlier one."""
        return self._kill_at is not None or self.state.stopping

    @property
    def left(self) -> ShimLeft:
        state = self.state
        return ShimLeft(nonce=self.nonce, pid=state.pid, start_time=state.start_time, cgroup=state.cgroup)

    def abandon(self) -> None:
        """Do not follow it any more; its agent ends it when the run is over."""
        self.changed = lambda: None
        self._answer({})

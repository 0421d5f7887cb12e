"""The supervisor's proxy of one shim on a node: its last state, and orders to it.

The state is the last one that its agent sent. Orders go to the agent, and are repeated
when the agent reconnects, so the handle keeps the last order of each kind. While the
agent is away the state does not change: only the loss of the node, or a report of the
agent, ends the shim
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
    """One shim on ``node``, until its processes are gone. For the loop's thread only.

    :ivar state: of its part, as sent last, or as ended by the loss of the node.
    :param send: sends an order to its agent; does nothing while the agent is away.
    :param changed: called after each change of its state.
    :param start: the order to start it, or None if an earlier supervisor gave it.
    :param unheard_s: returns for how long its node has been silent.
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
        """The order to start it, or None when it was carried out."""
        self._expected = start is None
        self.changed = changed
        self.state = UNKNOWN._replace(nonce=nonce)
        self.last_stacks: dict[str, str] = {}
        """Stacks by ``group/replica/rank``, as last saved."""
        self.losses: list[LogLoss] = []
        """Lost log lines that are not reported yet; the reader removes them."""
        self.over_at: float | None = None
        """When its lease is over, on the loop's clock; None if its agent reports."""
        self._lost: dict[tuple[str, str], int] = {}
        self._kill_at: float | None = None
        """When SIGKILL is due, on the monotonic clock; None if it was not stopped."""
        self._meet: Meet | None = None
        self._send = send
        self._asking: asyncio.Future[dict[str, str]] | None = None

    # ------------------------------------------------------------ orders

    def meet(self, host: str, port: int) -> None:
        """Send the rendezvous of the replica's parts, unless the shim has it."""
        if self._meet is None and self.state.rendezvous is None:
            self._meet = Meet(nonce=self.nonce, host=host, port=port)
            self._send(self._meet)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Send SIGTERM now, SIGKILL after ``timeout_s``; later calls can shorten that.

        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        """
        self._kill_at = time.monotonic() + timeout_s
        self._send(Stop(nonce=self.nonce, timeout_s=timeout_s, stacks=stacks))

    def kill(self) -> None:
        """Kill the shim; its agent then sweeps its processes by their mark."""
        self._send(Kill(self.nonce))

    async def stacks(self, timeout_s: float = _STACKS_S) -> dict[str, str]:
        """Return stacks by ``group/replica/rank``, none if it ends; or TimeoutError."""
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
                self._asking = None  # the order or the answer is lost: the next call sends it again
            raise

    def again(self, *, known: bool) -> list[Order]:
        """Return the orders to repeat to a reconnected agent.

        :param known: the agent has this shim.
        """
        if self.state.gone:
            return []
        orders: list[Order] = [self.start] if self.start is not None and not known else []
        if self._meet is not None:
            orders.append(self._meet)
        if self._kill_at is not None:
            orders.append(Stop(nonce=self.nonce, timeout_s=max(0.0, self._kill_at - time.monotonic())))
        return orders

    # ------------------------------------------------------------ its state

    def update_state(self, state: PartState) -> None:
        """Handle a state that the agent sent."""
        if self._expected:  # an earlier supervisor reported these losses
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
            self._answer({})
        self.changed()

    def found(self, stacks: dict[str, str]) -> None:
        """Handle the stacks that were requested, or saved at its end."""
        self.last_stacks = stacks
        self._answer(stacks)
        self.changed()

    def lose(self, report: ExitReport) -> None:
        """Note that its processes are ending; some may be left."""
        self.state = self.state._replace(report=self.state.report or report)
        self._answer({})
        self.changed()

    def end(self, report: ExitReport) -> None:
        """Note that its processes are gone."""
        self.state = self.state._replace(remains=None, gone=True)
        self.lose(report)

    def _answer(self, stacks: dict[str, str]) -> None:
        asked, self._asking = self._asking, None
        if asked is not None and not asked.done():
            asked.set_result(stacks)

    @property
    def stopping(self) -> bool:
        """True if this supervisor or an earlier one stopped it."""
        return self._kill_at is not None or self.state.stopping

    @property
    def left(self) -> ShimLeft:
        state = self.state
        return ShimLeft(nonce=self.nonce, pid=state.pid, start_time=state.start_time, cgroup=state.cgroup)

    def abandon(self) -> None:
        """Stop following it; its agent ends it when the run is over."""
        self.changed = lambda: None
        self._answer({})

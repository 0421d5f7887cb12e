"""The supervisor's handle of one shim, which an agent has started, or will.

What is known of the shim is the last state that its agent has sent. Orders go to the
agent, and are repeated when it comes back after its connection was lost: so the handle
keeps the last of each kind. While the agent is away nothing is known, and nothing is
assumed: only the loss of the node, or the agent's word, ends the shim
(:mod:`replicas.supervisor.fleet.cluster`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from replicas.supervisor.agent.messages import AskStacks, Kill, Meet, Order, ShimLeft, ShimState, Start, Stop
from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.wire.orders import ExitReport, LogLoss, Remains, reading

_STACKS_S = 5.0


class ShimHandle:
    """One shim on ``node``, until nothing of it is left. For the loop's thread only.

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
        self.pid = 0
        self.start_time = 0
        self.cgroup = ""
        self.main_pid: int | None = None
        self.rendezvous: tuple[str, int] | None = None
        self.report: ExitReport | None = None
        self.gone = asyncio.Event()
        """Set when nothing of it is left."""
        self.belongings = Belongings()
        self.last_stacks: dict[str, str] = {}
        """Stacks by ``group/replica/rank``, as last saved."""
        self.losses: list[LogLoss] = []
        """Lost log lines that are not reported yet; the reader takes them out."""
        self.over_at: float | None = None
        """When its lease is over, on the loop's clock; None: its agent will tell."""
        self.stopping = False
        """Whether it was told to end, by this supervisor or an earlier one."""
        self._remains: Remains | None = None
        self._lost: dict[tuple[str, str], int] = {}
        self._silent: tuple[float, float] = (0.0, 0.0)
        self._stop: tuple[float, bool] | None = None
        """When SIGKILL is due, and whether stacks are saved first."""
        self._meet: Meet | None = None
        self._send = send
        self._asking: asyncio.Future[dict[str, str]] | None = None

    # ------------------------------------------------------------ orders

    def meet(self, host: str, port: int) -> None:
        """Tell where the nodes of the replica meet."""
        self._meet = Meet(nonce=self.nonce, host=host, port=port)
        self._send(self._meet)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """SIGTERM now, SIGKILL after ``timeout_s``; a later call can only shorten that.

        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        """
        self.stopping = True
        self._stop = (time.monotonic() + timeout_s, stacks)
        self._send(Stop(nonce=self.nonce, timeout_s=timeout_s, stacks=stacks))

    def kill(self) -> None:
        """Kill the shim; the processes under it are then swept by its mark."""
        self._send(Kill(self.nonce))

    async def stacks(self, timeout_s: float = _STACKS_S) -> dict[str, str]:
        """Stacks by ``group/replica/rank``; none if the shim ends. TimeoutError."""
        if self.report is not None or self.gone.is_set():
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
        if self.gone.is_set():
            return []
        orders: list[Order] = [self.start] if self.start is not None and not known else []
        if self._meet is not None:
            orders.append(self._meet)
        if self._stop is not None:
            orders.append(Stop(nonce=self.nonce, timeout_s=max(0.0, self._stop[0] - time.monotonic())))
        return orders

    # ------------------------------------------------------------ what is known of it

    def take(self, state: ShimState) -> None:
        """Take a state that the agent has sent. Malformed: it is none."""
        if self._expected:  # an earlier supervisor has reported what it was told
            self._expected = False
            with reading("state of a shim"):
                self._lost = {(str(one["where"]), str(one["reason"])): int(one["count"]) for one in state.known_losses}
        with reading("state of a shim"):
            report = ExitReport.of(state.report) if state.report is not None else None
            remains = Remains.of(state.remains) if state.remains is not None else None
            belongings = Belongings.of(state.belongings) if state.belongings is not None else None
            losses = [LogLoss.of(loss) for loss in state.losses]
        self.pid, self.start_time, self.cgroup = state.pid, state.start_time, state.cgroup
        self.main_pid = state.main_pid if state.main_pid is not None else self.main_pid
        self.rendezvous = self.rendezvous or state.rendezvous
        self.report = report or self.report
        self._remains = remains
        self.belongings = belongings or self.belongings
        self.stopping = self.stopping or state.stopping
        self._silent = (state.silent_s, time.monotonic())
        for loss in losses:
            known = self._lost.get((loss.where, loss.reason))
            if known is None or loss.lines > known:
                self.losses.append(loss._replace(lines=loss.lines - (known or 0)))
                self._lost[loss.where, loss.reason] = loss.lines
        if state.gone:
            self.end(self.report or ExitReport("stopped"))
        else:
            self.changed()

    def found(self, stacks: dict[str, str]) -> None:
        """Take the stacks that were asked for, or saved at its end."""
        self.last_stacks = stacks
        self._answer(stacks)
        self.changed()

    def lose(self, report: ExitReport) -> None:
        """Note that its processes are ending, though something of them may be left."""
        self.report = self.report or report
        self._answer({})
        self.changed()

    def end(self, report: ExitReport) -> None:
        """Note that nothing of it is left."""
        self.report = self.report or report
        self._remains = None
        self._answer({})
        self.gone.set()
        self.changed()

    def _answer(self, stacks: dict[str, str]) -> None:
        asked, self._asking = self._asking, None
        if asked is not None and not asked.done():
            asked.set_result(stacks)

    @property
    def remains(self) -> Remains | None:
        """Processes that SIGKILL has not ended; None: none, or the shim is silent."""
        return self._remains

    def silent_s(self, now: float) -> float:
        """For how long the shim has not answered its agent; 0 while that is away."""
        silent_s, _ = self._silent
        return silent_s

    @property
    def left(self) -> ShimLeft:
        return ShimLeft(nonce=self.nonce, pid=self.pid, start_time=self.start_time, cgroup=self.cgroup)

    def abandon(self) -> None:
        """Do not follow it any more; its agent ends it when the run is over."""
        self.changed = lambda: None
        self._answer({})

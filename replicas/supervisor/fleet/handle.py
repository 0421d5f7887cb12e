"""A node of a run, and its shims, as the supervisor knows them from the node's agent.

A :class:`ShimHandle` is the proxy of one shim: its last state, as its agent sent it,
and orders to it. Orders go to the agent, and are repeated when the agent reconnects, so
the handle keeps the last order of each kind. While the agent is away the state does not
change: only the loss of the node, or a report of the agent, ends the shim
(:mod:`replicas.supervisor.fleet.cluster`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from replicas.common.logs import Log
from replicas.coordinator.sessions import OUTBOX_NBYTES
from replicas.coordinator.websocket import WebSocket
from replicas.core.lives.node_life import NodeLife
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.agent.messages import AskStacks, Hello, Kill, Meet, Order, ShimLeft, Start, Stop, encode
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, LogLoss, PartState

log = Log("replicas.supervisor")

_STACKS_S = 5.0


class AgentLink:
    """The supervisor's connection to an agent; it ends if the agent does not read.

    :param refused: called with the reason in that case.
    """

    def __init__(self, connection: WebSocket, refused: Callable[[str], None]) -> None:
        """Keep the connection, which the caller has opened and closes.

        :param refused: called with the reason when a message ends the connection,
            because too much is unread.
        """
        self._connection, self._refused = connection, refused
        self.over = asyncio.Event()

    def send(self, data: bytes) -> None:
        """Queue data for the agent without waiting.

        Does nothing after the end of the connection. Ends the connection if too much is
        unread.
        """
        if self.over.is_set():
            return
        if self._connection.unread_nbytes > OUTBOX_NBYTES:
            log.error("disconnecting the agent of a node, which does not read its messages; the agent may reconnect")
            self._refused("overflow")
            self.close()
            self._connection.cut()
            return
        self._connection.write((data,))

    def close(self) -> None:
        """Set the event ``over``, so that the route that serves the link closes it."""
        self.over.set()


class NodeEntry:
    """A node as the supervisor knows it: its agent, the connection, and its shims.

    :ivar hello: the last Hello of its agent, with the node's address and machine; or
        what an earlier supervisor has saved of it.
    """

    def __init__(self, hello: Hello, *, local: bool, now: float) -> None:
        """Begin without shims, and without a connection to the agent.

        :param hello: the agent's, or what was saved of it. :param local: it is the
            supervisor's own machine, whose agent has no lease. :param now: loop time.
        """
        self.hello = hello
        self.life = NodeLife(now, leased=not local)
        self.link: AgentLink | None = None
        self.handles: dict[str, ShimHandle] = {}
        self.cleaning: dict[str, ShimHandle] = {}
        """Shims of an earlier agent of the node, until the present agent ended them."""
        self.elsewhere: dict[str, ShimHandle] = {}
        """Shims of earlier agents of that name elsewhere, until their lease ends."""

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.hello.node

    @property
    def local(self) -> bool:
        """True for the supervisor's own machine, whose agent has no lease."""
        return not self.life.leased

    @property
    def machine(self) -> Machine:
        """The node's resources; an empty Machine before its agent has joined."""
        return self.hello.machine or Machine()

    def send(self, order: Order) -> None:
        """Send an order to the node's agent; do nothing while the agent is away."""
        if self.link is not None:
            self.link.send(encode(order))

    def unheard_s(self) -> float:
        """Return for how long the node, and so its shims, was not heard, in seconds.

        0 for the supervisor's own machine; inf while the agent is disconnected, as its
        messages may be late.
        """
        if self.local:
            return 0.0
        return asyncio.get_running_loop().time() - self.life.heard_at if self.life.state == "up" else math.inf

    @property
    def living(self) -> list[ShimHandle]:
        """Handles of shims with processes left, also of earlier agents of the node."""
        known = self.handles | self.cleaning | self.elsewhere
        return [one for one in known.values() if not one.state.gone]

    @property
    def died(self) -> ExitReport:
        """The exit report for the shims of an agent that has died."""
        return ExitReport("node", text=f"the agent of node {self.name} died")


class ShimHandle:
    """The supervisor's proxy of one shim: the process on ``node`` that owns a part.

    It lasts until the part's processes are gone. For the loop's thread only.

    :ivar state: of its part, as sent last, or as ended by the loss of the node.
    :ivar unheard_s: returns for how long its node has been silent.
    :param changed: called after each change of its state.
    :param start: the order to start it, or None if an earlier supervisor gave it.
    """

    def __init__(
        self, nonce: str, node: NodeEntry, changed: Callable[[], None] = lambda: None, *, start: Start | None = None
    ) -> None:
        """Make the proxy; send no order.

        :param nonce: the shim's mark, its random id.
        :param changed: called on the loop after each change of its state.
        :param start: the order to start it, which the caller sends; None if an earlier
            supervisor gave it.
        """
        self.nonce, self.node, self.local = nonce, node.name, node.local
        self.unheard_s, self._send = node.unheard_s, node.send
        self.start = start
        """The order to start it, or None when it was carried out."""
        self._expected = start is None
        self.changed = changed
        self.state = UNKNOWN._replace(nonce=nonce)
        self.last_stacks: dict[str, str] = {}
        """Stacks by ``group/replica/rank``, as last saved."""
        self.losses: list[LogLoss] = []
        """Lost log lines that are not reported yet; the reader removes them."""
        self.over_at = math.inf
        """When its lease is over, on the loop's clock; inf if its agent reports."""
        self._lost: dict[tuple[str, str], int] = {}
        self._kill_at: float | None = None
        """When SIGKILL is due, on the monotonic clock; None if it was not stopped."""
        self._meet: Meet | None = None
        self._asking: asyncio.Future[dict[str, str]] | None = None

    # ------------------------------------------------------------ orders

    def send_rendezvous(self, host: str, port: int) -> None:
        """Send the shim the rendezvous (host and port where the parts meet), once."""
        if self._meet is None and self.state.rendezvous is None:
            self._meet = Meet(nonce=self.nonce, host=host, port=port)
            self._send(self._meet)

    def stop(self, timeout_s: float, *, stacks: bool = False) -> None:
        """Order SIGTERM now, SIGKILL after ``timeout_s``; later calls can shorten that.

        Does not wait. Repeated if the agent reconnects.

        :param stacks: first save all stacks to their logs, which takes up to 3 s.
        """
        self._kill_at = time.monotonic() + timeout_s
        self._send(Stop(nonce=self.nonce, timeout_s=timeout_s, stacks=stacks))

    def stop_alone(self, then: Callable[[], None]) -> None:
        """Order the end of a shim without a replica, by SIGKILL. Does not wait.

        :param then: called when its processes are gone; replaces :attr:`changed`.
        """

        def changed() -> None:
            """Call ``then`` if the processes are gone."""
            if self.state.gone:
                then()

        self.changed = changed
        self.stop(0.0)

    def kill(self) -> None:
        """Order SIGKILL for the shim, and do not wait for its end.

        Its agent then kills the processes that it has left.
        """
        self._send(Kill(self.nonce))

    async def stacks(self) -> dict[str, str]:
        """Ask for stacks of its ranks, and return them by ``group/replica/rank``.

        :returns: nothing ({}) if its main process has ended.
        :raises TimeoutError: the agent has not answered within 5 s.
        """
        if self.state.report is not None:
            return {}
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_future()
            self._send(AskStacks(self.nonce))
        asked = self._asking
        try:
            async with asyncio.timeout(_STACKS_S):
                return await asyncio.shield(asked)
        except TimeoutError:
            if self._asking is asked:
                self._asking = None  # the order or the answer is lost: the next call sends it again
            raise

    def orders_to_repeat(self, *, known: bool) -> list[Order]:
        """Return the orders that a reconnected agent may have missed. Sends nothing.

        :param known: True if the agent reports this shim; else its start is repeated,
            too.
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
        """Use a state that the agent sent; note new log losses; call ``changed``."""
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

    def take_stacks(self, stacks: dict[str, str]) -> None:
        """Keep stacks of the ranks, and answer :meth:`stacks`; call ``changed``.

        :param stacks: texts by ``group/replica/rank``, requested or saved at its end.
        """
        self.last_stacks = stacks
        self._answer(stacks)
        self.changed()

    def lose(self, report: ExitReport) -> None:
        """Note that the shim's processes are ending (some may live); call ``changed``.

        :param report: how they end, unless the shim has reported it itself.
        """
        self.state = self.state._replace(report=self.state.report or report)
        self._answer({})
        self.changed()

    def end(self, report: ExitReport) -> None:
        """Note that the shim's processes are gone, and call ``changed``; send nothing.

        :param report: how they ended, unless the shim has reported it itself.
        """
        self.state = self.state._replace(remains=None, gone=True)
        self.lose(report)

    def _answer(self, stacks: dict[str, str]) -> None:
        """Give the caller that waits in :meth:`stacks`, if any, this result."""
        asked, self._asking = self._asking, None
        if asked is not None and not asked.done():
            asked.set_result(stacks)

    @property
    def stopping(self) -> bool:
        """True if this supervisor or an earlier one stopped it."""
        return self._kill_at is not None or self.state.stopping

    @property
    def left(self) -> ShimLeft:
        """Mark, pid and control group, by which an agent finds processes to kill."""
        state = self.state
        return ShimLeft(nonce=self.nonce, pid=state.pid, start_time=state.start_time, cgroup=state.cgroup)

    def abandon(self) -> None:
        """Stop calling ``changed``, and end a wait in :meth:`stacks` without stacks.

        Sends nothing: the agent ends the shim when the run is over.
        """
        self.changed = lambda: None
        self._answer({})

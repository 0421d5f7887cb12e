"""The agent of a node: join a supervisor, run its shims, and end them in time.

There is one agent for each node of a run, the supervisor's own machine included. It
dials the supervisor (:mod:`replicas.supervisor.agent.messages`), starts what it is
told, and relays what the shims say. It decides one thing by itself: when to end
everything, which is

* when the supervisor says that the run is over;
* when its lease is over (:mod:`replicas.core.lives.lease_times`): nothing was heard of
  the supervisor for that time, whatever the reason, and the replicas may be started
  elsewhere soon. Then it tries for a minute more to offer its node anew, unless its
  supervisor is plainly gone. The shims have the same lease, from the agent's pings:
  so they end in time, too, if the agent is frozen or dead;
* without a lease, as on the supervisor's own machine, when the connection is closed,
  which means that the process of the supervisor is gone: at once, or after ``adopt`` if
  no other supervisor has come by then. The shims have a patience instead of a lease;
* when another supervisor comes, and the one before wanted no adoption.

A signal to end (SIGTERM, SIGINT) makes a node leave in order: the supervisor moves its
replicas first, or the next one does, within the lease; a second signal ends it at once.
The agent of the supervisor's own machine ignores it: a signal to a whole session or
process tree must not end it before the supervisor has ended the replicas. All else that
differs there is what the supervisor's Welcome says. The states in which an agent can be
are the table :data:`replicas.core.lives.tenancy.TENANCY`.

Whatever a dead agent has left is ended by its shims, by the next agent of the node
(``Clean``), or by the next supervisor.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from replicas import __version__, errors
from replicas.common.backoff import Backoff
from replicas.common.logs import Log
from replicas.common.tasks import cancelled, is_set_within
from replicas.core.lives.lease_times import BEAT_S, END_S, local_patience_s
from replicas.core.lives.tenancy import Tenancy
from replicas.linux.processes import start_time
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.long_orders import LongOrders
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.agent.token_file import TokenFile
from replicas.supervisor.state.run_state import machine as scope
from replicas.supervisor.wire.orders import plain

log = Log("replicas.agent")

AGAIN = Backoff(0.05, 1.0)
_UNREACHED = "the supervisor could not be reached"
REJOIN_S = 60.0
"""How long an agent whose lease is over, and which has nothing left, tries again."""
JOIN_S = 300.0
"""How long an agent that was never taken tries to reach its supervisor."""
_ANSWER_S = 10.0
_SILENCE_S = 5 * BEAT_S
"""Silence after which an agent with a lease dials again: TCP mends a connection over a
link that was broken for some seconds only after as long again, a new one works at
once."""
_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL when everything of the run ends."""
_KILL_S = END_S - 1.0


class SupervisorLink(Protocol):
    """A connection to a supervisor: whole frames, in order."""

    async def send(self, message: bytes, /) -> None: ...
    async def recv(self) -> str | bytes: ...
    async def close(self) -> None: ...


class _Refused(Exception):
    """The supervisor does not take this agent, and will not later."""


class Agent:
    """One node of a run, from :meth:`run`'s start to its exit code.

    :param dial: opens a connection, and tells its own address. OSError, or an error of
        websockets: there is none.
    :param shims: what runs the processes.
    :param state_dir: folder of the logs and of the token for the ranks.
    :param address: at which ranks of other nodes reach those of this one; default: that
        of the connection.
    :param wanted: whether to go on trying before any supervisor has answered.
    :param on_token: called with a new token for the next connection.
    :param machine: what the node offers; None: its supervisor knows.
    """

    def __init__(
        self,
        node: str,
        dial: Callable[[], Awaitable[tuple[SupervisorLink, str]]],
        shims: Shims,
        state_dir: Path,
        *,
        labels: Mapping[str, str] | None = None,
        machine: Machine | None = None,
        address: str = "",
        wanted: Callable[[], bool] = lambda: True,
        on_token: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.node = node
        self._dial, self._wanted, self._on_token = dial, wanted, on_token
        self._address = address
        self._hello = wire.Hello(
            release=__version__,
            node=node,
            incarnation=secrets.token_hex(8),
            pid=os.getpid(),
            start_time=start_time(os.getpid()) or 0,
            scope=scope(),
            labels=dict(labels or {}),
            machine=machine,
            limits_refused=shims.groups.refused,
        )
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._shims, shims.changed = shims, self._news.set
        self._long = LongOrders(shims, state_dir, self._tell)
        self._token = TokenFile(state_dir / "token")
        self._tenancy = Tenancy()
        self._welcome: wire.Welcome | None = None
        self._outbox: list[wire.AgentMessage] = []
        self._lease_ended_at: float | None = None
        """When the last lease ended; a connection from before is of no use."""
        self._may_join = asyncio.Event()
        """Clear while what ends with the lease is not gone yet."""
        self._may_join.set()
        self._reason, self._code = "", 0
        """Why it is leaving, or over, and its exit code."""
        self._stop = asyncio.Event()

    def leave(self, reason: str) -> None:
        """Leave in order; the second time at once."""
        if self._tenancy.state != "serving":
            self._end(reason)
            return
        self._tenancy.step("leave")
        self._reason = reason
        self._tell(wire.Leaving(reason))

    async def run(self) -> int:
        """Serve until the end. Nothing that it started is left then.

        :return: 0: the run is over, or this node was released; 1: the
            supervisor could not be reached within the lease, nor after it.
        :raises replicas.errors.WorldError: no supervisor took it.
        """
        work = [asyncio.create_task(one) for one in (self._stop.wait(), self._serve(), self._watch())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # without its watch it would keep no lease: an error of either ends the agent
        finally:
            with anyio.CancelScope(shield=True):
                await self._end_everything()
                await cancelled(*work, *self._long.tasks)
                self._shims.groups.close()
        log.info("node %s: %s", self.node, self._reason)
        return self._code

    def _end(self, reason: str, code: int = 0) -> None:
        if not self._tenancy.ended:
            self._tenancy.step("end")
            self._reason, self._code = reason, code
            self._stop.set()

    async def _end_everything(self) -> None:
        """End all processes, and wait until none is left."""
        self._shims.end(_GRACE_S)
        await is_set_within(self._shims.empty, _KILL_S)
        self._shims.kill_all()
        await self._shims.empty.wait()  # what SIGKILL does not end now is swept until it is gone
        await self._shims.aclose()

    # ------------------------------------------------------------ time

    async def _watch(self) -> None:
        """Ping the shims, send beats, and end everything when the lease is over."""
        while not self._tenancy.ended:
            now = self._loop.time()
            if self._tenancy.over(now):
                if self._tenancy.state == "leaving" or not self._tenancy.leased:
                    self._end(_UNREACHED, 1)
                    return
                await self._end_with_lease()
            if self._welcome is None and not self._wanted():
                self._end("the supervisor that started it is gone", 1)
                return
            self._shims.look(now, self._tenancy.until)
            self._token.look()
            if self._welcome is not None:
                self._tell(wire.Beat(self._tenancy.beat(now)))
            until = self._tenancy.until
            await asyncio.sleep(BEAT_S if until is None else max(0.01, min(BEAT_S, until - now)))

    async def _end_with_lease(self) -> None:
        """End all replicas, as they may start elsewhere; then offer the node anew."""
        log.warning("node %s: %s within the lease: everything of the run ends here", self.node, _UNREACHED)
        self._tenancy.step("lease_over")
        self._lease_ended_at = self._loop.time()
        self._may_join.clear()
        await self._end_everything()
        if self._tenancy.state == "ending":
            self._tenancy.step("empty")
        self._tenancy.until = None
        self._may_join.set()

    # ------------------------------------------------------------ the connection

    async def _serve(self) -> None:
        failures, give_up_at = 0, self._loop.time() + JOIN_S
        while not self._tenancy.ended:
            await self._may_join.wait()
            began_after = self._lease_ended_at
            try:
                link, seen = await self._dial()
            except (InvalidStatus, errors.UsageError) as error:
                problem = _refusal(error) if isinstance(error, InvalidStatus) else str(error)
                if self._is_final(error):
                    raise errors.WorldError(problem) from None
            except (OSError, InvalidHandshake, TimeoutError) as error:
                problem = str(error) or type(error).__name__
                if self._should_give_up(error):
                    self._end(_UNREACHED, 1)
                    return
            else:
                try:
                    self._shims.address = self._address or seen
                    await self._converse(link, began_after)
                    failures = 0
                except _Refused as error:
                    raise errors.WorldError(str(error)) from None
                except (ConnectionClosed, TimeoutError, OSError) as error:
                    problem = str(error) or "nothing is heard of it"
                finally:
                    await link.close()
                self._disconnected()
            if self._welcome is None and self._loop.time() > give_up_at:
                raise errors.WorldError(f"no supervisor took this node within {JOIN_S:g} s: {problem}")
            await asyncio.sleep(AGAIN.after(failures))
            failures += 1

    def _is_final(self, error: InvalidStatus | errors.UsageError) -> bool:
        """Return True if the refusal is permanent: no supervisor counts on this node.

        While replicas run here, somebody else may have the port for a moment: then the
        lease alone decides.
        """
        refused = isinstance(error, errors.UsageError) or error.response.status_code in (401, 403)
        return refused and not self._tenancy.serves

    def _should_give_up(self, error: Exception) -> bool:
        """Return True if this empty node should stop waiting for a supervisor.

        Where the connection is refused, the machine is there and its supervisor is not.
        """
        if not self._shims.empty.is_set() or self._tenancy.state not in ("leaving", "ending", "rejoining"):
            return False
        ended_at = self._lease_ended_at if self._tenancy.state != "leaving" else None
        late = ended_at is not None and self._loop.time() - ended_at > REJOIN_S
        return late or isinstance(error, ConnectionRefusedError)

    def _disconnected(self) -> None:
        if self._welcome is None or self._tenancy.leased or not self._tenancy.serves:
            return
        if not self._welcome.adopt_s:
            self._end("the supervisor is gone", 1)
        else:
            self._tenancy.alone(self._loop.time(), self._welcome.adopt_s)

    def _is_stale(self, began_after: float | None) -> bool:
        """Return True if what this connection brings is for processes that are ended.

        :param began_after: when the last lease had ended before it was begun.
        """
        return self._tenancy.ended or self._lease_ended_at != began_after

    async def _converse(self, link: SupervisorLink, began_after: float | None) -> None:
        """Say Hello, and obey until the connection ends or is stale."""
        asked_at = self._loop.time()
        if self._is_stale(began_after):
            return
        self._outbox.clear()
        hello = msgspec.structs.replace(
            self._hello, address=self._shims.address, parts=tuple(map(plain, self._shims.all()))
        )
        await link.send(wire.encode(hello))
        async with asyncio.timeout(_ANSWER_S):
            answer = _order(await link.recv())
        if self._is_stale(began_after):
            return
        if isinstance(answer, wire.Refused):
            if answer.again:
                raise TimeoutError(answer.message)
            raise _Refused(answer.message)
        if not isinstance(answer, wire.Welcome):
            raise _Refused(f"the supervisor answered {type(answer).__name__} to a Hello")
        before, self._welcome = self._welcome, answer
        self._tenancy.step("welcome")
        if before is None or before.supervisor != answer.supervisor:
            log.info("node %s: joined run %s", self.node, answer.run)
        if before is not None and before.supervisor != answer.supervisor and not before.adopt_s:
            self._shims.end(_GRACE_S)  # the supervisor before wanted no adoption
        self._take(answer, asked_at)
        if self._tenancy.state == "leaving":
            self._tell(wire.Leaving(self._reason))
        writer = asyncio.create_task(self._write(link))
        try:
            while not self._tenancy.ended:
                async with asyncio.timeout(_SILENCE_S if answer.lease_s else None):  # each beat is answered
                    data = await link.recv()
                if self._is_stale(began_after):
                    return
                try:
                    order = _order(data)
                except _Refused as error:
                    log.error("an order is ignored: %s", error)
                else:
                    self._obey(order)
        finally:
            await cancelled(writer)

    def _take(self, welcome: wire.Welcome, asked_at: float) -> None:
        before = self._tenancy.until
        self._tenancy.granted(welcome.lease_s, asked_at)
        self._shims.lease_until = self._tenancy.until  # of shims that are started before the next look
        self._shims.patience_s = 0.0 if welcome.lease_s else local_patience_s(welcome.adopt_s)
        if welcome.state_id:
            self._shims.identity = welcome.state_id
        if welcome.token:
            self._token.keep(welcome.token)
        self._renewed(before)

    def _renewed(self, before: float | None) -> None:
        """Tell shims that would end before the next look that they do not."""
        now = self._loop.time()
        if before is not None and before - now < 2 * BEAT_S:
            self._shims.look(now, self._tenancy.until)

    async def _write(self, link: SupervisorLink) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            outbox, self._outbox = self._outbox, []
            stacks = [wire.StacksFound(nonce=nonce, found=dict(found)) for nonce, found in self._shims.stacks()]
            news = [wire.PartNews(plain(state)) for state in self._shims.news()]
            for message in (*stacks, *news, *outbox):  # an end is told with the stacks that are known
                await link.send(wire.encode(message))

    def _tell(self, message: wire.AgentMessage) -> None:
        self._outbox.append(message)
        self._news.set()

    def _obey(self, order: wire.Order) -> None:
        match order:
            case wire.Heard(number):
                before = self._tenancy.until
                self._tenancy.heard(number)
                self._renewed(before)
            case wire.NewToken(member, operator):
                self._token.keep(member)
                self._on_token(operator)
            case wire.Over(reason):
                self._end(reason)
            case wire.Clean() | wire.LogQuery() | wire.Examine():
                self._long.begin(order)
            case wire.Welcome() | wire.Refused():
                log.error("an unexpected %s of the supervisor", type(order).__name__)
            case _:
                self._shims.obey(order)


def _order(data: str | bytes) -> wire.Order:
    try:
        return wire.decode_order(data if isinstance(data, bytes) else data.encode())
    except msgspec.DecodeError as error:
        raise _Refused(f"the supervisor speaks another protocol: {error}") from None


def _refusal(error: InvalidStatus) -> str:
    body = bytes(error.response.body or b"").decode(errors="replace")[:200]
    return f"the supervisor refuses this node ({error.response.status_code}): {body}"

"""The agent of a node: join a supervisor, run its shims, and end them in time.

There is one agent for each node of a run, the supervisor's own machine included. It
dials the supervisor (:mod:`replicas.supervisor.agent.messages`), starts shims as it is
told, and relays their messages. It decides only when to end everything:

* when the supervisor says that the run is over;
* when its lease is over (:mod:`replicas.core.lives.lease_times`): it heard nothing from
  the supervisor for that time, and the replicas may soon be started elsewhere. It then
  offers its node again for one minute, unless its supervisor is plainly gone. Pings
  give the shims the same lease, so they end in time if the agent is frozen or dead;
* without a lease, as on the supervisor's own machine, when the connection is closed,
  which means that the supervisor process is gone: immediately, or after ``adopt`` if
  no other supervisor has come by then. The shims have a patience instead of a lease;
* when another supervisor comes, and the previous one did not allow adoption.

SIGTERM or SIGINT makes a node leave in order: the supervisor, or its successor, moves
the replicas first, within the lease. A second signal ends the agent immediately. The
agent of the supervisor's own machine ignores both: a signal to a whole session or
process tree must not end it before the supervisor has ended the replicas. All other
differences there come from the supervisor's Welcome. The states of an agent are the
table :data:`replicas.core.lives.tenancy.TENANCY`.

The shims, the node's next agent (``Clean``) or the next supervisor end the processes of
a dead agent.
"""

from __future__ import annotations

import asyncio
import math
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
from replicas.common.tasks import cancelled, is_set_within, say_if_slow
from replicas.core.lives.lease_times import BEAT_S, END_S, local_patience_s
from replicas.core.lives.tenancy import Tenancy
from replicas.linux.processes import start_time
from replicas.status import WAIT_S
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.long_orders import LongOrders
from replicas.supervisor.agent.machine import Machine
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.agent.token_file import TokenFile
from replicas.supervisor.state.run_state import machine as scope
from replicas.supervisor.wire.orders import plain

log = Log("replicas.agent")

AGAIN = Backoff(0.05, 1.0)
_UNREACHED = "the supervisor cannot be reached"
REJOIN_S = 60.0
"""How long an agent without processes tries to rejoin after its lease is over."""
JOIN_S = 300.0
"""How long an agent that was never accepted tries to reach its supervisor."""
_ANSWER_S = 10.0
_SILENCE_S = 5 * BEAT_S
"""Silence after which an agent with a lease dials again. After an outage of some
seconds, TCP resumes an old connection only as many seconds later; a new connection
works immediately."""
_GRACE_S = 2.0
"""Time from SIGTERM to SIGKILL when everything of the run ends."""
_KILL_S = END_S - 1.0


class SupervisorLink(Protocol):
    """A connection to a supervisor. It carries whole frames, in order."""

    async def send(self, message: bytes, /) -> None:
        """Send one frame; wait while the peer takes no more."""

    async def recv(self) -> str | bytes:
        """Wait for the next frame and return it; raise ConnectionClosed at the end."""

    async def close(self) -> None:
        """Close the connection."""


class _Refused(Exception):
    """The supervisor rejects this agent for good."""


class Agent:
    """A node's agent: joins a run; starts, watches and ends shims (ranks' parents)."""

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
        """Prepare for :meth:`run` on the running loop; connect nowhere yet.

        :param dial: opens a connection; returns it and its local address. Raises
            OSError or an error of websockets.
        :param shims: the shims of this node, which run the processes.
        :param state_dir: folder of the logs and of the token for the ranks.
        :param machine: the node's resources; None if the supervisor is on the same
            machine.
        :param address: of this node's ranks for other nodes; default: the connection's
            own.
        :param wanted: returns whether to keep dialling before a supervisor has
            answered.
        :param on_token: called with a new token for the next connection.
        """
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
        self._long = LongOrders(shims, state_dir, self._send)
        self._token = TokenFile(state_dir / "token")
        self._tenancy = Tenancy()
        self._welcome: wire.Welcome | None = None
        self._outbox: list[wire.AgentMessage] = []
        self._lease_ended_at: float | None = None
        """When the last lease ended; connections opened before are stale."""
        self._may_join = asyncio.Event()
        """Clear while processes that end with the lease still run."""
        self._may_join.set()
        self._reason, self._code = "", 0
        """Why the agent leaves or has ended, and its exit code."""
        self._stop = asyncio.Event()

    def leave(self, reason: str) -> None:
        """Ask the supervisor to move the replicas away; a second call ends the agent.

        Without a supervisor, the first call ends it. Never waits.
        """
        if self._tenancy.state != "serving":
            self._end(reason)
            return
        self._tenancy.step("leave")
        self._reason = reason
        self._send(wire.Leaving(reason))

    async def run(self) -> int:
        """Serve until the end, and end every process that this agent started.

        :return: 0 if the run is over or this node was released; 1 if the supervisor is
            gone, or was not reached again in time.
        :raises replicas.errors.WorldError: no supervisor accepted this node.
        """
        work = [asyncio.create_task(one) for one in (self._stop.wait(), self._serve(), self._watch())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # an error of either ends the agent: without _watch it would not keep its lease
        finally:
            with anyio.CancelScope(shield=True):
                await self._end_everything()
                await cancelled(*work, *self._long.tasks)
                self._shims.groups.close()
        log.info("node %s: %s", self.node, self._reason)
        return self._code

    def _end(self, reason: str, code: int = 0) -> None:
        """Note reason and exit code, once, and let :meth:`run` end all processes."""
        if not self._tenancy.ended:
            self._tenancy.step("end")
            self._reason, self._code = reason, code
            self._stop.set()

    async def _end_everything(self) -> None:
        """End all processes of the run here, and forkservers; wait until none is left.

        SIGTERM first, SIGKILL 2 s later; after 3 s all shims that are left are killed.
        """
        self._shims.stop_all(_GRACE_S)
        with say_if_slow(log.warning, f"node {self.node}: waiting up to {_KILL_S:g} s for its replicas to end"):
            await is_set_within(self._shims.empty, _KILL_S)
        self._shims.kill_all()
        await self._shims.empty.wait()  # sweeps go on until unkillable processes are gone
        await self._shims.aclose()

    # ------------------------------------------------------------ time

    async def _watch(self) -> None:
        """Ping the shims and send a beat each second, until the agent must end.

        End all replicas when the lease (the time to run unheard) is over.
        """
        while not self._tenancy.ended:
            now = self._loop.time()
            if self._tenancy.over(now):
                if self._tenancy.state == "leaving" or not self._tenancy.leased:
                    self._end(_UNREACHED, 1)
                    return
                await self._end_with_lease()
            if self._welcome is None and not self._wanted():
                self._end("the supervisor that started this agent is gone", 1)
                return
            self._shims.check_shims(now, self._tenancy.until)
            self._token.write_if_changed()
            if self._welcome is not None:
                self._send(wire.Beat(self._tenancy.next_beat(now)))
            until = self._tenancy.until
            await asyncio.sleep(BEAT_S if until is None else max(0.01, min(BEAT_S, until - now)))

    async def _end_with_lease(self) -> None:
        """End all replicas as the lease is over, wait, and then allow a new join."""
        log.warning("node %s: ending all its replicas: %s within the time allowed (lease)", self.node, _UNREACHED)
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
        """Dial the supervisor and obey it, again after each disconnection, to the end.

        :raises replicas.errors.WorldError: the supervisor refuses this node for good,
            or none accepted it within 5 minutes.
        """
        failures, tell_at, problem = 0, self._loop.time() + WAIT_S, ""
        give_up_at = self._loop.time() + JOIN_S
        while not self._tenancy.ended:
            await self._may_join.wait()
            began_after, before = self._lease_ended_at, self._welcome
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
                    problem = str(error) or "the supervisor does not answer"
                finally:
                    await link.close()
                self._disconnected()
            now = self._loop.time()
            if self._welcome is None and now > give_up_at:
                raise errors.WorldError(f"this node could not join a run within {JOIN_S:g} s: {problem}")
            if self._welcome is not before:
                tell_at = now + WAIT_S
            if now > tell_at and not self._tenancy.ended:
                tell_at = math.inf
                until = self._tenancy.until or (self._lease_ended_at or now) + REJOIN_S
                left_s = (give_up_at if self._welcome is None else until) - now
                log.warning("node %s: waiting up to %.0f s for the supervisor: %s", self.node, left_s, problem)
            await asyncio.sleep(AGAIN.after(failures))
            failures += 1

    def _is_final(self, error: InvalidStatus | errors.UsageError) -> bool:
        """Return True if the supervisor's refusal is final, and this agent must end.

        Return False while it serves a run: another program may have the port for a
        moment, and only the lease ends the agent then.
        """
        refused = isinstance(error, errors.UsageError) or error.response.status_code in (401, 403)
        return refused and not self._tenancy.serves

    def _should_give_up(self, error: Exception) -> bool:
        """Return True if this agent, without processes, should stop dialling and end.

        :param error: of the last dial. A refused connection means that the machine runs
            and its supervisor does not; else, the time to rejoin decides.
        """
        if not self._shims.empty.is_set() or self._tenancy.state not in ("leaving", "ending", "rejoining"):
            return False
        ended_at = self._lease_ended_at if self._tenancy.state != "leaving" else None
        late = ended_at is not None and self._loop.time() - ended_at > REJOIN_S
        return late or isinstance(error, ConnectionRefusedError)

    def _disconnected(self) -> None:
        """End the agent as its supervisor is gone: now, or after ``adopt_s`` if given.

        Do nothing if it has a lease (which decides instead), or has not joined yet.
        """
        if self._welcome is None or self._tenancy.leased or not self._tenancy.serves:
            return
        if not self._welcome.adopt_s:
            self._end("the supervisor is gone", 1)
        else:
            self._tenancy.limit_without_supervisor(self._loop.time(), self._welcome.adopt_s)

    def _is_stale(self, began_after: float | None) -> bool:
        """Return True if the agent is ending, or a lease has ended since this dial.

        :param began_after: end of the last lease before the dial (loop time), or None.
            Messages of that time concern processes that were ended.
        """
        return self._tenancy.ended or self._lease_ended_at != began_after

    async def _converse(self, link: SupervisorLink, began_after: float | None) -> None:
        """Send Hello, and obey orders until the connection ends or is stale.

        :param began_after: end of the last lease before the dial (loop time), or None.
        :raises _Refused: the supervisor rejects this agent for good.
        :raises TimeoutError: the supervisor is silent, or asks to try again.
        """
        asked_at = self._loop.time()
        if self._is_stale(began_after):
            return
        self._outbox.clear()
        hello = msgspec.structs.replace(
            self._hello, address=self._shims.address, parts=tuple(map(plain, self._shims.take_all_states()))
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
            raise _Refused(f"the supervisor answered the join with an unexpected message ({type(answer).__name__})")
        before, self._welcome = self._welcome, answer
        self._tenancy.step("welcome")
        if before is None or before.supervisor != answer.supervisor:
            log.info("node %s: joined run %s", self.node, answer.run)
        if before is not None and before.supervisor != answer.supervisor and not before.adopt_s:
            self._shims.stop_all(_GRACE_S)  # the previous supervisor did not allow adoption
        self._apply_welcome(answer, asked_at)
        if self._tenancy.state == "leaving":
            self._send(wire.Leaving(self._reason))
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
                    log.error("ignoring an order of the supervisor that cannot be read: %s", error)
                else:
                    self._obey(order)
        finally:
            await cancelled(writer)

    def _apply_welcome(self, welcome: wire.Welcome, asked_at: float) -> None:
        """Keep the token and lease of a Welcome; ``asked_at``: when the lease began."""
        before = self._tenancy.until
        self._tenancy.granted(welcome.lease_s, asked_at)
        self._shims.lease_until = self._tenancy.until  # for shims that start before the next tick
        self._shims.patience_s = 0.0 if welcome.lease_s else local_patience_s(welcome.adopt_s)
        if welcome.state_id:
            self._shims.identity = welcome.state_id
        if welcome.token:
            self._token.set_token(welcome.token)
        self._ping_if_ending_soon(before)

    def _ping_if_ending_soon(self, before: float | None) -> None:
        """Ping the shims now if the previous lease, the one they know, ends very soon.

        :param before: end of that lease by the loop's clock; None if there was none.
        """
        now = self._loop.time()
        if before is not None and before - now < 2 * BEAT_S:
            self._shims.check_shims(now, self._tenancy.until)

    async def _write(self, link: SupervisorLink) -> None:
        """Send stacks, changed states and queued messages over ``link``, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            outbox, self._outbox = self._outbox, []
            stacks = [wire.StacksFound(nonce=nonce, found=dict(found)) for nonce, found in self._shims.take_stacks()]
            news = [wire.PartNews(plain(state)) for state in self._shims.take_changed_states()]
            for message in (*stacks, *news, *outbox):  # stacks first: the report of an end shows those received
                await link.send(wire.encode(message))

    def _send(self, message: wire.AgentMessage) -> None:
        """Queue a message to the supervisor; never wait. A rejoin drops unsent ones."""
        self._outbox.append(message)
        self._news.set()

    def _obey(self, order: wire.Order) -> None:
        """Carry out an order, in a task if it is slow; pass orders for shims on."""
        match order:
            case wire.Heard(number):
                before = self._tenancy.until
                self._tenancy.extend_lease(number)
                self._ping_if_ending_soon(before)
            case wire.NewToken(member, operator):
                self._token.set_token(member)
                self._on_token(operator)
            case wire.Over(reason):
                self._end(reason)
            case wire.Clean() | wire.LogQuery() | wire.Examine():
                self._long.start_order(order)
            case wire.Welcome() | wire.Refused():
                log.error("ignoring an unexpected message (%s) of the supervisor", type(order).__name__)
            case _:
                self._shims.obey(order)


def _order(data: str | bytes) -> wire.Order:
    """Decode an order. Raise _Refused if the data is not a valid order."""
    try:
        return wire.decode_order(data if isinstance(data, bytes) else data.encode())
    except msgspec.DecodeError as error:
        raise _Refused(f"the supervisor speaks another protocol, of another release ({error})") from None


def _refusal(error: InvalidStatus) -> str:
    """Return the supervisor's HTTP refusal of the connection as a text."""
    body = bytes(error.response.body or b"").decode(errors="replace")[:200]
    return f"the supervisor refuses this node ({error.response.status_code}): {body}"

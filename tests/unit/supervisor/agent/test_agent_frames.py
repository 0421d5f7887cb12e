"""Mutated frames between agents and their supervisor: each is refused in a sentence, or
is a message after all; nobody fails of it.

Covers: supervisor/agent/checks.py, supervisor/agent/long_orders.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from replicas.supervisor.agent import long_orders
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.agent import Agent, SupervisorLink
from replicas.supervisor.agent.checks import Demand, Finding
from replicas.supervisor.agent.shims import Shims
from replicas.supervisor.fleet.handle import AgentLink
from replicas.supervisor.wire.orders import PartSpec, plain
from replicas.supervisor.wire.part_state import UNKNOWN, ExitReport, Inventory, LogLoss, RankExit, Remains
from tests.support.agents import Field
from tests.support.channel.frames import MANY, mutants
from tests.support.fleets import group_of
from tests.support.virtual import virtually

MESSAGES = max(600, 4 * MANY)
SPEC = PartSpec("r", "a", 0, 1, 0, 1, 1, "exec", ("x",), {"K": "v"}, "/", "/", 1.0, "nonce")


def _refuse(*_: Any) -> Any:
    raise OSError("not here")


class _Wire:
    """Orders to an agent, and what it says."""

    def __init__(self, orders: list[bytes]) -> None:
        self._orders = orders
        self.said: list[wire.AgentMessage] = []
        self.answered = asyncio.Event()

    async def send(self, message: bytes, /) -> None:
        self.said.append(wire.decode_from_agent(message))
        if isinstance(self.said[-1], wire.LogReply) and self.said[-1].number == 77:
            self.answered.set()

    async def recv(self) -> bytes:
        await asyncio.sleep(0)
        if self._orders:
            return self._orders.pop(0)
        await self.answered.wait()
        return wire.encode(wire.Over())

    async def close(self) -> None: ...


def test_what_an_agent_is_told(tmp_path: Path) -> None:
    real: list[wire.Order] = [
        wire.Heard(1),
        wire.Stop(nonce="nonce", timeout_s=1.0, stacks=True),
        wire.Meet(nonce="nonce", host="h", port=1),
        wire.Kill("nonce"),
        wire.AskStacks("nonce"),
        wire.Forget("nonce"),
        wire.LogQuery(number=1, selection={"target": "a/0", "lines": 5}),
        wire.LogQuery(number=1, selection=None),
        wire.Examine(number=1, demand=Demand(processes=3), supervisor=4),
        wire.Start(spec=plain(SPEC), memory_nbytes=1),
    ]
    welcome = wire.Welcome(run="r", supervisor="s", lease_s=0.0, adopt_s=0.0, endpoint="", token="", state_id="i")
    frames = list(mutants([wire.encode(one) for one in real], seed=5, many=MESSAGES))

    async def story() -> None:
        line = _Wire([wire.encode(welcome), *frames, wire.encode(wire.LogQuery(number=77, selection={}))])

        async def dial() -> tuple[SupervisorLink, str]:
            return line, ""

        agent = Agent("n", dial, Shims(mock.Mock(path=None, refused=""), tmp_path, begin=_refuse), tmp_path)
        async with asyncio.timeout(60):
            assert await agent.run() == 0
        assert isinstance(line.said[0], wire.Hello)

    with mock.patch.object(long_orders, "examine_node", return_value=()):
        asyncio.run(story())


def test_what_a_supervisor_is_told() -> None:
    report = ExitReport("failed", "text", (RankExit(0, 1, lines=("a",)),))
    state = plain(
        UNKNOWN.with_identity_of(SPEC)._replace(
            pid=5,
            main_pid=6,
            rendezvous=("h", 1),
            report=report,
            remains=Remains(1.0, ((1, "x"),)),
            belongings=Inventory(processes=((1, 2),)),
            losses=(LogLoss(3, "file", "full"),),
        )
    )
    hello = wire.Hello(release="r", node="n1", incarnation="i", pid=1, start_time=2, scope="s", parts=(state,))
    real: list[wire.AgentMessage] = [
        wire.PartNews(state),
        hello,
        wire.Beat(3),
        wire.StacksFound(nonce="nonce", found={"a/0/0": "text"}),
        wire.Cleaned(("nonce",)),
        wire.LogReply(number=1, body=b"{}"),
        wire.Examined(number=1, findings=(Finding("gpus", "ok", "none"),)),
    ]

    async def story() -> None:
        field = Field((group_of("a"),), {})
        cluster = field.cluster
        link = _Deaf()
        assert cluster.hello(hello, link, local=False, seen_at="h") == "n1"
        refused = 0
        for data in mutants([wire.encode(one) for one in real], seed=6, many=MESSAGES):
            try:
                message = wire.decode_from_agent(data)
                if isinstance(message, wire.Hello):
                    with contextlib.suppress(KeyError):
                        cluster.hello(message, _Deaf(), local=False, seen_at="h")
                    cluster.hello(hello, link, local=False, seen_at="h")
                else:
                    cluster.receive("n1", data)
            except msgspec.DecodeError:
                refused += 1
        assert refused > MESSAGES / 4
        assert "n1" in {node.name for node in cluster.status()}

    virtually(story())


class _Deaf(AgentLink):
    def __init__(self) -> None: ...
    def send(self, data: bytes) -> None: ...
    def close(self) -> None: ...

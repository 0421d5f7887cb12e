"""An agent that hears nothing of its supervisor, in virtual time.

Covers: supervisor/agent/messages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicas.common.logs import flush
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.agent import Agent
from tests.support.virtual import virtually

LEASE_S = 30.0


class Line:
    """A supervisor that takes an agent, and is silent after ``answers`` beats."""

    def __init__(self, answers: int, *, lease_s: float) -> None:
        self._answers, self._lease_s = answers, lease_s
        self._orders: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = False

    async def send(self, message: bytes) -> None:
        match wire.decode_from_agent(message):
            case wire.Hello():
                known = {"run": "r", "supervisor": "1", "endpoint": "", "token": "t", "state_id": ""}
                self._say(wire.Welcome(lease_s=self._lease_s, adopt_s=20.0, **known))
            case wire.Beat(number) if self._answers:
                self._answers -= 1
                self._say(wire.Heard(number))

    def _say(self, order: wire.Order) -> None:
        self._orders.put_nowait(wire.encode(order))

    async def recv(self) -> bytes:
        return await self._orders.get()

    async def close(self) -> None:
        self.closed = True


def shims() -> Any:
    fake = mock.Mock(aclose=mock.AsyncMock(), groups=mock.Mock(refused=""))
    fake.take_all_states.return_value, fake.take_changed_states.return_value, fake.take_stacks.return_value = (), [], []
    fake.empty.wait = mock.AsyncMock()
    fake.address = "10.0.0.2"
    return fake


@pytest.mark.parametrize(("lease_s", "dials"), [(LEASE_S, 2), (0.0, 1)])
def test_an_agent_that_hears_nothing_dials_again(tmp_path: Path, lease_s: float, dials: int) -> None:
    """But not one without a lease, as that of the supervisor's machine, whose
    connection cannot break alone."""

    async def story() -> None:
        lines: list[Line] = []

        async def dial() -> tuple[Line, str]:
            lines.append(Line(answers=10 if not lines else 1000, lease_s=lease_s))
            return lines[-1], "10.0.0.2"

        agent = Agent("n1", dial, shims(), tmp_path)
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(9.5)
        assert len(lines) == 1
        await asyncio.sleep(8.0)
        assert len(lines) == dials
        assert [line.closed for line in lines] == [True, False][-dials:]
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    virtually(story())


def test_an_agent_says_once_how_long_it_waits_for_its_supervisor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        lines: list[Line] = []

        async def dial() -> tuple[Line, str]:
            if lines or asyncio.get_running_loop().time() - began < 5.0:
                raise ConnectionRefusedError("refused")
            lines.append(Line(answers=10, lease_s=LEASE_S))
            return lines[-1], "10.0.0.2"

        began = asyncio.get_running_loop().time()
        agent = Agent("n1", dial, shims(), tmp_path)
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(30.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    virtually(story())
    assert flush()
    first, second = (one.getMessage() for one in caplog.records if "waiting" in one.getMessage())
    assert re.fullmatch("node n1: waiting up to 29[78] s for the supervisor: refused", first)
    assert re.fullmatch("node n1: waiting up to (1[0-9]|2[0-9]) s for the supervisor: refused", second)


def test_the_end_of_an_agent_says_that_it_waits_for_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        left = shims()
        left.empty = asyncio.Event()
        left.kill_all.side_effect = left.empty.set

        async def dial() -> tuple[Line, str]:
            return Line(answers=1000, lease_s=LEASE_S), "10.0.0.2"

        agent = Agent("n1", dial, left, tmp_path)
        running = asyncio.create_task(agent.run())
        await asyncio.sleep(2.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    virtually(story())
    assert flush()
    assert re.search("node n1: waiting up to [0-9.]+ s for its replicas to end", caplog.text)

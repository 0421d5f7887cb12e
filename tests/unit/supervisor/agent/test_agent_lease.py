"""What an agent does with its lease, in virtual time: over a supervisor that answers
late or not at all, and over fake shims.

Covers: supervisor/agent/agent.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicas.linux import private
from replicas.supervisor.agent import agent as agent_module
from replicas.supervisor.agent import messages as wire
from replicas.supervisor.agent.agent import Agent
from replicas.supervisor.wire.part_state import PartState
from tests.support.virtual import virtually

LEASE_S = 10.0
ENDS_S = 0.2
"""How long the fake processes take to die of SIGKILL."""


class Line:
    """A connection to a supervisor that takes every agent.

    :ivar said: what the agent has said.
    :ivar mute: nothing passes any more, in either direction.
    """

    def __init__(self, world: LeaseWorld) -> None:
        self._world = world
        self._orders: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        self.said: list[wire.AgentMessage] = []
        self.mute = False

    async def send(self, message: bytes) -> None:
        if self.mute:
            return
        self.said.append(wire.decode_from_agent(message))
        match self.said[-1]:
            case wire.Hello():
                await asyncio.sleep(self._world.answer_s)
                self.say(self._world.welcome)
            case wire.Beat(number) if self._world.hears:
                self.say(wire.Heard(number))

    def say(self, order: wire.Order) -> None:
        if not self.mute:
            self._orders.put_nowait(wire.encode(order))

    def fail(self) -> None:
        self._orders.put_nowait(ConnectionResetError("reset"))

    async def recv(self) -> bytes:
        if isinstance(order := await self._orders.get(), OSError):
            raise order
        return order

    async def close(self) -> None: ...


class LeaseWorld:
    """An agent, its fake shims and its supervisor.

    :ivar dial_s: how long a connection takes; ``answer_s``: and the answer to a Hello.
    :ivar hears: whether the supervisor answers beats.
    :ivar refused: nobody listens there.
    :ivar log: what has happened, and when.
    """

    def __init__(self, folder: Path, *, local: bool = False, adopt_s: float = 0.0) -> None:
        self.dial_s = self.answer_s = 0.0
        self.hears, self.refused = True, False
        self.lines: list[Line] = []
        self.log: list[tuple[float, str]] = []
        self.leases: list[tuple[float, float | None]] = []
        self.welcome = self.welcomes(local=local, adopt_s=adopt_s)
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.agent = Agent("n1", self._dial, self._make_shims(), folder)
        self.running = asyncio.create_task(self.agent.run())

    @staticmethod
    def welcomes(*, local: bool = False, adopt_s: float = 0.0, token: str = "t") -> wire.Welcome:
        lease_s = 0.0 if local else max(LEASE_S, adopt_s)
        return wire.Welcome(
            run="r", supervisor="1", endpoint="", token=token, state_id="", lease_s=lease_s, adopt_s=adopt_s
        )

    @property
    def now(self) -> float:
        return round(self._loop.time() - self._began, 3)

    def note(self, what: str) -> None:
        self.log.append((self.now, what))

    def when(self, what: str) -> list[float]:
        return [at for at, one in self.log if one == what]

    async def _dial(self) -> tuple[Line, str]:
        self.note("dial")
        await asyncio.sleep(self.dial_s)
        if self.refused:
            raise ConnectionRefusedError("refused")
        self.lines.append(Line(self))
        return self.lines[-1], "10.0.0.2"

    def _make_shims(self) -> Any:
        """One shim lives until everything is ended."""
        fake = mock.Mock(aclose=mock.AsyncMock(), groups=mock.Mock(refused=""))
        fake.take_all_states.return_value, fake.take_changed_states.return_value, fake.take_stacks.return_value = (
            (),
            [],
            [],
        )
        fake.address, fake.empty = "10.0.0.2", asyncio.Event()

        def start(order: wire.Start) -> None:
            self.note("start")
            fake.empty.clear()

        def kill_all() -> None:
            self.note("kill")
            self._loop.call_later(ENDS_S, fake.empty.set)

        fake.obey, fake.kill_all = start, kill_all
        fake.stop_all = lambda _: self.note("end")
        fake.check_shims = lambda _, until, *__: self.leases.append(
            (self.now, None if until is None else round(until - self._began, 3))
        )
        self.shims = fake
        return fake


@asynccontextmanager
async def world(folder: Path, **options: Any) -> AsyncIterator[LeaseWorld]:
    made = LeaseWorld(folder, **options)
    try:
        yield made
    finally:
        made.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await made.running


def test_a_dial_under_way_when_the_lease_ends_is_not_taken(tmp_path: Path) -> None:
    """Neither one that is connected nor one that is answered while everything ends: the
    next one is, with a lease of its own, and only that is told to start anything."""

    async def story(dial_s: float, answer_s: float) -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(2.5)
            here.hears, here.dial_s, here.answer_s = False, dial_s, answer_s
            await asyncio.sleep(10.0)  # heard last at 2, so the lease ends at 12
            assert here.when("end") == [12.0]
            here.hears, here.dial_s, here.answer_s = True, 0.0, 0.0
            for _ in range(60):
                await asyncio.sleep(0.1)
                here.lines[-1].say(wire.Start(spec={"nonce": "new"}))
            (killed,) = here.when("kill")
            assert killed == 15.0
            assert here.when("start"), "the node is offered anew"
            assert min(here.when("start")) > killed + ENDS_S
            assert all(until is not None for at, until in here.leases if at > killed + ENDS_S + 1.0)
            here.lines[-1].mute = here.refused = True
            await asyncio.sleep(LEASE_S)
            assert len(here.when("end")) == 2, "the new lease is over, too"

    virtually(story(dial_s=5.7, answer_s=0.0))
    virtually(story(dial_s=0.0, answer_s=5.7))


def test_the_shims_of_the_supervisor_s_machine_have_a_patience(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, local=True, adopt_s=60.0) as here:
            await asyncio.sleep(2.5)
            assert here.shims.patience_s == 60.0
        async with world(tmp_path, local=True) as here:
            await asyncio.sleep(2.5)
            assert here.shims.patience_s == 20.0
        async with world(tmp_path) as here:
            here.shims.patience_s = 0.0
            await asyncio.sleep(2.5)
            assert here.shims.patience_s == 0.0, "a lease is enough"

    virtually(story())


def test_a_lease_that_is_renewed_in_its_last_second_reaches_the_shims_at_once(tmp_path: Path) -> None:
    """They have the same lease, and would end before the agent's next look."""

    async def heard() -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(0.5)
            here.hears = False
            await asyncio.sleep(9.2)
            number = max(one.number for one in here.lines[0].said if isinstance(one, wire.Beat))
            here.lines[0].say(wire.Heard(number))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert here.leases[-1] == (9.7, 19.0), "from when the beat was sent"

    async def taken_again() -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(0.5)
            here.hears, here.dial_s = False, 4.6
            await asyncio.sleep(9.5)
            (_, dialed) = here.when("dial")
            at = round(dialed + here.dial_s, 3)
            assert 9.0 < at < 10.0
            assert (at, at + LEASE_S) in here.leases

    async def by_another_supervisor() -> None:
        async with world(tmp_path, local=True, adopt_s=5.0) as here:
            await asyncio.sleep(0.5)
            here.dial_s = 4.6
            here.lines[0].fail()
            await asyncio.sleep(4.9)
            (_, dialed) = here.when("dial")
            assert (5.0, 5.5) in here.leases
            assert here.leases[-1] == (round(dialed + here.dial_s, 3), None)

    with mock.patch.object(agent_module, "_SILENCE_S", 3600.0):
        virtually(heard())
    virtually(taken_again())
    virtually(by_another_supervisor())


def leavings(line: Line) -> int:
    return sum(isinstance(one, wire.Leaving) for one in line.said)


def test_a_node_that_is_leaving_dials_again_within_its_lease(tmp_path: Path) -> None:
    """And says that it leaves to whoever answers: its replicas may be in a sync."""

    async def story() -> None:
        async with world(tmp_path, adopt_s=60.0) as here:
            await asyncio.sleep(2.5)
            here.lines[0].say(wire.Start(spec={"nonce": "new"}))
            here.agent.leave("SIGTERM")
            await asyncio.sleep(1.0)
            assert leavings(here.lines[0]) == 1
            here.refused = True
            here.lines[0].fail()
            await asyncio.sleep(30.0)
            assert here.when("end") == []
            here.refused = False
            await asyncio.sleep(1.5)
            assert leavings(here.lines[1]) == 1
            here.lines[1].say(wire.Over("the node is drained"))
            assert await here.running == 0

    virtually(story())


def test_stacks_that_a_shim_has_saved_are_told_before_its_end(tmp_path: Path) -> None:
    """The end is told of with the stacks that are known by then."""

    async def story() -> None:
        async with world(tmp_path) as made:
            await asyncio.sleep(1.5)
            ended = PartState("n", "a", 0, 1, 0, gone=True)
            made.shims.take_stacks.side_effect = [[("n", {"a/0/0": "where it is stuck"})], *([[]] * 9)]
            made.shims.take_changed_states.side_effect = [[ended], *([[]] * 9)]
            await asyncio.sleep(1.5)
            told = [type(one) for one in made.lines[0].said if isinstance(one, wire.StacksFound | wire.PartNews)]
            assert told == [wire.StacksFound, wire.PartNews]

    virtually(story())


def test_a_node_that_is_leaving_ends_with_its_lease(tmp_path: Path) -> None:
    """It does not offer itself anew."""

    async def story() -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(2.5)
            here.lines[0].say(wire.Start(spec={"nonce": "new"}))
            here.agent.leave("SIGTERM")
            await asyncio.sleep(0)
            here.refused = True
            here.lines[0].fail()
            assert await here.running == 1
            assert here.when("end") == [12.0]
            assert here.now < 16.0

    virtually(story())


def test_a_node_that_is_leaving_and_has_nothing_does_not_wait_for_its_lease(tmp_path: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, adopt_s=60.0) as here:
            await asyncio.sleep(2.5)
            here.shims.empty.set()
            here.agent.leave("SIGTERM")
            here.refused = True
            here.lines[0].fail()
            assert await here.running == 1
            assert here.now < 6.0

    virtually(story())


def test_a_second_signal_ends_a_node_at_once(tmp_path: Path) -> None:
    """Also one that has no connection, and one whose lease is over; what it is told
    meanwhile is not obeyed."""

    async def connected() -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(2.5)
            here.lines[0].say(wire.Start(spec={"nonce": "new"}))
            here.agent.leave("SIGTERM")
            await asyncio.sleep(1.0)
            here.agent.leave("SIGTERM")
            await asyncio.sleep(0.1)
            here.lines[0].say(wire.Start(spec={"nonce": "another"}))
            assert await here.running == 0
            assert (here.when("end"), len(here.when("start"))) == ([3.5], 1)

    async def away() -> None:
        async with world(tmp_path, adopt_s=60.0) as here:
            await asyncio.sleep(2.5)
            here.lines[0].say(wire.Start(spec={"nonce": "new"}))
            here.agent.leave("SIGTERM")
            here.refused = True
            here.lines[0].fail()
            await asyncio.sleep(10.0)
            here.agent.leave("SIGTERM")
            await here.running
            assert here.when("end") == [12.5]

    async def over() -> None:
        async with world(tmp_path) as here:
            await asyncio.sleep(2.5)
            here.hears, here.dial_s = False, 3600.0
            await asyncio.sleep(20.0)
            assert here.when("end") == [12.0]
            here.agent.leave("SIGTERM")
            await here.running
            assert here.now < 27.0

    virtually(connected())
    virtually(away())
    virtually(over())


def test_a_node_whose_disk_is_full_when_the_tokens_change_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the earlier token, which is valid still, until there is room again."""
    full, replace = False, private.replace

    def on_disk(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, data)

    async def story() -> None:
        nonlocal full
        async with world(tmp_path) as here:
            await asyncio.sleep(2.5)
            full = True
            here.welcome = here.welcomes(token="new")
            here.lines[0].say(wire.NewToken("new", "operator"))
            await asyncio.sleep(5.0)
            here.lines[0].fail()
            await asyncio.sleep(5.0)
            assert len(here.lines) == 2
            here.lines[1].say(wire.Start(spec={"nonce": "x"}))
            await asyncio.sleep(0.1)
            assert len(here.when("start")) == 1
            assert (tmp_path / "token").read_text() == "t"
            assert caplog.text.count("trying again to write the run's token") == 1
            full = False
            await asyncio.sleep(1.5)
            assert (tmp_path / "token").read_text() == "new"
            assert here.when("end") == []

    with mock.patch.object(private, "replace", on_disk):
        virtually(story())

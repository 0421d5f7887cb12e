"""When the coordinator's own host is cut off, nobody is judged by the time in which
nobody could be heard.

Covers: coordinator/engine.py, coordinator/hello_checks.py, coordinator/sessions.py,
coordinator/subscribers.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from replicas.coordinator.decisions import DecisionLog
from replicas.coordinator.engine import Engine
from replicas.coordinator.sessions import MemberSession
from replicas.core.base.effects import EpochStarted, Event, MemberJoined, MemberLost
from replicas.core.members.heartbeats import DEAF_MAX_S, ChannelSilence
from replicas.core.members.roster import GroupShape
from replicas.messages import (
    PROTOCOL,
    Bye,
    Heartbeat,
    Hello,
    LaneForm,
    LaneFormed,
    Located,
    MemberFrame,
    OperationDone,
    OperationEnd,
    OperationGo,
    OperationPost,
    decode_server_frame,
)
from replicas.messages.identity import ProcessIdentity
from tests.support.channel_world import peer_config
from tests.support.virtual import virtually

LEASE_S = 12.0


class FarMember:
    """A peer on another host: it does what it is told, as soon as it hears it.
    ``stuck``: its operations do not end."""

    def __init__(self, engine: Engine, replica: int, *, stuck: bool = False) -> None:
        self.engine = engine
        self.stuck = stuck
        self.heard: list[Any] = []
        self.on_writable: Callable[[], None] = lambda: None
        self.on_bytes: Callable[[], None] = lambda: None
        self._sent = self._received = 0
        self.cut = False
        self._kept: list[list[bytes]] = []
        hello = Hello(
            protocol=PROTOCOL,
            run="run",
            channel="outer",
            group="peer",
            replica=replica,
            rank=0,
            world_size=1,
            incarnation=f"n{replica}",
            generation=1,
            process=ProcessIdentity(1, 1, f"another machine {replica}", 1),
        )
        self.session: MemberSession = engine.open(hello, self, "10.0.0.9")

    def rtt_s(self) -> float:
        return 0.0

    def takes_more(self) -> bool:
        return True

    def write(self, frames: Sequence[bytes]) -> None:
        if self.cut:
            self._kept.append(list(frames))
            return
        for data in frames:
            frame = decode_server_frame(data)
            self._received = max(self._received, frame.seq)
            self.heard.append(frame.body)
            self._answer(frame.body)

    def heal(self) -> None:
        """It is heard again, and hears what was sent meanwhile."""
        self.cut = False
        self.say(Heartbeat())
        kept, self._kept = self._kept, []
        for frames in kept:
            self.write(frames)

    def _answer(self, message: Any) -> None:
        match message:
            case LaneForm():
                self.say(LaneFormed(message.lane))
            case OperationGo() if not self.stuck:
                self.say(OperationDone(message.operation))
            case _ if type(message).__name__ == "Locate":
                self.say(Located(-1))

    def say(self, message: Any) -> None:
        numbered = not isinstance(message, Heartbeat)
        self._sent += numbered
        self.engine.receive(self.session, MemberFrame(self._sent if numbered else 0, self._received, message))

    @property
    def ends(self) -> list[OperationEnd]:
        return [message for message in self.heard if isinstance(message, OperationEnd)]


class NoStore:
    """An address, and nothing behind it."""

    address = ("10.0.0.1", 1)

    def sweep(self, prefix: str) -> None: ...

    def replace(self, address: tuple[str, int]) -> None: ...


def peers_engine(replicas: int) -> Engine:
    return Engine(
        {"outer": peer_config()},
        {"peer": GroupShape(replicas=replicas, heartbeat_timeout_s=LEASE_S)},
        run="run",
        decisions=DecisionLog(None),
        store=cast("Any", NoStore()),
    )


def scene(work: Callable[[Engine, list[FarMember]], Awaitable[None]], *, stuck: bool = False) -> list[Event]:
    """Three peers on other hosts, in virtual time. Returns what happened."""
    events: list[Event] = []

    async def run() -> None:
        engine = peers_engine(3)
        engine.subscribe(events.append)
        members = [FarMember(engine, replica, stuck=stuck) for replica in range(3)]
        ticks = asyncio.create_task(engine.tick_forever())
        beats = asyncio.create_task(beat(members))
        await asyncio.sleep(3)
        await work(engine, members)
        for task in (ticks, beats):
            task.cancel()

    virtually(run())
    return events


async def beat(members: Sequence[FarMember]) -> None:
    while True:
        for member in members:
            if not member.cut:
                member.say(Heartbeat())
        await asyncio.sleep(1)


def post(members: Sequence[FarMember]) -> None:
    for member in members:
        member.say(OperationPost(1, "barrier", (), 60.0))


def test_who_is_heard_first_after_a_cut_of_the_coordinator_does_not_go_on_alone() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        post(members)
        await asyncio.sleep(0.5)
        assert not any(member.ends for member in members)
        for member in members:
            member.cut = True
        await asyncio.sleep(5)
        for member in members:  # TCP waits up to as long again
            member.stuck = False
            member.heal()
            for go in [message for message in member.heard if isinstance(message, OperationGo)]:
                member.say(OperationDone(go.operation))
            await asyncio.sleep(2.4)
        assert [len(end.receipt.members) for member in members for end in member.ends if end.receipt] == [3, 3, 3]

    scene(work, stuck=True)


def test_no_lease_runs_out_in_a_cut_of_the_coordinator() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        for member in members:
            member.cut = True
        await asyncio.sleep(LEASE_S + 8)
        for member in members:
            await asyncio.sleep(4)
            member.heal()
        await asyncio.sleep(3)
        post(members)
        await asyncio.sleep(1)
        assert [len(end.receipt.members) for member in members for end in member.ends if end.receipt] == [3, 3, 3]

    assert not [event for event in scene(work) if isinstance(event, MemberLost)]


def test_one_that_stays_away_after_the_cut_is_judged_as_ever() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        post(members)
        for member in members:
            member.cut = True
        await asyncio.sleep(5)
        for member in members[:2]:
            member.stuck = False
            member.heal()
            for go in [message for message in member.heard if isinstance(message, OperationGo)]:
                member.say(OperationDone(go.operation))
        await asyncio.sleep(12)
        assert [len(end.receipt.members) for member in members for end in member.ends if end.receipt] == [2, 2]

    scene(work, stuck=True)


def test_when_nobody_ever_comes_back_leases_end_in_the_end() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        for member in members:
            member.cut = True
        await asyncio.sleep(DEAF_MAX_S + LEASE_S + 5)

    lost = [event.member.name for event in scene(work) if isinstance(event, MemberLost)]
    assert lost == ["peer/0/0", "peer/1/0", "peer/2/0"]


def test_one_silent_member_is_judged_while_another_is_heard() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        members[1].cut = True
        await asyncio.sleep(LEASE_S + 2)

    lost = [event.member.name for event in scene(work) if isinstance(event, MemberLost)]
    assert lost == ["peer/1/0"]


def test_time_is_forgiven_once() -> None:
    silence = ChannelSilence()
    assert silence.take_uncounted_s(5.0) == 0.0, "nobody has ever been heard"
    assert silence.end_silence(10.0) == 0.0
    assert silence.take_uncounted_s(11.0) == 0.0, "that is from one heartbeat to the next"
    assert [silence.take_uncounted_s(now) for now in (12.5, 13.0, 14.0)] == [2.5, 0.5, 1.0]
    assert silence.end_silence(14.5) == 4.5
    assert silence.end_silence(14.6) == 0.0
    assert silence.take_uncounted_s(15.0) == 0.0


def test_when_the_last_member_has_left_that_is_no_silence() -> None:
    async def work(engine: Engine, members: list[FarMember]) -> None:
        for member in members:
            member.say(Bye())
        await asyncio.sleep(5)
        assert engine._silence.end_silence(asyncio.get_running_loop().time()) == 0.0

    scene(work)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit("of the program"), ValueError("of the program")])
def test_what_ends_the_program_is_raised_from_its_loop_when_the_work_in_progress_is_done(error: BaseException) -> None:
    """By a coordinator on the program's main thread; another error ends nothing."""
    assert threading.current_thread() is threading.main_thread()
    heard: list[Any] = []

    async def run() -> None:
        engine = peers_engine(1)
        engine.subscribe(raises)
        engine.subscribe(heard.append)
        FarMember(engine, 0)
        heard.append("joined")
        try:
            await asyncio.sleep(0)
            heard.append("the program goes on")
        finally:
            await asyncio.sleep(0)
            heard.append("cleaned up")

    def raises(event: Event) -> None:
        raise error

    if isinstance(error, Exception):
        asyncio.run(run())
    else:
        with pytest.raises(type(error)):
            asyncio.run(run())
    assert ("the program goes on" in heard) == isinstance(error, Exception)
    assert {type(one) for one in heard} >= {MemberJoined, EpochStarted}
    assert {"joined", "cleaned up"} <= {one for one in heard if isinstance(one, str)}

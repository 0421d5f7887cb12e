"""The member's side of a session against a scripted coordinator.

Covers: channel/session/session.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from replicas import errors
from replicas.channel.session import session as session_module
from replicas.channel.session.session import MALFORMED_MAX, SILENCE_S, Session
from replicas.common.logs import flush
from replicas.common.patience import PAUSE_S
from replicas.common.tasks import say_if_slow
from replicas.messages import (
    PROTOCOL,
    Ack,
    Bye,
    ChannelSettings,
    Commit,
    FromCoordinator,
    FromMember,
    Heartbeat,
    HeldVersion,
    Hello,
    LaneFormed,
    MemberFrame,
    OperationPost,
    Progress,
    Refused,
    Segment,
    ServerFrame,
    View,
    Welcome,
    WireError,
    decode_member_frame,
    encode,
)
from replicas.messages.identity import ProcessIdentity
from tests.support.machine.users import ATTACKER, needs_users, stranger
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

SETTINGS = ChannelSettings("target", 5.0, 2, "leader", "leader", heartbeat_interval_s=0.02)
HELLO = Hello(PROTOCOL, "run", "policy", "rollout", 0, 0, 1, "abc", 1, ProcessIdentity(1, 2, "boot", 3))


class Coordinator:
    """Welcomes every connection and hands its frames to the test. ``term`` and
    ``received`` go into the Welcome."""

    def __init__(self) -> None:
        self.term = 7
        self.received = 0
        self.answer: FromCoordinator | None = None
        self.silent = False
        self.connections: asyncio.Queue[ServerConnection] = asyncio.Queue()
        self.hellos: list[Hello] = []
        self.frames: asyncio.Queue[MemberFrame] = asyncio.Queue()
        self.beats = 0
        self.sent = 0

    async def serve(self, websocket: ServerConnection) -> None:
        hello = decode_member_frame(await self._recv(websocket)).body
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        welcome = Welcome(self.term, SETTINGS, self.received, epoch=1, address="127.0.0.1", replica=0, latest=3)
        await websocket.send(encode(ServerFrame(0, self.received, self.answer or welcome)))
        await self.connections.put(websocket)
        with contextlib.suppress(ConnectionClosed):
            while True:
                frame = decode_member_frame(await self._recv(websocket))
                if isinstance(frame.body, Heartbeat):
                    self.beats += 1
                    if not self.silent:
                        await websocket.send(encode(ServerFrame(0, self.received, Ack())))
                else:
                    await self.frames.put(frame)

    @staticmethod
    async def _recv(websocket: ServerConnection) -> bytes:
        data = await websocket.recv()
        assert isinstance(data, bytes)
        return data

    async def send(self, websocket: ServerConnection, body: FromCoordinator) -> None:
        self.sent += 1
        await websocket.send(encode(ServerFrame(self.sent, self.received, body)))

    async def frame(self) -> MemberFrame:
        async with asyncio.timeout(30):
            return await self.frames.get()

    async def connection(self) -> ServerConnection:
        async with asyncio.timeout(30):
            return await self.connections.get()


class Handler:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[FromCoordinator] = asyncio.Queue()
        self.welcomes: list[bool] = []
        self.welcome = asyncio.Event()
        self.over: asyncio.Future[errors.ReplicasError] = asyncio.get_running_loop().create_future()
        self.reasons: list[str] = []
        self.pauses: list[int] = []
        """How many messages had come by then."""

    def update_hello(self, hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, held=(HeldVersion(3, "d"),), loaded=3)

    def before_heartbeat(self) -> None:
        pass

    def welcomed(self, welcome: Welcome, resumed: bool) -> None:
        self.welcomes.append(resumed)
        self.welcome.set()

    def handle(self, message: FromCoordinator) -> None:
        self.messages.put_nowait(message)

    def paused(self) -> None:
        self.pauses.append(self.messages.qsize())

    def disconnected(self, reason: str) -> None:
        self.reasons.append(reason)

    def session_over(self, error: errors.ReplicasError) -> None:
        self.over.set_result(error)


class Loop:
    """The test's own loop in place of the session thread."""

    def __init__(self) -> None:
        self.fds: set[int] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return asyncio.create_task(coroutine, name=name)


class SessionWorld:
    def __init__(self, server: Server, coordinator: Coordinator) -> None:
        self.server = server
        self.coordinator = coordinator
        self.loop = Loop()
        self.handler = Handler()
        self.session = Session(self.loop, self.endpoint, "secret", HELLO, self.handler)  # type: ignore[arg-type]  # a fake

    @property
    def endpoint(self) -> str:
        host, port = next(iter(self.server.sockets)).getsockname()[:2]
        return f"{host}:{port}"


@pytest.fixture
async def world() -> AsyncIterator[SessionWorld]:
    coordinator = Coordinator()
    async with serve(coordinator.serve, "127.0.0.1", 0, compression=None, ping_interval=None) as server:
        found = SessionWorld(server, coordinator)
        yield found
        await found.session.close("end", 0.2)
        assert not found.loop.fds


def _bodies(frames: list[MemberFrame]) -> list[tuple[int, FromMember]]:
    return [(frame.seq, frame.body) for frame in frames]


async def test_opens_sends_and_says_goodbye(world: SessionWorld) -> None:
    await world.session.open(5)
    assert world.handler.welcomes == [False]
    assert world.coordinator.hellos[0].held == (HeldVersion(3, "d"),)
    world.session.send(LaneFormed("a"))
    world.session.send(LaneFormed("b"))
    frames = [await world.coordinator.frame() for _ in range(2)]
    assert _bodies(frames) == [(1, LaneFormed("a")), (2, LaneFormed("b"))]
    await world.session.close("done", 2)
    assert (await world.coordinator.frame()).body == Bye("done")
    world.session.send(LaneFormed("c"))
    assert world.coordinator.frames.empty()


async def test_what_cannot_travel_is_refused_before_it_is_queued(world: SessionWorld) -> None:
    await world.session.open(5)
    many = tuple(Segment("float32", (1,)) for _ in range(400_000))
    for bad in (LaneFormed("\udce9"), Progress(2**70), OperationPost(1, "all_reduce", many, 1.0), Bye("x" * 2**21)):
        with pytest.raises(errors.UsageError, match=type(bad).__name__):
            world.session.send(bad)
    world.session.send(LaneFormed("a"))
    assert _bodies([await world.coordinator.frame()]) == [(1, LaneFormed("a"))]


async def test_heartbeats_come_as_often_as_the_coordinator_says(world: SessionWorld) -> None:
    await world.session.open(5)
    connection = await world.coordinator.connection()
    await world.coordinator.send(connection, View(2, (), heartbeat_interval_s=5.0))
    await world.handler.messages.get()
    assert world.session.heartbeat_interval_s == 5.0
    await world.coordinator.send(connection, View(3, ()))
    assert await world.handler.messages.get() == View(3, ()), "says nothing of it: as before"
    assert world.session.heartbeat_interval_s == 5.0


async def test_resumes_after_a_broken_connection(world: SessionWorld) -> None:
    await world.session.open(5)
    first = await world.coordinator.connection()
    await world.coordinator.send(first, Commit(4, "x"))
    assert await world.handler.messages.get() == Commit(4, "x")
    for name in "abc":
        world.session.send(LaneFormed(name))
    for _ in range(3):
        await world.coordinator.frame()
    world.coordinator.received = 1  # the coordinator got only the first of the three
    first.transport.abort()
    second = await world.coordinator.connection()
    hello = world.coordinator.hellos[1]
    assert (hello.resume_term, hello.received) == (7, 1)
    frames = [await world.coordinator.frame() for _ in range(2)]
    assert _bodies(frames) == [(2, LaneFormed("b")), (3, LaneFormed("c"))]
    await second.send(encode(ServerFrame(1, 3, Commit(4, "x"))))  # resent: must not be handled again
    await world.coordinator.send(second, Commit(5, "y"))
    assert await world.handler.messages.get() == Commit(5, "y")
    assert world.handler.welcomes == [False, True]
    assert len(world.handler.reasons) == 1


class Ending:
    """A connection that ends when the test says so, and takes all that is written to
    it."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.heard = time.monotonic()

    async def recv(self) -> bytes:
        await self.end.wait()
        raise OSError("the connection was reset")

    async def send(self, data: bytes) -> None:
        """It is gone."""


@pytest.mark.parametrize("ticks", range(-8, 9))
async def test_the_end_of_a_connection_is_not_lost_to_something_to_write(ticks: int) -> None:
    """In whichever order, and so many turns of the loop apart, the two come: all that
    serves the connection ends."""
    ending = Ending()
    session = Session(Loop(), "127.0.0.1:1", "secret", HELLO, Handler())  # type: ignore[arg-type]  # a fake
    session.heartbeat_interval_s = 60.0
    serving = asyncio.create_task(session._serve(ending))  # type: ignore[arg-type]  # a fake
    await asyncio.sleep(0.01)
    events = [ending.end, session._wake]
    for event in events if ticks > 0 else reversed(events):
        event.set()
        for _ in range(abs(ticks)):
            await asyncio.sleep(0)
    done, _ = await asyncio.wait([serving], timeout=5.0)
    assert done, "it still serves a connection that has ended"
    with pytest.raises(OSError, match="was reset"):
        await serving


async def test_a_new_term_starts_from_scratch(world: SessionWorld) -> None:
    await world.session.open(5)
    first = await world.coordinator.connection()
    world.session.send(LaneFormed("a"))
    await world.coordinator.frame()
    world.coordinator.term = 8
    world.handler.welcome.clear()
    first.transport.abort()
    await asyncio.wait_for(world.handler.welcome.wait(), 30)
    assert world.handler.welcomes == [False, False]
    world.session.send(LaneFormed("b"))
    assert _bodies([await world.coordinator.frame()]) == [(1, LaneFormed("b"))]


async def test_messages_sent_while_disconnected_go_out_later(world: SessionWorld) -> None:
    await world.session.open(5)
    first = await world.coordinator.connection()
    first.transport.abort()
    world.session.send(LaneFormed("a"))
    assert _bodies([await world.coordinator.frame()]) == [(1, LaneFormed("a"))]


async def test_refused(world: SessionWorld) -> None:
    world.coordinator.answer = Refused(WireError.of(errors.UnknownChannel("no such channel")))
    with pytest.raises(errors.UnknownChannel, match="no such channel"):
        await world.session.open(5)


async def test_fenced_later(world: SessionWorld) -> None:
    await world.session.open(5)
    connection = await world.coordinator.connection()
    await connection.send(encode(ServerFrame(0, 0, Refused(WireError.of(errors.Fenced("another one"))))))
    assert isinstance(await asyncio.wait_for(world.handler.over, 30), errors.Fenced)
    assert not world.session.connected


GARBAGE = [b"\xff\x00garbage", b"", encode(ServerFrame(1, 0, Ack()))[:-1]]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_spoiled_frame_costs_a_connection_and_no_more(world: SessionWorld, garbage: bytes) -> None:
    await world.session.open(5)
    connection = await world.coordinator.connection()
    await connection.send(garbage)
    again = await world.coordinator.connection()
    await again.send(encode(ServerFrame(1, 0, Commit(9, "x"))))
    assert await asyncio.wait_for(world.handler.messages.get(), 30) == Commit(9, "x")
    assert not world.handler.over.done()


@pytest.mark.slow
@pytest.mark.parametrize("garbage", GARBAGE)
async def test_nothing_but_garbage_ends_the_session_with_a_clear_error(world: SessionWorld, garbage: bytes) -> None:
    await world.session.open(5)
    for _ in range(MALFORMED_MAX):
        connection = await world.coordinator.connection()
        await connection.send(garbage)
    error = await asyncio.wait_for(world.handler.over, 30)
    assert isinstance(error, errors.InternalError)
    assert "sent a malformed frame" in str(error)


async def test_a_gap_makes_a_new_connection(world: SessionWorld) -> None:
    await world.session.open(5)
    connection = await world.coordinator.connection()
    await connection.send(encode(ServerFrame(5, 0, Commit(9, "x"))))
    await world.coordinator.connection()
    assert world.handler.messages.empty()
    assert world.coordinator.hellos[1].received == 0


@pytest.mark.slow
async def test_a_silent_coordinator_is_dialled_again_after_three_missed_acks(world: SessionWorld) -> None:
    world.coordinator.silent = True
    await world.session.open(5)
    await world.coordinator.connection()
    began = time.monotonic()
    await world.coordinator.connection()
    assert "no bytes came" in world.handler.reasons[0]
    assert world.coordinator.beats >= 2
    assert time.monotonic() - began < SILENCE_S - 2.0


@pytest.mark.slow
async def test_a_pause_is_told_before_the_messages_that_came_meanwhile(world: SessionWorld) -> None:
    await world.session.open(5)
    connection = await world.coordinator.connection()
    await world.coordinator.send(connection, Commit(8, "digest"))
    assert isinstance(await asyncio.wait_for(world.handler.messages.get(), 30), Commit)
    assert not world.handler.pauses
    await world.coordinator.send(connection, Commit(9, "digest"))
    time.sleep(PAUSE_S + 0.3)  # noqa: ASYNC251  # all of this process stands still
    assert world.handler.messages.empty()
    assert isinstance(await asyncio.wait_for(world.handler.messages.get(), 30), Commit)
    assert world.handler.pauses == [0]
    assert not world.handler.reasons, "what came meanwhile is read"


@pytest.mark.slow
async def test_a_message_that_comes_in_slowly_is_no_silence(
    world: SessionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "SILENCE_S", 0.1)
    world.coordinator.silent = True
    await world.session.open(5)
    connection = await world.coordinator.connection()
    sent = Commit(9, "x" * 3000)
    data = Frame(Opcode.BINARY, encode(ServerFrame(1, 0, sent))).serialize(mask=False)
    began = time.monotonic()
    for at in range(0, len(data), 100):  # for twice as long as a silent one is waited for
        connection.transport.write(data[at : at + 100])
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(world.handler.messages.get(), 30) == sent
    assert time.monotonic() - began > 1.2
    assert world.coordinator.connections.empty()
    assert not world.handler.reasons


@pytest.mark.slow
async def test_a_connection_that_brings_nothing_is_followed_by_a_growing_pause(
    world: SessionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that the coordinator does not take is sent again with each
    connection."""
    monkeypatch.setattr("tenacity.wait.random.uniform", lambda low, high: high)
    await world.session.open(5)
    began, at = time.monotonic(), []
    world.session.send(LaneFormed("bad"))
    for _ in range(7):
        connection = await world.coordinator.connection()
        at.append(time.monotonic())
        assert (await world.coordinator.frame()).seq == 1
        connection.transport.abort()
    pauses = [later - earlier for earlier, later in pairwise(at)]
    assert time.monotonic() - began > 1.5
    assert pauses[-1] > 0.7
    world.coordinator.received = 1
    await (await world.coordinator.connection()).close()  # it was taken: this one was of use
    began = time.monotonic()
    await world.coordinator.connection()
    assert time.monotonic() - began < pauses[-1]


@pytest.mark.slow
async def test_a_link_that_is_cut_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel alone repeats a lost SYN later and later."""
    monkeypatch.setattr(session_module, "REACH_S", 0.2, raising=False)
    tries = 0
    three = asyncio.Event()

    async def lost(*_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            three.set()
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", lost)
    session = Session(Loop(), "127.0.0.1:1", "secret", HELLO, Handler())  # type: ignore[arg-type]  # a fake
    opening = asyncio.create_task(session.open(15))
    await asyncio.wait_for(three.wait(), 10)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)


async def test_nobody_there() -> None:
    handler = Handler()
    session = Session(Loop(), "127.0.0.1:1", "secret", HELLO, handler)  # type: ignore[arg-type]  # a fake
    with pytest.raises(errors.Disconnected, match=r"no coordinator answered at 127.0.0.1:1 within 0.2 s: .*Connect"):
        await session.open(0.2)


async def test_a_join_says_how_long_it_waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(session_module, "say_if_slow", partial(say_if_slow, after_s=0.15))
    session = Session(Loop(), "127.0.0.1:1", "secret", HELLO, Handler())  # type: ignore[arg-type]  # a fake
    with pytest.raises(errors.Disconnected):
        await session.open(0.2)
    assert flush()
    (text,) = (one.getMessage() for one in caplog.records if "waiting" in one.getMessage())
    assert text.startswith("channel policy: waiting for a coordinator at 127.0.0.1:1, up to 0.2 s: ")


async def test_a_lost_coordinator_that_does_not_come_back_is_in_the_log(
    world: SessionWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "WAIT_S", 0.1)
    await world.session.open(5)
    world.server.close()
    await wait_until(lambda: "waiting for a coordinator" in caplog.text, "it is told")
    assert caplog.text.count("while operations end by their deadlines") == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [(401, "does not accept the token"), (404, "is not a coordinator: it answers HTTP 404 to a session")],
)
async def test_refused_by_http(status: int, text: str) -> None:
    async def unused(websocket: ServerConnection) -> None:
        raise AssertionError

    async with serve(unused, "127.0.0.1", 0, process_request=lambda c, r: c.respond(status, "no\n")) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        session = Session(Loop(), f"127.0.0.1:{port}", "secret", HELLO, Handler())  # type: ignore[arg-type]  # a fake
        with pytest.raises(errors.UsageError, match=text):
            await session.open(5)


@pytest.mark.slow
@needs_users
async def test_whoever_has_taken_the_port_of_a_coordinator_is_not_shown_the_token() -> None:
    """A member asks for its coordinator again and again, also while that is dead and
    the port is free."""

    def squat(pipe: Connection) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname()[1])
            while True:
                connection, _ = listener.accept()
                with connection:
                    pipe.send(connection.recv(65536))

    with stranger(squat) as squatter:
        endpoint = f"127.0.0.1:{squatter.recv()}"
        owners = frozenset({os.geteuid()})
        session = Session(Loop(), endpoint, "secret", HELLO, Handler(), token_owners=owners)  # type: ignore[arg-type]  # a fake
        with pytest.raises(errors.Disconnected, match=f"user {ATTACKER}"):
            await session.open(1.0)
        await session.close("end", 0.2)
        assert squatter.recv() == b""


async def test_a_coordinator_of_the_tokens_owner_is_shown_it(world: SessionWorld) -> None:
    world.session._token_owners = frozenset({os.geteuid()})
    await world.session.open(5)
    assert world.session.connected

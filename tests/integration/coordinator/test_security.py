"""Strangers, and members gone mad: refused or cut within seconds, counted, and of no
harm to anybody else.

Covers: coordinator/server.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from websockets.exceptions import ConnectionClosed

from replicas import messages as wire
from replicas.coordinator import Coordinator, GroupShape, acceptor, server, sessions, websocket
from replicas.core.base.effects import Send
from tests.support.channel.members import Client
from tests.support.runs import alive
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

CHANNELS = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[Coordinator]:
    async with Coordinator(CHANNELS, groups={"rollout": GroupShape(replicas=9)}) as running:
        yield running


@pytest.fixture
async def coordinator(shared: Coordinator, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Coordinator]:
    """One for all: whatever a test does to it, the next one finds it in order, and
    without an error in its log."""
    shared.engine.refusals.clear()
    before = shared.store_pid
    yield shared
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors
    assert shared.store_pid == before
    for session in list(shared.engine._sessions.values()):
        shared.engine.lose(session.member, "exited")
    await wait_until(lambda: strangers(shared) == 0, "the end of its connections")


def strangers(coordinator: Coordinator) -> int:
    assert coordinator._server is not None
    assert coordinator._server._acceptor is not None
    rules = coordinator._server.rules
    return len(rules.strangers) + len(rules.unproven) + coordinator._server._acceptor.waiting


@pytest.fixture
async def bystander(coordinator: Coordinator) -> Client:
    client = Client(coordinator, replica=8, incarnation="bystander")
    assert isinstance(await client.join(), wire.Welcome)
    return client


async def is_well(client: Client) -> float:
    """Seconds until its heartbeat is answered."""
    began = time.monotonic()
    await client.say(wire.Heartbeat(), seq=0)
    while not isinstance(await client.next(), wire.Ack):
        await client.say(wire.Heartbeat(), seq=0)  # what is said anyway acknowledges, too: then there is no Ack
    return time.monotonic() - began


def count(coordinator: Coordinator, reason: str) -> int:
    return coordinator.refused()[reason]


async def counted(coordinator: Coordinator, reason: str, times: int = 1) -> None:
    await wait_until(lambda: count(coordinator, reason) >= times, f"{times} x {reason} in {coordinator.refused()}")


# ------------------------------------------------------------ strangers


async def connect(coordinator: Coordinator) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = coordinator.endpoint.split(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the other side ended it."""
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("bytes_of_it", [b"", b"GET /session HT"], ids=["silent", "half a request"])
async def test_a_connection_without_a_request_is_closed(
    coordinator: Coordinator, bystander: Client, monkeypatch: pytest.MonkeyPatch, bytes_of_it: bytes
) -> None:
    """One that asks for nothing (a browser's spare one, a probe) is not refused."""
    monkeypatch.setattr(acceptor, "REQUEST_TIMEOUT_S", 0.2)
    reader, writer = await connect(coordinator)
    writer.write(bytes_of_it)
    assert await ended(reader) == b""
    writer.close()
    counts = coordinator.refused()
    assert (counts.pop("timeout"), sum(counts.values())) == (bool(bytes_of_it), 0)
    await is_well(bystander)


async def test_a_request_that_comes_byte_by_byte_is_closed(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "REQUEST_TIMEOUT_S", 0.5)
    reader, writer = await connect(coordinator)
    with contextlib.suppress(ConnectionError):
        for byte in b"GET /session HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
            if count(coordinator, "timeout"):
                break
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
    await ended(reader)
    writer.close()
    await counted(coordinator, "timeout")


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3_000, b"431", "oversized"),
        (b"\x16\x03\x01\x02\x00", b"400", "tls"),
        (b"NO SUCH THING\r\n\r\n", b"400", "malformed"),
        (b"GET /nothing HTTP/1.1\r\nHost: x.example.com\r\n\r\n", b"403", "host"),
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nOrigin: http://x.example\r\n\r\n", b"403", "host"),
        (b"GET http://x.example/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", b"403", "host"),
    ],
    ids=["huge", "TLS", "no HTTP", "a name of others", "a page of others", "a target of others"],
)
async def test_what_is_turned_away_is_told_so(
    coordinator: Coordinator, bystander: Client, request_: bytes, status: bytes, reason: str
) -> None:
    reader, writer = await connect(coordinator)
    writer.write(request_)
    assert (await ended(reader)).startswith(b"HTTP/1.1 " + status)
    writer.close()
    assert count(coordinator, reason) == 1
    await is_well(bystander)


async def test_a_target_with_a_host_is_its_path() -> None:
    """As proxies get it, and `curl -x` sends it."""

    async def page(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{request.url.path} of {request.headers['host']}")

    async with Coordinator({}, routes=[Route("/a b", page)]) as made:
        reader, writer = await connect(made)
        writer.write(b"GET HTTP://localhost:1/a%20b?x=1 HTTP/1.1\r\nHost: x.example\r\n\r\n")
        answer = await ended(reader)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\n/a b of localhost:1")


async def test_a_page_of_others_opens_no_websocket(coordinator: Coordinator) -> None:
    reader, writer = await connect(coordinator)
    lines = ["GET /session HTTP/1.1", "Host: rebound.example.com", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==", "Sec-WebSocket-Version: 13", "", ""]
    writer.write("\r\n".join(lines).encode())
    answer = await ended(reader)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"does not answer to the name" in answer
    assert count(coordinator, "host") == 1


async def test_a_stranger_gets_one_answer(coordinator: Coordinator) -> None:
    """Whoever shows the token keeps the connection."""
    for token, ends in (("", True), (f"Authorization: Bearer {coordinator.token}\r\n", False)):
        reader, writer = await connect(coordinator)
        request = f"GET /nothing HTTP/1.1\r\nHost: localhost\r\n{token}\r\n".encode()
        writer.write(request)
        assert (b"connection: close" in await reader.readuntil(b"\r\n\r\n")) is ends
        writer.write(request)
        answers = await ended(reader) if ends else await reader.readuntil(b"\r\n\r\n")
        assert (b"HTTP/1.1 404" in answers) is not ends
        writer.close()


async def test_a_session_without_a_hello_is_closed(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a close, and no Refused: a member may have been asleep together with us, and
    comes back."""
    monkeypatch.setattr(server, "HELLO_TIMEOUT_S", 0.2)
    client = Client(coordinator)
    await client.open()
    with pytest.raises(ConnectionClosed) as caught:
        await client.next()
    assert caught.value.rcvd is not None
    assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1008, "no first message (Hello) within 0 s")
    await counted(coordinator, "timeout")


async def test_strangers_lock_nobody_out(
    coordinator: Coordinator, bystander: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert coordinator._server is not None
    assert coordinator._server._acceptor is not None
    monkeypatch.setattr(coordinator._server._acceptor._lobby, "most", 16)  # of one source, half of that
    connections = [await connect(coordinator) for _ in range(30)]
    await counted(coordinator, "too_many", 22)
    assert isinstance(await Client(coordinator, replica=1).join(), wire.Welcome)
    await is_well(bystander)  # a member is no stranger
    for reader, writer in connections[:20]:
        assert await ended(reader) == b""
        writer.close()
    for _, writer in connections[20:]:
        writer.close()


# ------------------------------------------------------------ members gone mad


async def test_a_stale_incarnation_is_refused(coordinator: Coordinator, bystander: Client) -> None:
    first = Client(coordinator)
    welcome = await first.join()
    assert isinstance(welcome, wire.Welcome)
    assert isinstance(await Client(coordinator, incarnation="two").join(), wire.Welcome)
    await first.until(wire.Refused)
    again = Client(coordinator, resume_term=welcome.term)
    answer = await again.join()
    assert isinstance(answer, wire.Refused)
    assert answer.error.kind == "Fenced"
    assert count(coordinator, "fenced") == 1
    await is_well(bystander)


BIG = 2 * 2**20


@pytest.mark.parametrize(
    ("message", "reason", "times", "text"),
    [
        (wire.Bye("x" * BIG), "oversized", 1, "message: 2,097,177 bytes exceed the limit of 1,048,576"),
        (
            wire.PublishBegin(1, None, float("nan")),
            "malformed",
            server.REFUSED_MAX,
            "PublishBegin: Expected `float` >= -1000000000.0 - at `$[2].deadline_s`",
        ),
        (wire.Loaded(-1, 0.0), "malformed", server.REFUSED_MAX, "Loaded: Expected `int` >= 0 - at `$[2].version`"),
    ],
    ids=["oversized", "not a number", "negative"],
)
async def test_what_no_member_can_mean_ends_it_for_good(
    coordinator: Coordinator, bystander: Client, message: wire.FromMember, reason: str, times: int, text: str
) -> None:
    """It would only say it again, so it is told, and is a member no more."""
    member = Client(coordinator)
    welcome = await member.join()
    for _ in range(times - 1):
        assert isinstance(welcome, wire.Welcome)
        await member.say(message)
        with pytest.raises(ConnectionClosed):
            await member.until(wire.Refused)
        member = Client(coordinator, resume_term=welcome.term, received=member.received)
        welcome = await member.join()
    await member.say(message)
    refused = await member.until(wire.Refused)
    assert refused.error.kind == "UsageError"
    assert refused.error.message.endswith(text)
    with pytest.raises(ConnectionClosed):
        await member.until(type(None))
    assert count(coordinator, reason) == times
    (channel,) = coordinator.channel_statuses()
    assert [one.name for one in channel.members] == ["rollout/8/0"]  # the bystander
    await is_well(bystander)


@pytest.mark.parametrize(
    "frame",
    [
        wire.MemberFrame(1, 5, wire.ReceiveAsk(1, 0)),
        wire.MemberFrame(1, -1, wire.ReceiveAsk(1, 0)),
        wire.MemberFrame(3, 0, wire.ReceiveAsk(1, 0)),
        wire.MemberFrame(1, 0, Client.hello_of("rollout")),
    ],
    ids=["ack of the future", "negative ack", "a gap", "a second Hello"],
)
async def test_what_is_out_of_order_ends_the_connection(
    coordinator: Coordinator, bystander: Client, frame: wire.MemberFrame
) -> None:
    member = Client(coordinator)
    welcome = await member.join()
    assert isinstance(welcome, wire.Welcome)
    await member.socket.send(wire.encode(frame))
    with pytest.raises(ConnectionClosed) as caught:
        await member.until(type(None))
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008
    assert count(coordinator, "out_of_order") == 1
    again = Client(coordinator, resume_term=welcome.term, received=member.received)
    assert isinstance(await again.join(), wire.Welcome)
    await is_well(bystander)


@pytest.mark.parametrize("pid", [2**40, -1, 0])
async def test_a_hello_of_no_process(coordinator: Coordinator, pid: int) -> None:
    answer = await Client(coordinator, process=Client.process(pid)).join()
    assert isinstance(answer, wire.Refused)
    assert answer.error.message.startswith("not a message of this protocol: Hello: Expected `int` ")
    assert answer.error.message.endswith(
        "= 2147483647 - at `$[2].process.pid`" if pid > 0 else "= 1 - at `$[2].process.pid`"
    )
    assert count(coordinator, "malformed") == 1


# ------------------------------------------------ raw sessions, faster than any library


def framed(data: bytes, *, opcode: int = 2, fin: bool = True) -> bytes:
    """A WebSocket frame with a mask of zeros."""
    if len(data) < 126:
        size = bytes([0x80 | len(data)])
    elif len(data) < 65536:
        size = bytes([0x80 | 126]) + struct.pack("!H", len(data))
    else:
        size = bytes([0x80 | 127]) + struct.pack("!Q", len(data))
    return bytes([(fin << 7) | opcode]) + size + b"\0\0\0\0" + data


def raw_session(coordinator: Coordinator, hello: wire.Hello | None = None) -> socket.socket:
    """A joined member as a plain blocking socket that never reads what it is sent."""
    host, port = coordinator.endpoint.split(":")
    found = socket.create_connection((host, int(port)), timeout=5)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [
        "GET /session HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
        f"Authorization: Bearer {coordinator.token}",
    ]
    found.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    assert found.recv(4096).startswith(b"HTTP/1.1 101")
    found.sendall(framed(wire.encode(wire.MemberFrame(0, 0, hello or Client.hello_of("rollout")))))
    return found


def numbered(make: Callable[[int], wire.FromMember]) -> Callable[[int], bytes]:
    return lambda number: framed(wire.encode(wire.MemberFrame(number, 0, make(number))))


HEARTBEAT = framed(wire.encode(wire.MemberFrame(0, 0, wire.Heartbeat())))
FLOODS: dict[str, Callable[[int], bytes]] = {
    "heartbeats": lambda _: HEARTBEAT,
    "pings": lambda _: framed(b"ping", opcode=9),
    "progress": numbered(wire.Progress),
    "asks": numbered(lambda number: wire.ReceiveAsk(number, 0)),
    "manifests": numbered(lambda number: wire.ManifestPiece(str(number), 0, 1 << 30, b"x" * (3 * 2**18))),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_holds_up_nobody(
    coordinator: Coordinator, bystander: Client, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """As fast as the socket takes it, without ever reading: the others' heartbeats are
    answered all the while."""
    hostile = await asyncio.to_thread(raw_session, coordinator)
    over = False

    def flood() -> None:
        number = 0
        while not over:
            block = b""
            for _ in range(1 if kind == "manifests" else 500):
                number += 1
                block += FLOODS[kind](number)
            with contextlib.suppress(TimeoutError):
                hostile.sendall(block)

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    try:
        await asyncio.sleep(0.3)
        waits = [await is_well(bystander) for _ in range(100)]
    finally:
        over = True
        hostile.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            await flooding
        hostile.close()
    record_property("median_s", sorted(waits)[50])
    record_property("worst_s", max(waits))
    assert sorted(waits)[50] < 0.25


async def test_a_member_that_never_reads_is_cut_off(
    coordinator: Coordinator, bystander: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends although it does not read the close either."""
    monkeypatch.setattr(sessions, "OUTBOX_NBYTES", 2**20)
    hostile = await asyncio.to_thread(raw_session, coordinator)
    trainer = Client(coordinator, group="trainer", incarnation="t")
    await trainer.join()
    member = next(one for one in coordinator.engine._sessions if one.name == "rollout/0/0")
    session = coordinator.engine._sessions[member]
    (channel,) = coordinator.engine.channels.values()
    offer = wire.TransferOffer(1, 1, "receive", "image", "hash", {"note": "x" * 2**19}, 1.0)
    ticks = 0
    while not count(coordinator, "overflow") and ticks < 100:
        ticks += 1
        channel.out.append(Send(member, offer))
        await trainer.say(wire.Progress(ticks))
        await is_well(trainer)
    assert count(coordinator, "overflow") == 1
    assert ticks < 20
    assert session.over.is_set()
    await wait_until(lambda: session.connection is None, "the end of its connection", timeout_s=10)
    await wait_until(lambda: is_cut(hostile), "a socket that was cut", timeout_s=10)
    await is_well(bystander)
    hostile.close()


def is_cut(found: socket.socket) -> bool:
    """Whether the other side has ended it: a write fails. Nothing is read."""
    try:
        found.send(HEARTBEAT)
    except OSError:
        return True
    return False


async def test_a_thousand_fragments_are_no_message(coordinator: Coordinator, bystander: Client) -> None:
    hostile = await asyncio.to_thread(raw_session, coordinator)
    block = framed(b"x", fin=False) + framed(b"", opcode=0, fin=False) * (websocket.FRAGMENTS + 1)
    await asyncio.to_thread(hostile.sendall, block)
    await counted(coordinator, "malformed")
    await wait_until(lambda: is_cut(hostile), "a socket that was cut")
    hostile.close()
    await is_well(bystander)


async def test_text_that_is_no_text_is_no_message(coordinator: Coordinator, bystander: Client) -> None:
    hostile = await asyncio.to_thread(raw_session, coordinator)
    await asyncio.to_thread(hostile.sendall, framed(b"\xff\xfe\xfd", opcode=1))
    await counted(coordinator, "malformed")
    hostile.close()
    await is_well(bystander)


# ------------------------------------------------------------ the store


async def test_garbage_and_idle_connections_do_not_kill_the_store(coordinator: Coordinator) -> None:
    """Garbage of every size, connections that say nothing, ones that stop in the
    middle: rendezvous goes on."""
    from torch._C._distributed_c10d import TCPStore

    host, port = coordinator.store_address
    pid = coordinator.store_pid
    assert pid is not None

    def attack() -> list[socket.socket]:
        held = []
        for index in range(300):
            found = socket.create_connection((host, port), timeout=5)
            with contextlib.suppress(OSError):
                if index % 3 == 1:
                    found.sendall(os.urandom(1 + index * 7))
                elif index % 3 == 2:
                    found.sendall(struct.pack("<B", index % 16) + struct.pack("<Q", 2 ** (index % 64)))
            held.append(found)
        return held

    def use() -> bytes:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        store.set("key", "value")
        return bytes(store.get("key"))

    held = await asyncio.to_thread(attack)
    try:
        assert await asyncio.to_thread(use) == b"value"
        assert (await coordinator._store.ask()).keys >= 1
        assert alive(pid)
        assert coordinator.store_address == (host, port)
    finally:
        for found in held:
            found.close()

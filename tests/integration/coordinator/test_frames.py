"""Spoilt frames at each listener of a run: refused, with no traceback and no harm to
anybody else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from replicas import messages as wire
from replicas.cli.client import Client as ControlClient
from replicas.control.app import control_routes
from replicas.control.commands import Scale
from replicas.control.socket import ControlSocket
from replicas.coordinator import Coordinator
from replicas.coordinator.store import StoreWatcher
from replicas.coordinator.store_process import Reply, Request
from replicas.linux import frames
from replicas.sidecar import meeting
from replicas.sidecar import wire as sidecar_wire
from replicas.sidecar.wire import GroupSpec
from replicas.supervisor.wire import orders
from tests.integration.coordinator.test_security import framed, is_well, raw_session
from tests.support.channel.frames import mutants
from tests.support.channel.members import Client
from tests.support.runs import alive
from tests.support.shims import shim
from tests.support.sidecars import start_forkserver
from tests.unit.control.test_control_orders import Run

pytestmark = pytest.mark.anyio

CHANNELS = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}


@pytest.fixture(autouse=True)
def no_errors_are_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def say(address: tuple[str, int] | str, data: bytes) -> bytes:
    """Send this over a connection of its own and hang up; what came back by then."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as one:
        one.settimeout(0.2)
        with contextlib.suppress(OSError):
            one.connect(address)
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            return one.recv(65536)
    return b""


# ----------------------------------------------- the control port, and the run's socket


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator(CHANNELS, groups={"rollout": 9}, routes=control_routes(Run())[:-1]) as running:
        yield running


@pytest.fixture
async def bystander(coordinator: Coordinator) -> AsyncIterator[Client]:
    client = Client(coordinator, replica=8, incarnation="bystander")
    assert isinstance(await client.join(), wire.Welcome)
    yield client
    await client.socket.close()


def requests(token: str) -> list[bytes]:
    head = f"HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n"
    return [
        f"GET /session {head}{upgrade}Sec-WebSocket-Version: 13\r\n\r\n".encode(),
        f"GET /status {head}Accept: */*\r\n\r\n".encode(),
        b"GET /readyz?verbose=1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"POST /scale {head}Content-Length: 28\r\n\r\n".encode() + b'{"group":"a","replicas":100}',
        f"POST /drain {head}Transfer-Encoding: chunked\r\n\r\n4\r\nnope\r\n0\r\n\r\n".encode(),
    ]


async def test_requests(coordinator: Coordinator, bystander: Client) -> None:
    host, port = coordinator.endpoint.split(":")
    for data in mutants(requests(coordinator.token), seed=1):
        await asyncio.to_thread(say, (host, int(port)), data)
        assert await is_well(bystander) < 1.0
    assert (await asyncio.to_thread(ControlClient(coordinator.endpoint).status)).run == "grpo"


def messages() -> list[bytes]:
    bodies: list[wire.FromMember] = [
        wire.Heartbeat(),
        wire.Progress(3),
        wire.ReceiveAsk(1, 0),
        wire.PublishBegin(1, None, 5.0, meta={"step": 1}),
        wire.Packed(1, "hash", 12, "cpu", 0.1, 0.2),
        wire.OperationPost(1, "all_reduce", (wire.Segment("float32", (3,)),), 5.0),
        wire.ManifestPiece("hash", 0, 20, b"nonsense"),
        wire.Bye("over"),
    ]
    return [wire.encode(wire.MemberFrame(number, 0, body)) for number, body in enumerate(bodies)]


@pytest.mark.parametrize("spoilt", ["message", "frame"])
async def test_messages_of_a_session(coordinator: Coordinator, bystander: Client, spoilt: str) -> None:
    """Of one who has the token: the message in a WebSocket frame, or the frame
    itself."""
    real = messages() if spoilt == "message" else [framed(data) for data in messages()]
    for data in mutants(real, seed=2):
        hostile = await asyncio.to_thread(raw_session, coordinator)
        with hostile, contextlib.suppress(OSError):
            await asyncio.to_thread(hostile.sendall, framed(data) if spoilt == "message" else data)
        assert await is_well(bystander) < 1.0


async def test_hellos(coordinator: Coordinator, bystander: Client) -> None:
    real = wire.encode(wire.MemberFrame(0, 0, Client.hello_of("rollout")))
    for data in mutants([real], seed=3):
        client = Client(coordinator)
        await client.open()
        await client.socket.send(data)
        await client.socket.close()
        assert await is_well(bystander) < 1.0
    good = Client(coordinator, replica=1, incarnation="good")
    assert isinstance(await good.join(), wire.Welcome)
    await good.socket.close()


async def test_requests_at_the_runs_socket(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "control.sock"
    async with ControlSocket(path, control_routes(run), run.refused.append):
        for data in mutants(requests("none"), seed=4):
            await asyncio.to_thread(say, str(path), data)
        await asyncio.to_thread(ControlClient(f"unix:{path}").order, Scale(group="last", replicas=3))
    assert run.asked[-1] == ("scale", "last", 3)


# ------------------------------------------------------------ the store


def recorded(port: int, talk: Callable[[int], object]) -> list[bytes]:
    """What a client of the TCPStore at ``port`` sends while ``talk(port)`` goes on."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as door:

        def forward() -> None:
            client, _ = door.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=pipe, args=(server, client, None), daemon=True)
                back.start()
                pipe(client, server, said)
                back.join(10)

        def pipe(source: socket.socket, target: socket.socket, into: list[bytes] | None) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    if into is not None:
                        into.append(data)
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=forward, daemon=True)
        thread.start()
        talk(door.getsockname()[1])
        thread.join(10)
    return said


def use_store(port: int) -> bytes:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    store.set("key", "value")
    store.add("counter", 1)
    store.check(["key"])
    store.multi_get(["key", "counter"])
    store.delete_key("counter")
    return bytes(store.get("key"))


async def test_the_tcp_store() -> None:
    """It is torch's: a frame may end it; then there is another one."""
    up = asyncio.Event()
    keeper = StoreWatcher("127.0.0.1", 0, lambda is_up: up.set() if is_up else None)
    await keeper.start()
    try:
        real = await asyncio.to_thread(recorded, keeper.address[1], use_store)
        assert len(real) > 5
        for data in mutants([*real, b"".join(real)], seed=5):
            await asyncio.to_thread(say, keeper.address, data)
        async with asyncio.timeout(60):
            await up.wait()
            while not await served(keeper):
                up.clear()
                await up.wait()
    finally:
        await keeper.aclose()


async def served(keeper: StoreWatcher) -> bool:
    if not keeper.up:
        return False
    try:
        await keeper.ask("stat")
        return await asyncio.to_thread(use_store, keeper.address[1]) == b"value"
    except (OSError, RuntimeError):  # it has just been replaced
        return False


def test_orders_to_the_store_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "replicas.coordinator.store_process", "--bind", "127.0.0.1", "--port", "0"]
        command += ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
            theirs.close()
            try:
                with ours.makefile("rb") as lines:
                    assert msgspec.json.decode(lines.readline(), type=Reply).port
                    real = [msgspec.json.encode(Request(1, op, ("a", "b"))) for op in ("stat", "sweep", "ping")]
                    for data in mutants(real, seed=6):
                        ours.sendall(data.replace(b"\n", b" ") + b"\n")
                        assert lines.readline(), process.communicate()
                    ours.sendall(msgspec.json.encode(Request(99, "stat")) + b"\n")
                    assert msgspec.json.decode(lines.readline(), type=Reply).id == 99
                ours.shutdown(socket.SHUT_RDWR)
                assert process.wait(10) == 0
            finally:
                process.kill()


# ------------------------------------------------------------ sidecars


def test_the_forkserver() -> None:
    """Also with descriptors of every kind, in place of the pidfd and the socket that it
    expects."""
    name = f"replicas-test-{secrets.token_hex(8)}"
    process = start_forkserver(name)
    try:
        one, other = socket.socketpair()
        with one, other, Path(os.devnull).open("rb") as null, Path(__file__).open("rb") as file:
            pidfd = os.pidfd_open(os.getpid())
            kinds = [pidfd, null.fileno(), file.fileno(), one.fileno(), *os.pipe()]
            real = [frames.encode(sidecar_wire.Attach()), frames.encode(sidecar_wire.Fork(7))]
            for number, data in enumerate(mutants(real, seed=7)):
                with attached(name) as client, contextlib.suppress(OSError):
                    sent = real[number % 2] if number % 3 else data
                    fds = [kinds[(number + extra) % len(kinds)] for extra in range(number % 4)]
                    socket.send_fds(client, [sent[:4000] or b"\0"], fds)
                    socket.send_fds(client, [data[:200_000] or b"\0"], fds[:1])
            with attached(name) as client:
                socket.send_fds(client, [real[0]], [pidfd])
                client.settimeout(30)
                assert frames.read_packet(client)[0]
            for fd in (pidfd, *kinds[-2:]):
                os.close(fd)
    finally:
        process.kill()
        _, said = process.communicate()
        assert "Traceback" not in said, said


@contextlib.contextmanager
def attached(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(30)
        for _ in range(600):
            try:
                client.connect("\0" + name)
                break
            except (ConnectionRefusedError, BlockingIOError):  # it is just being started
                threading.Event().wait(0.05)
        yield client


def test_requests_to_a_sidecar() -> None:
    """One that gets nonsense ends, and nobody else does; it says why in a line."""
    name = f"replicas-test-{secrets.token_hex(8)}"
    process = start_forkserver(name)
    pidfd = os.pidfd_open(os.getpid())
    spec = GroupSpec("p", "127.0.0.1", 1, 0, 1, "gloo", "127.0.0.1", 0.1)
    real = [
        frames.encode(message)
        for message in (sidecar_wire.Ping(1), sidecar_wire.MapBuffer(1), sidecar_wire.ForgetBuffer(1))
    ]
    real += [frames.encode(sidecar_wire.BuildGroup(1, spec)), frames.encode(sidecar_wire.ProbeBuffer(1, 1))]
    whole = [frames.frame_head(body, ()) + body for body in real]
    try:
        with attached(name) as client:
            socket.send_fds(client, [frames.encode(sidecar_wire.Attach())], [pidfd])
            assert frames.read_packet(client)[0]
            with forked(client, 1) as (bystander, _):
                for number, data in enumerate(mutants(whole, seed=8)):
                    with forked(client, 2 + number) as (channel, sidecar), contextlib.suppress(OSError):
                        socket.send_fds(channel, [data[:1000] or b"\0"], [pidfd] * (number % 3))
                        channel.settimeout(10)
                        channel.sendall(data[1000:])
                        channel.shutdown(socket.SHUT_WR)
                        while channel.recv(65536):
                            pass
                        assert sidecar >= 0
                bystander.sendall(whole[0])
                assert bystander.recv(100)
        assert process.poll() is None
    finally:
        os.close(pidfd)
        process.kill()
        _, said = process.communicate()
    assert "Traceback" not in said


@contextlib.contextmanager
def forked(client: socket.socket, number: int) -> Iterator[tuple[socket.socket, int]]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(client, [frames.encode(sidecar_wire.Fork(number))], [theirs.fileno()])
        data, fds = frames.read_packet(client)
        assert isinstance(sidecar_wire.decode_forkserver_reply(data), sidecar_wire.Forked)
        try:
            ours.settimeout(30)
            yield ours, fds[0]
        finally:
            frames.close_all(fds)


def test_the_greeter_of_a_meeting() -> None:
    spec = GroupSpec("p", "127.0.0.1", 1, 0, 3, "gloo", "127.0.0.1", 5.0)
    with meeting._listening(spec, listen=True) as (port, error):
        assert not error
        token = meeting._greeting(spec, spec.rank, port)
        for data in mutants([token, b"GET / HTTP/1.1\r\n\r\n"], seed=9):
            say(("127.0.0.1", port), data)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as guest:
            heard = b""
            while len(heard) < len(token):
                heard += guest.recv(len(token))
        assert heard == token


# ------------------------------------------------------------ the shim


def test_orders_to_a_shim(tmp_path: Path) -> None:
    """From its own supervisor alone. What is no order changes nothing, and is told in
    its log."""
    real = [orders.encode({"type": kind}) for kind in ("ping", "stacks", "drain")]
    real += [orders.encode({"type": "stop", "timeout_s": 1.0}), orders.encode({"type": "rendezvous", "port": 1})]
    with shim(tmp_path, "import time; time.sleep(1000)") as one:
        pid = one.started()
        for data in mutants(real, seed=10):
            if not is_order(data):
                one._control.settimeout(10)
                one._control.send(data[: orders.MAX_NBYTES // 4] or b"x")
        one.send({"type": "ping"})
        one.wait_for("pong")
        assert alive(pid)
        one.send({"type": "stop", "timeout_s": 5.0})
        one.gone()
    said = (tmp_path / "logs" / "shim-0.log").read_text()
    assert "Traceback" not in said
    assert "malformed order" in said


def is_order(data: bytes) -> bool:
    """Whether it would be carried out as one that ends the replica."""
    try:
        message = orders.decode(data)
    except ValueError:
        return False
    return message["type"] in ("stop", "start", "stacks")

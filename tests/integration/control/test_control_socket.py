"""The run's Unix socket: who is let in, where it lies, what is left of it.

Covers: control/socket.py, supervisor/agent/orphans.py.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from replicas import errors
from replicas.control import socket as control_socket
from replicas.control.access import ByToken
from replicas.control.app import control_routes
from replicas.control.client import Client
from replicas.control.commands import Answer, Restart, Scale
from replicas.control.socket import ControlSocket
from replicas.coordinator.addresses import AllowedHosts
from replicas.coordinator.port_connections import PortRules
from replicas.coordinator.server import Server, bind_listener
from replicas.linux.sockets import peer_uid
from replicas.supervisor.agent import orphans
from replicas.trust.tokens import Tokens
from tests.unit.control.test_control_orders import TOKENS, Run

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(path: Path, run: Run) -> AsyncIterator[ControlSocket]:
    async with ControlSocket(path, control_routes(run), run.refused.append) as door:
        yield door


async def test_orders_need_no_token_there(tmp_path: Path) -> None:
    run = Run()
    path = tmp_path / "control.sock"
    async with serving(path, run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        client = Client(f"unix:{path}")
        assert (await asyncio.to_thread(client.status)).run == "grpo"
        answer = await asyncio.to_thread(client.order, Scale(group="a", replicas=3))
        assert answer == Answer(done=True)
        assert run.asked == [("scale", "a", 3)]
        run.error = errors.WorldError("replica a/0 failed", hint="look at its log")
        with pytest.raises(errors.WorldError, match=r"replica a/0 failed \(look at its log\)"):
            await asyncio.to_thread(client.order, Restart(target="a"))
    assert not path.exists()
    with pytest.raises(errors.Disconnected, match="cannot connect to the run at unix:"):
        await asyncio.to_thread(client.status)


async def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / ("deep" * 20) / ("down" * 20) / "control.sock"
    path.parent.mkdir(parents=True)
    async with serving(path, Run()):
        assert path.is_socket()
        assert (await asyncio.to_thread(Client(f"unix:{path}").status)).run == "grpo"
    assert not path.exists()


async def test_what_a_killed_supervisor_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with serving(path, Run()):
        assert (await asyncio.to_thread(Client(f"unix:{path}").status)).run == "grpo"
        path.unlink()
        path.touch()
    assert path.read_bytes() == b""  # it is not ours
    with pytest.raises(
        errors.WorldError, match=r"another kind of file is in its place \(name another path with control\.socket"
    ):
        async with serving(path, Run()):
            pass
    assert path.exists()
    with pytest.raises(errors.WorldError, match="No such file or directory"):
        async with serving(tmp_path / "gone" / "control.sock", Run()):
            pass


async def test_the_socket_of_a_living_run_is_not_taken(tmp_path: Path) -> None:
    """Two configs name the same one. Neither another supervisor nor the agent of a
    dead one removes it."""
    path = tmp_path / "control.sock"
    async with serving(path, Run()):
        with pytest.raises(errors.WorldError, match=r"another process listens"):
            async with serving(path, Run()):
                pass
        await asyncio.to_thread(orphans.remove_socket, path)
        assert (await asyncio.to_thread(Client(f"unix:{path}").status)).run == "grpo"
        with pytest.raises(errors.Disconnected, match='run "dead" has ended: run "grpo" is at its address now'):
            await asyncio.to_thread(Client(f"unix:{path}", run="dead").order, Scale(group="a", replicas=0))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    orphans.remove_socket(path)
    assert not path.exists()


async def test_who_has_shown_the_token_is_no_stranger(tmp_path: Path) -> None:
    """Those who come later cannot cut off whoever follows the logs, or an order that
    takes long."""
    run = Run(tmp_path / "logs")
    (run.logs / "a" / "0" / "gen-1").mkdir(parents=True)
    (run.logs / "a" / "0" / "gen-1" / "rank-0.log").write_text("one\n")
    listener = bind_listener("127.0.0.1", 0)
    address = listener.getsockname()
    access = ByToken(lambda: TOKENS, run.refused.append)
    hosts = AllowedHosts("127.0.0.1", "127.0.0.1")
    rules = PortRules(run.refused.append, lambda given: TOKENS.role(given) is not None, hosts, run.live)
    rules.strangers.most = 4  # of one source, half of that
    asked: asyncio.Queue[None] = asyncio.Queue()

    async def hang(_: Request) -> Response:
        asked.put_nowait(None)
        await asyncio.Event().wait()
        raise AssertionError

    routes = [Route("/hang", hang), *control_routes(run, access=access)]
    server = Server(listener, routes, rules)
    server.start()
    try:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /logs?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n")
        async with asyncio.timeout(20):
            await reader.readuntil(b"one\n")
            strangers = []
            for _ in range(3):
                strangers.append(await asyncio.open_connection(*address))
                strangers[-1][1].write(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await asked.get()
            assert await strangers[0][0].read() == b""  # the oldest of them had to go
            with (run.logs / "a" / "0" / "gen-1" / "rank-0.log").open("a") as file:
                file.write("two\n")
            await reader.readuntil(b"two\n")
        for _, one in [*strangers, (reader, writer)]:
            one.close()
        assert run.refused == ["too_many"]
    finally:
        await server.aclose()


async def test_a_connection_ends_with_its_token(tmp_path: Path) -> None:
    run, tokens = Run(tmp_path / "logs"), Tokens("member", "secret")
    tokens.rotate("operator", "newer")
    (run.logs / "a" / "0" / "gen-1").mkdir(parents=True)
    (run.logs / "a" / "0" / "gen-1" / "rank-0.log").write_text("one\n")
    listener = bind_listener("127.0.0.1", 0)
    address = listener.getsockname()
    access = ByToken(lambda: tokens, run.refused.append)
    rules = PortRules(run.refused.append, lambda _: True, AllowedHosts("127.0.0.1", "127.0.0.1"))
    server = Server(listener, control_routes(run, access=access), rules)
    server.start()
    try:
        reader, writer = await asyncio.open_connection(*address)
        request = b"GET /logs%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
        writer.write(request % b"?follow=1")
        async with asyncio.timeout(20):
            await reader.readuntil(b"one\n")
            tokens.revoke_old("operator")
            assert await reader.read() == b"\r\n"  # and not the last chunk of a whole response
            writer.close()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request % b"")
            assert (await reader.read()).startswith(b"HTTP/1.1 401")  # and the connection ends
            writer.close()
    finally:
        await server.aclose()


async def test_processes_of_other_users_are_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the file's mode lets them in."""
    run = Run()
    path = tmp_path / "control.sock"
    uids: list[int] = []

    def foreign(connection: socket.socket) -> int:
        uids.append(peer_uid(connection))
        return uids[-1] + 12345

    async with serving(path, run):
        monkeypatch.setattr(control_socket, "peer_uid", foreign)
        with pytest.raises(errors.UsageError, match="its own user"):
            await asyncio.to_thread(Client(f"unix:{path}").order, Scale(group="a", replicas=0))
        with pytest.raises(errors.Disconnected, match="answered GET /status with HTTP status 403"):
            await asyncio.to_thread(Client(f"unix:{path}").status)
        monkeypatch.undo()
        assert (await asyncio.to_thread(Client(f"unix:{path}").status)).run == "grpo"
    assert uids == [path.parent.stat().st_uid] * 2
    assert run.asked == []
    assert run.refused == ["peer", "peer"]


async def test_who_still_sends_when_turned_away_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a connection with a reset where something is left unread."""
    monkeypatch.setattr(control_socket, "peer_uid", lambda connection: peer_uid(connection) + 12345)
    path = tmp_path / "control.sock"
    routes = control_routes(Run())
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20.0)
        async with ControlSocket(path, routes, lambda reason: client.sendall(b"the order")):
            client.connect(str(path))
            client.sendall(b"POST /scale HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
            with http.client.HTTPResponse(client, method="POST") as response:
                await asyncio.to_thread(response.begin)
                assert b"this socket is for its own user" in await asyncio.to_thread(response.read, 1000)

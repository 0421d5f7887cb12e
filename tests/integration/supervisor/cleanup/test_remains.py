"""A restart waits for what the old generation had, and says who holds it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import replicas
from replicas.telemetry.events import HeldUp

LENDS = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 0))
with socket.socket(socket.AF_UNIX) as door:
    door.connect(os.environ["DOOR"])
    socket.send_fds(door, [b"x"], [server.fileno()])
time.sleep(600)
"""
"""Gives its listening socket to somebody else, too."""


async def lent(door: socket.socket) -> socket.socket:
    """The socket of a generation that has come to life."""
    async with asyncio.timeout(30):
        caller, _ = await asyncio.get_running_loop().sock_accept(door)
    with caller:
        caller.setblocking(True)
        _, (descriptor,), _, _ = socket.recv_fds(caller, 1, 1)
    return socket.socket(fileno=descriptor)


def test_a_port_that_somebody_else_has_got_is_waited_for_and_its_holder_named(tmp_path: Path) -> None:
    config = {
        "schema_version": 1,
        "run": {"name": "remains", "state_dir": str(tmp_path / "state")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {
            "a": {
                "launcher": "exec",
                "command": [sys.executable, "-c", LENDS],
                "env": {"DOOR": str(tmp_path / "door")},
            }
        },
    }

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(tmp_path / "door"))
            door.listen()
            door.setblocking(False)
            async with replicas.Supervisor(config) as supervisor:
                first = await lent(door)
                port = first.getsockname()[1]
                told = asyncio.create_task(held(supervisor))
                await supervisor.restart("a/0")
                async with asyncio.timeout(20):
                    event = await told
                assert event.what == f"port 127.0.0.1:{port}"
                assert event.holder.startswith(f"process {os.getpid()} (")
                assert (event.generation, event.gave_up) == (2, False)
                reason = supervisor.status().groups[0].replicas[0].reason
                assert reason.startswith(f"waits for port 127.0.0.1:{port}, held by process {os.getpid()}")
                first.close()
                (await lent(door)).close()

    async def held(supervisor: replicas.Supervisor) -> HeldUp:
        async for record in supervisor.events():
            if isinstance(record.event, HeldUp):
                return record.event
        raise AssertionError("the events came to an end")

    asyncio.run(main())

"""A coordinator and a member of :mod:`bench.bench_tls`, each in a process of its own
(``python -m bench.rank tls_rank``)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from bench.rank import Driver, Handler
from replicas import messages as wire
from replicas.channel.session.connection import FrameConnection, dial
from replicas.coordinator import Coordinator
from replicas.messages.identity import ProcessIdentity

__all__ = ["handlers"]

T = TypeVar("T")
CHANNELS = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
ELSEWHERE = ProcessIdentity(1, 1, "another machine", 1)
"""A process that cannot be watched from here."""


def handlers(driver: Driver) -> dict[str, Handler]:
    """Commands for :mod:`bench.rank`."""
    del driver
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the threads that follow, too
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    member: list[FrameConnection] = []

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def serve(tls: str) -> dict[str, Any]:
        coordinator = Coordinator(CHANNELS, tls="on" if tls == "on" else "off")
        await coordinator.__aenter__()
        return {"endpoint": coordinator.endpoint, "token": coordinator.token}

    async def join(endpoint: str, token: str) -> dict[str, Any]:
        member.append(await dial(endpoint, token, lambda: None, None))
        hello = wire.Hello(wire.PROTOCOL, "embedded", "policy", "rollout", 0, 0, 1, "one", 1, ELSEWHERE)
        await member[0].send(wire.encode(wire.MemberFrame(0, 0, hello)))
        await _until(member[0], "Welcome")
        return {}

    async def talk(times: int) -> dict[str, Any]:
        """So many heartbeats, each answered before the next."""
        (connection,) = member
        beat = wire.encode(wire.MemberFrame(0, 0, wire.Heartbeat()))
        began = time.process_time()
        for _ in range(times):
            await connection.send(beat)
            await _until(connection, "Ack")
        return {"cpu_s": (time.process_time() - began) / times}

    async def shake_hands(endpoint: str, token: str, times: int) -> dict[str, Any]:
        began = time.process_time()
        for _ in range(times):
            await (await dial(endpoint, token, lambda: None, None)).close()
        return {"cpu_s": (time.process_time() - began) / times}

    return {
        "serve": lambda tls: run(serve(tls)),
        "join": lambda endpoint, token: run(join(endpoint, token)),
        "talk": lambda times: run(talk(times)),
        "shake_hands": lambda endpoint, token, times: run(shake_hands(endpoint, token, times)),
        "used": lambda: {"cpu_s": time.process_time()},
    }


async def _until(connection: FrameConnection, kind: str) -> None:
    while True:
        data = await connection.recv()
        assert isinstance(data, bytes)
        if type(wire.decode_server_frame(data).body).__name__ == kind:
            return

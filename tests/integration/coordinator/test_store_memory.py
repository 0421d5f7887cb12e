"""A stranger who fills the store: it is replaced, and never takes the machine's
memory.

Covers: coordinator/store.py, coordinator/store_process.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import TCPStore

from replicas.coordinator.store import StoreWatcher
from replicas.coordinator.store_process import MEMORY_MAX_NBYTES, MEMORY_NBYTES, Reply, Request

pytestmark = pytest.mark.anyio

FILL = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=10))
for number in range(int(sys.argv[3])):
    store.set(f"{number}", "x" * 8_000_000)
"""


def fill(port: int, nbytes: int) -> bool:
    """Set values of so many bytes together, as a process of its own does; whether the
    store took them."""
    command = [sys.executable, "-c", FILL, "127.0.0.1", str(port), str(nbytes // 8_000_000 + 1)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, timeout=90, check=False).returncode == 0


def data_nbytes(pid: int) -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found is not None else 0


async def test_a_store_that_somebody_fills_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    replaced = asyncio.Event()
    ups = 0

    def changed(up: bool) -> None:
        nonlocal ups
        ups += up
        if ups == 2:
            replaced.set()

    keeper = StoreWatcher("127.0.0.1", 0, changed)
    await keeper.start(wait=True)
    try:
        before = keeper.pid
        await asyncio.to_thread(fill, keeper.address[1], MEMORY_NBYTES + 2**26)
        async with asyncio.timeout(60):
            await replaced.wait()
        assert keeper.pid != before
        assert (await keeper.ask()).keys <= 1
        assert "its values have grown to" in caplog.text
    finally:
        await keeper.aclose()


async def test_a_store_that_dies_before_it_serves_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    up = asyncio.Event()
    keeper = StoreWatcher("127.0.0.1", 0, lambda now: up.set() if now else None)
    await keeper.start(wait=False)
    try:
        first = keeper.pid
        assert first is not None
        assert not keeper.up
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(60):
            await up.wait()
        assert keeper.pid != first
        assert (await keeper.ask()).port == keeper.address[1]
        assert "which has not come up" in caplog.text
    finally:
        await keeper.aclose()


async def test_a_sweep_that_was_not_answered_is_made_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = StoreWatcher("127.0.0.1", 0, lambda _: None)
    await keeper.start(wait=True)
    ask, asked, swept = keeper.ask, asyncio.Event(), asyncio.Event()

    async def late(prefixes: tuple[str, ...] = ()) -> Reply:
        if prefixes and not asked.is_set():
            asked.set()
            raise TimeoutError
        reply = await ask(prefixes)
        if prefixes:
            swept.set()
        return reply

    monkeypatch.setattr(keeper, "ask", late)
    try:
        store = TCPStore(*keeper.address, is_master=False, timeout=timedelta(seconds=10))
        for name in ("first/a", "second/b", "third/c"):
            store.set(name, "1")
        keeper.sweep("first")
        async with asyncio.timeout(10):
            await asked.wait()
            keeper.sweep("second")
            await swept.wait()
        assert [store.check([name]) for name in ("first/a", "second/b", "third/c")] == [False, False, True]
    finally:
        await keeper.aclose()


def test_the_kernel_bounds_what_a_store_may_take() -> None:
    """Also while nobody asks it how it is; and then it tells."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "replicas.coordinator.store_process", "--bind", "127.0.0.1", "--port", "0"]
        command += ["--control", str(theirs.fileno()), "--parent", str(os.getpid())]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
            try:
                ours.settimeout(60)
                lines = ours.makefile("rb")
                port = msgspec.json.decode(lines.readline(), type=Reply).port
                assert msgspec.json.decode(lines.readline(), type=Reply).port == port  # it serves
                empty = data_nbytes(process.pid)
                assert not fill(port, MEMORY_MAX_NBYTES + 2**26)
                assert MEMORY_NBYTES < data_nbytes(process.pid) - empty <= MEMORY_MAX_NBYTES
                ours.sendall(msgspec.json.encode(Request(1)) + b"\n")
                assert "its values have grown to" in msgspec.json.decode(lines.readline(), type=Reply).error
                process.kill()
                assert b"Traceback" not in process.communicate(timeout=30)[1]
            finally:
                process.kill()


def set_many(client: TCPStore) -> None:
    for number in range(5000):
        client.set(f"lane/{number}", "x" * 4096)


async def test_a_store_that_is_used_is_left_alone() -> None:
    """As by many more members than a run can have."""
    keeper = StoreWatcher("127.0.0.1", 0, lambda _: None)
    await keeper.start(wait=True)
    try:
        client = TCPStore("127.0.0.1", keeper.address[1], is_master=False, timeout=timedelta(seconds=30))
        await asyncio.to_thread(set_many, client)
        await asyncio.to_thread(client.get, "lane/4999")
        reply = await keeper.ask()
        assert reply.keys >= 5000
        assert not reply.error
    finally:
        await keeper.aclose()

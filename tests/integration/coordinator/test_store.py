"""The store of a coordinator from outside: who reaches it, and what replaces it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from replicas import errors
from replicas.coordinator import Coordinator
from replicas.core.base.effects import StoreChanged
from tests.support.runs import alive

pytestmark = pytest.mark.anyio


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    async with Coordinator({"policy": {"sources": ["trainer"], "targets": ["rollout"]}}) as running:
        yield running


async def test_garbage_on_the_store_port_harms_nobody(coordinator: Coordinator) -> None:
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    host, port = coordinator.store_address
    with socket.create_connection((host, port), timeout=5) as garbage:
        garbage.sendall(os.urandom(4096))

        def use() -> bytes:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
            store.set("key", "value")
            return bytes(store.get("key"))

        assert await asyncio.to_thread(use) == b"value"


async def test_the_store_listens_on_its_address_only(coordinator: Coordinator) -> None:
    host, port = coordinator.store_address
    assert await asyncio.to_thread(listening_on, port) == [(host, port)]


def listening_on(port: int) -> list[tuple[str, int]]:
    """Addresses of every TCP socket that listens on ``port`` (IPv6 ones as they are in
    /proc)."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                short = len(address) == 8
                found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]) if short else address, port))
    return found


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_store_that_dies_or_freezes_is_replaced(
    coordinator: Coordinator, signum: int, caplog: pytest.LogCaptureFixture
) -> None:
    before, pid = coordinator.store_address, coordinator.store_pid
    assert pid is not None
    up = asyncio.Event()
    coordinator.subscribe(lambda event: up.set() if isinstance(event, StoreChanged) and event.up else None)
    os.kill(pid, signum)
    async with asyncio.timeout(30):
        await up.wait()
    assert coordinator.store_address != before
    assert not alive(pid)
    await coordinator._store.ask()
    why = "has ended" if signum == signal.SIGKILL else "does not respond"
    assert f"replacing the rendezvous store: its process (a TCPStore) {why}" in caplog.text


async def test_a_new_store_that_dies_in_the_middle_of_its_first_word_is_replaced_too(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next process says half a line and ends; the one after it is a store."""
    shim = tmp_path / "python"
    shim.write_text(
        f"""#!{sys.executable}
import os, sys
if not os.path.exists({str(tmp_path / "once")!r}):
    open({str(tmp_path / "once")!r}, "w").close()
    os.write(int(sys.argv[sys.argv.index("--control") + 1]), b'{{"id": 0, "po')
    os._exit(1)
os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
    )
    shim.chmod(0o755)
    pid = coordinator.store_pid
    assert pid is not None
    up = asyncio.Event()
    coordinator.subscribe(lambda event: up.set() if isinstance(event, StoreChanged) and event.up else None)
    monkeypatch.setattr(sys, "executable", str(shim))
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await up.wait()
    assert (tmp_path / "once").exists()
    await coordinator._store.ask()


async def test_a_store_that_is_full_of_idle_connections_is_replaced(coordinator: Coordinator) -> None:
    """It would still answer those who are connected, and nobody else."""
    (host, port), pid = coordinator.store_address, coordinator.store_pid
    assert pid is not None
    up = asyncio.Event()
    coordinator.subscribe(lambda event: up.set() if isinstance(event, StoreChanged) and event.up else None)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (128, 128))
    idle = [socket.create_connection((host, port), timeout=5) for _ in range(200)]
    try:
        async with asyncio.timeout(30):
            await up.wait()
        assert coordinator.store_address != (host, port)
        assert not (await coordinator._store.ask()).error
    finally:
        for connection in idle:
            connection.close()


async def test_a_store_that_listens_by_a_name_needs_an_address_for_it() -> None:
    channels = {"policy": {"sources": ["trainer"]}}
    with pytest.raises(errors.WorldError, match=r"nowhere\.invalid"):
        async with Coordinator(channels, store_bind="nowhere.invalid"):
            pass
    async with Coordinator(channels, store_bind="localhost") as coordinator:
        assert coordinator.store_address[0] in ("127.0.0.1", "::1")

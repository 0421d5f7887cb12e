"""Stores and forkservers on the machines of a network that is made for a test."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from replicas.sidecar.rank_side.forkserver_client import Forkserver
from tests.support.machine.networks import Machine
from tests.support.sidecars import start_forkserver

__all__ = ["remote_forkservers", "remote_store"]

_STORE = """
import socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

listener = socket.create_server((sys.argv[1], 0))
port = listener.getsockname()[1]
store = TCPStore(
    sys.argv[1], port, None, True, timedelta(seconds=10), wait_for_workers=False, master_listen_fd=listener.detach()
)
print(port, flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def _forkserver(machine: Machine) -> AsyncIterator[Forkserver]:
    """A forkserver in ``machine`` on a socket of this network, which it inherits."""
    process = start_forkserver(name := f"replicas-test-{secrets.token_hex(8)}", machine.command)
    try:
        forkserver = await Forkserver.connect(name, timeout_s=60.0)
        yield forkserver
        forkserver.close()
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


@asynccontextmanager
async def remote_store(machine: Machine) -> AsyncIterator[int]:
    """The port of a store that listens on the address of ``machine``."""
    process = await asyncio.create_subprocess_exec(
        *machine.command(sys.executable, "-c", _STORE, machine.address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            port = int(await process.stdout.readline())
        yield port
    finally:
        process.kill()
        await process.communicate()


@asynccontextmanager
async def remote_forkservers(machines: Sequence[Machine]) -> AsyncIterator[list[Forkserver]]:
    """One in each."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_forkserver(machine)) for machine in machines]

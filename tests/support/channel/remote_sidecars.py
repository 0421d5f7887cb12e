"""Stores and forkservers on the machines of a network that is made for a test."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from replicas.sidecar.rank_side.forkserver_client import Forkserver
from tests.support.machine.networks import Machine

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
    """A forkserver in ``machine``: a socket pair that it inherits reaches across
    namespaces, a named one does not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fd = theirs.fileno()
        command = machine.command(sys.executable, "-m", "replicas.sidecar.forkserver", "--fd", str(fd))
        process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)  # noqa: ASYNC220  # returns at once
    forkserver = await Forkserver(ours, process)._attached(60.0, 60.0)
    try:
        yield forkserver
    finally:
        await forkserver.aclose()


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
            yield int(await process.stdout.readline())
    finally:
        process.kill()
        await process.communicate()


@asynccontextmanager
async def remote_forkservers(machines: Sequence[Machine]) -> AsyncIterator[list[Forkserver]]:
    """One in each."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_forkserver(machine)) for machine in machines]

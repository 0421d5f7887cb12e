"""Machines of a small network that is made for a test: one network namespace each, joined by a bridge. Needs root."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from replicas.sidecar.client import Forkserver

__all__ = ["Machine", "network", "remote_forkservers", "remote_store", "why_no_networks"]

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


@dataclass(frozen=True)
class Machine:
    """``namespace``: its name; ``address``: its own on the network."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs in it."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *words]

    def cut_off(self, other: Machine) -> None:
        """Nothing that it sends reaches ``other`` any more."""
        _ip("-n", self.namespace, "route", "add", "blackhole", f"{other.address}/32")

    def join_again(self, other: Machine) -> None:
        _ip("-n", self.namespace, "route", "del", "blackhole", f"{other.address}/32")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def why_no_networks() -> str:
    """Why this machine cannot make such a network; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip") or not shutil.which("nsenter"):
        return "needs ip and nsenter"
    try:
        with network(1):
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces cannot be made: {error}"


@contextmanager
def network(size: int) -> Iterator[list[Machine]]:
    """So many machines, and one more, the last, for what they share. Everything is removed at the end."""
    mark = secrets.token_hex(3)
    switch = Machine(f"replicas-{mark}-s", "10.77.0.254")
    members = [Machine(f"replicas-{mark}-{index}", f"10.77.0.{index + 1}") for index in range(size)]
    made: list[Machine] = []
    try:
        _add(switch, made)
        _ip("-n", switch.namespace, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch.namespace, "addr", "add", f"{switch.address}/24", "dev", "bridge")
        _ip("-n", switch.namespace, "link", "set", "bridge", "up")
        for index, member in enumerate(members):
            _add(member, made)
            ours, theirs = f"v{mark}{index}a", f"v{mark}{index}b"
            _ip("-n", switch.namespace, "link", "add", ours, "type", "veth", "peer", "name", theirs)
            _ip("-n", switch.namespace, "link", "set", theirs, "netns", member.namespace)
            _ip("-n", switch.namespace, "link", "set", ours, "master", "bridge", "up")
            _ip("-n", member.namespace, "addr", "add", f"{member.address}/24", "dev", theirs)
            _ip("-n", member.namespace, "link", "set", theirs, "up")
        yield [*members, switch]
    finally:
        for machine in made:
            _ip("netns", "del", machine.namespace)


def _add(machine: Machine, made: list[Machine]) -> None:
    _ip("netns", "add", machine.namespace)
    made.append(machine)
    _ip("-n", machine.namespace, "link", "set", "lo", "up")


@asynccontextmanager
async def _forkserver(machine: Machine) -> AsyncIterator[Forkserver]:
    """A forkserver in ``machine``: a socket pair that it inherits reaches across namespaces, a named one does not."""
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

"""Ranks on the hosts of a network that is made for a test, and a coordinator that they
reach; the test's side."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from replicas.coordinator import Coordinator, GroupShape
from tests.support.channel.host_rank import TIMEOUT_S
from tests.support.machine.cable import Shape, far
from tests.support.machine.networks import Machine, Network, hosts
from tests.support.root import ROOT
from tests.support.waits import wait_until

__all__ = ["HostRank", "HostWorld", "host_world"]

PROGRAM = "tests.support.channel.host_rank"


class HostRank:
    """The test's side of one rank."""

    def __init__(self, name: str, host: Machine, process: Process) -> None:
        self.name = name
        self.host = host
        self._process = process

    @classmethod
    async def start(cls, name: str, host: Machine) -> HostRank:
        process = await asyncio.create_subprocess_exec(
            *host.command(sys.executable, "-m", PROGRAM), stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        return cls(name, host, process)

    @property
    def pid(self) -> int:
        """Of the rank, as it is seen from here."""
        return self.host.pid_of(self._process.pid)

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Its answer; :class:`AssertionError` when it failed, ended or said nothing in
        time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), TIMEOUT_S)
        assert line, f"{self.name} has ended"
        reply: dict[str, Any] = json.loads(line)
        assert "failed" not in reply, f"{self.name}: {reply['failed']}"
        return reply

    def sidecar(self) -> int:
        """Its sidecar that has a process group: a child of its forkserver, which is a
        child of the rank."""
        return self._helper("replica-sidecar", lambda pid: parent_of(parent_of(pid)))

    def carrier(self) -> int:
        return self._helper("replicas-carry", parent_of)

    def _helper(self, name: str, owner: Callable[[int], int]) -> int:
        """Never 0: a signal to that would be one to all of this test's processes."""
        found = [pid for pid in self.host.processes(name) if owner(pid) == self.pid]
        assert found, f"{self.name} has no {name}"
        return found[0]

    def kill(self) -> None:
        """SIGKILL to the rank."""
        os.kill(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Close its standard input, and wait for its end, or kill it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class HostWorld:
    """A coordinator in the test's process with a channel "policy", hosts, and ranks on
    them."""

    def __init__(self, network: Network, made: Callable[[str], Coordinator], stack: AsyncExitStack) -> None:
        self.hosts = network.machines
        self._made = made
        self.coordinator = made("")
        self._stack = stack

    async def start(self) -> None:
        await self.coordinator.__aenter__()

    async def restart(self) -> None:
        """Another coordinator in place of the one that there is, which has gone."""
        endpoint = self.coordinator.endpoint
        await self.close()
        self.coordinator = self._made(endpoint)
        await self.start()

    async def close(self) -> None:
        await self.coordinator.__aexit__(None, None, None)

    async def join(
        self, host: int, group: str, replica: int = 0, rank: int = 0, world_size: int = 1, *channels: str
    ) -> HostRank:
        """Start a rank there and let it join."""
        one = await self._started(host, f"{group}/{replica}/{rank}")
        await self._join(one, group, replica, rank, world_size, *channels)
        return one

    async def _started(self, host: int, name: str) -> HostRank:
        one = await HostRank.start(name, self.hosts[host])
        self._stack.push_async_callback(one.end)
        return one

    async def chain(self) -> tuple[HostRank, list[HostRank]]:
        """A trainer on the first host, a rollout on each other, in the order in which
        versions go down their chain."""
        names = ["trainer/0/0", *(f"rollout/{index}/0" for index in range(len(self.hosts) - 1))]
        trainer, *rollouts = await asyncio.gather(*(self._started(host, name) for host, name in enumerate(names)))
        await self._join(trainer, "trainer")
        for index, one in enumerate(rollouts):
            await self._join(one, "rollout", index)
        await self.live(len(names))
        return trainer, rollouts

    async def _join(
        self, one: HostRank, group: str, replica: int = 0, rank: int = 0, world_size: int = 1, *channels: str
    ) -> None:
        where = {"endpoint": self.coordinator.endpoint, "token": self.coordinator.token}
        for channel in channels or ("policy",):
            await one.ask(
                "join", channel=channel, group=group, replica=replica, rank=rank, world_size=world_size, **where
            )

    async def trainer_and_rollouts(self, *places: int) -> tuple[HostRank, list[HostRank]]:
        """A trainer on the first host, and a rollout on each of the hosts ``places``;
        all of them are live."""
        joins = [self.join(0, "trainer"), *(self.join(host, "rollout", index) for index, host in enumerate(places))]
        trainer, *rollouts = await asyncio.gather(*joins)
        await self.live(len(joins))
        return trainer, rollouts

    async def live(self, members: int) -> None:
        """Wait until so many members are live."""

        def counts() -> set[int]:
            channels = self.coordinator.channel_statuses()
            return {sum(member.state == "live" for member in channel.members) for channel in channels}

        await wait_until(lambda: counts() == {members}, f"{members} members are live", timeout_s=TIMEOUT_S)

    def sidecars(self) -> list[int]:
        """How many members on each host have a process group."""
        return [len(host.processes("replica-sidecar")) for host in self.hosts]


@asynccontextmanager
async def host_world(
    size: int,
    config: dict[str, Any] | None = None,
    *,
    carry_port: int = 0,
    channels: Sequence[str] = ("policy",),
    state_dir: Path | None = None,
    cables: Mapping[int, Shape] = MappingProxyType({}),
    ipv6: bool = False,
    **groups: GroupShape,
) -> AsyncIterator[HostWorld]:
    """So many hosts. ``config``: changes to a trainer and rollouts; ``groups``: their
    shapes; ``state_dir``: of a coordinator that is to be started again; ``cables``: of
    far hosts; ``ipv6``: there is nothing else."""
    settings = {"sources": ["trainer"], "targets": ["rollout"], "deadline": "40s", **(config or {})}
    with ExitStack() as links:
        network = links.enter_context(hosts(size, ipv6=ipv6))
        for host, shape in cables.items():
            links.enter_context(far(network, network.machines[host], shape))
        address = network.address
        token = "secret" if state_dir is not None else None

        def made(endpoint: str) -> Coordinator:
            port = int(endpoint.rpartition(":")[2] or 0)
            return Coordinator(
                dict.fromkeys(channels, settings),
                groups=groups,
                host=address,
                port=port,
                store_bind=address,
                token=token,
                state_dir=state_dir,
                carry_port=carry_port,
            )

        async with AsyncExitStack() as stack:
            world = HostWorld(network, made, stack)
            await world.start()
            stack.push_async_callback(lambda: world.close())
            yield world


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])

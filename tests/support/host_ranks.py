"""Ranks on the hosts of a network that is made for a test: a program of one rank, and the test's side of it.

``python -m tests.support.host_ranks`` reads a line of JSON and answers with one, until its standard input ends. It knows
the commands that the methods of :class:`_Rank` are.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from replicas.coordinator import Coordinator, GroupShape
from tests.support.channels import wait_until
from tests.support.networks import Machine, Network, hosts

__all__ = ["HostRank", "HostWorld", "host_world"]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
ELEMENTS = 1 << 20
TENSORS = 4
"""Of 4 MiB each."""


class HostRank:
    """The test's side of one rank."""

    def __init__(self, name: str, host: Machine, process: Process) -> None:
        self.name = name
        self.host = host
        self._process = process

    @classmethod
    async def start(cls, name: str, host: Machine) -> HostRank:
        process = await asyncio.create_subprocess_exec(
            *host.command(sys.executable, "-m", __name__), stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        return cls(name, host, process)

    @property
    def pid(self) -> int:
        """Of the rank, as it is seen from here."""
        return self.host.pid_of(self._process.pid)

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Its answer; :class:`AssertionError` when it failed, ended or said nothing in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), TIMEOUT_S)
        assert line, f"{self.name} has ended"
        reply: dict[str, Any] = json.loads(line)
        assert "failed" not in reply, f"{self.name}: {reply['failed']}"
        return reply

    def has_sidecar(self) -> bool:
        """Whether one of its sidecars has a process group: a child of its forkserver, which is a child of the rank."""
        return any(self.pid == parent_of(parent_of(pid)) for pid in self.host.processes("replica-sidecar"))

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
    """A coordinator in the test's process with a channel "policy", hosts, and ranks on them."""

    def __init__(self, network: Network, coordinator: Coordinator, stack: AsyncExitStack) -> None:
        self.hosts = network.machines
        self.coordinator = coordinator
        self._stack = stack

    async def join(self, host: int, group: str, replica: int = 0, rank: int = 0, world_size: int = 1) -> HostRank:
        """Start a rank there and let it join."""
        one = await HostRank.start(f"{group}/{replica}/{rank}", self.hosts[host])
        self._stack.push_async_callback(one.end)
        where = {"endpoint": self.coordinator.endpoint, "token": self.coordinator.token}
        await one.ask("join", group=group, replica=replica, rank=rank, world_size=world_size, **where)
        return one

    async def trainer_and_rollouts(self, *places: int) -> tuple[HostRank, list[HostRank]]:
        """A trainer on the first host, and a rollout on each of the hosts ``places``; all of them are live."""
        joins = [self.join(0, "trainer"), *(self.join(host, "rollout", index) for index, host in enumerate(places))]
        trainer, *rollouts = await asyncio.gather(*joins)
        await self.live(len(joins))
        return trainer, rollouts

    async def live(self, members: int) -> None:
        """Wait until so many members are live."""

        def count() -> int:
            (channel,) = self.coordinator.channel_statuses()
            return sum(member.state == "live" for member in channel.members)

        await wait_until(lambda: count() == members, f"{members} members are live", timeout_s=TIMEOUT_S)

    def sidecars(self) -> list[int]:
        """How many members on each host have a process group."""
        return [len(host.processes("replica-sidecar")) for host in self.hosts]


@asynccontextmanager
async def host_world(size: int, config: dict[str, Any] | None = None, **groups: GroupShape) -> AsyncIterator[HostWorld]:
    """So many hosts. ``config``: changes to a trainer and rollouts; ``groups``: their shapes."""
    settings = {"sources": ["trainer"], "targets": ["rollout"], "deadline": "40s", **(config or {})}
    with hosts(size) as network:
        where = {"host": network.address, "store_bind": network.address}
        async with Coordinator({"policy": settings}, groups=groups, **where) as coordinator, AsyncExitStack() as stack:
            yield HostWorld(network, coordinator, stack)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---------------------------------------------------------------- in the rank


class _Rank:
    """The commands. Torch is imported only here: the test's process has it anyway, its host's ranks need it late."""

    def __init__(self) -> None:
        self._channel: Any = None

    def join(self, **where: Any) -> dict[str, Any]:
        import replicas  # see above

        self._channel = replicas.join("policy", **where)
        return {}

    def publish(self, seed: int, part: int = 0, parts: int = 1) -> dict[str, Any]:
        """Tensors that follow from ``seed``; of several parts, the rows of one."""
        import torch

        from replicas import Shard

        weights: dict[str, Any] = {}
        for number in range(TENSORS):
            whole = torch.arange(ELEMENTS, dtype=torch.int32).add_(seed + number).view(1 << 10, -1)
            rows = whole.tensor_split(parts)[part]
            first = sum(len(other) for other in whole.tensor_split(parts)[:part])
            weights[f"w{number}"] = Shard(rows, (first, 0), tuple(whole.shape)) if parts > 1 else whole
        receipt = self._channel.publish(weights).wait(TIMEOUT_S)
        return {"version": receipt.version, "lost": receipt.lost, "nbytes": receipt.nbytes, "phases": receipt.phases}

    def receive(self) -> dict[str, Any]:
        """The newest version, once it is there; ``seed``: that of its tensors, all of whose values have been looked at."""
        import torch

        with self._channel.receive().wait(TIMEOUT_S) as update:
            found = dict(update)
            seed = int(found["w0"].flatten()[0])
            for number in range(TENSORS):
                expected = torch.arange(ELEMENTS, dtype=torch.int32).add_(seed + number).view(1 << 10, -1)
                if not torch.equal(found[f"w{number}"], expected):
                    raise RuntimeError(f"w{number} of version {update.version} has other values than those of {seed}")
            return {"version": update.version, "seed": seed}

    def leave(self) -> dict[str, Any]:
        self._channel.close()
        return {}


def _main() -> None:
    rank = _Rank()
    for line in sys.stdin:
        command = json.loads(line)
        handler: Callable[..., dict[str, Any]] = getattr(rank, command.pop("do"))
        try:
            reply = handler(**command)
        except Exception as error:  # noqa: BLE001  # the test is told, and fails
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _main()

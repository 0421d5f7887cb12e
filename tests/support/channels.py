"""A real coordinator and several members of its channels in the test's own process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import replicas
from replicas.channel import Channel, Receipt
from replicas.coordinator import Coordinator, GroupShape
from replicas.testing import FakeRun
from tests.support.waits import wait_until

__all__ = ["POLICY", "ChannelWorld", "channel_world", "fake_world", "freeze", "load", "publish"]

POLICY: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"], "deadline": "30s"}


async def freeze(process: asyncio.subprocess.Process) -> None:
    """SIGSTOP, until every thread has stopped: the signal alone may come after a
    message that is on its way."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")

    def stopped() -> bool:
        states = [(task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        return all(state == "T" for state in states)

    await wait_until(stopped, f"process {process.pid} has stopped")


class ChannelWorld:
    """A coordinator, and what joined it here; everything is closed at the end."""

    def __init__(self, coordinator: Coordinator, channel: str, endpoint: str = "") -> None:
        self.coordinator = coordinator
        self.channel = channel
        self.joined: list[Channel] = []
        self.endpoint = endpoint or coordinator.endpoint

    async def join(
        self,
        group: str,
        replica: int | str = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        channel: str | None = None,
        **more: Any,
    ) -> Channel:
        def join() -> Channel:
            identity: dict[str, Any] = {"group": group, "replica": replica, "rank": rank, "world_size": world_size}
            where: dict[str, Any] = {"endpoint": self.endpoint, "token": self.coordinator.token}
            return replicas.join(channel or self.channel, **where | identity | more)

        found = await asyncio.to_thread(join)
        self.joined.append(found)
        return found

    async def trainer_and_rollouts(self, rollouts: int = 1) -> tuple[Channel, ...]:
        trainer = await self.join("trainer")
        return (trainer, *[await self.join("rollout", index) for index in range(rollouts)])

    async def aclose(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(channel.close, wait=False) for channel in self.joined))


@asynccontextmanager
async def channel_world(
    config: Mapping[str, Any] | None = None, *, name: str = "policy", **groups: int | GroupShape
) -> AsyncIterator[ChannelWorld]:
    """A coordinator with one channel. ``groups``: their shapes; ``config``: changes to
    a trainer and rollouts."""
    async with (
        Coordinator({name: _settings(config)}, groups=groups) as coordinator,
        aclosing(ChannelWorld(coordinator, name)) as world,
    ):
        yield world


@asynccontextmanager
async def fake_world(
    config: Mapping[str, Any] | None = None, *, name: str = "policy", **groups: int | GroupShape
) -> AsyncIterator[ChannelWorld]:
    """The same without sockets and processes."""
    with FakeRun({name: _settings(config)}, groups=groups) as run:
        async with aclosing(ChannelWorld(run._coordinator, name, run.endpoint)) as world:
            yield world


async def publish(channel: Channel, given: object, **options: Any) -> Receipt:
    """On a thread, as the coordinator may be on this loop."""
    return await (await asyncio.to_thread(channel.publish, given, **options))


async def load(channel: Channel) -> tuple[int, float]:
    """Receive and load; the version, and the one value that all tensors must have."""
    with await channel.receive(deadline=40) as update:
        values: set[float] = {value for _, tensor in update for value in tensor.tolist()}
        assert len(values) == 1, "a torn set of weights"
        return update.version, values.pop()


def _settings(config: Mapping[str, Any] | None) -> dict[str, Any]:
    settings = {**POLICY, **(config or {})}
    if "peers" in settings:
        del settings["sources"], settings["targets"]
    return settings

"""Members that come in crowds, that flap, and that claim one identity, while a trainer
publishes: it never fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

import replicas
from replicas import errors
from replicas import messages as wire
from replicas.channel import Channel
from replicas.messages.identity import ProcessIdentity
from tests.support.channel.members import Client
from tests.support.channels import ChannelWorld, channel_world
from tests.support.programs import RECEIVES
from tests.support.runs import alive
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


class Publisher:
    """Publishes without a break. ``receipts``, and ``failures``: of which there must be
    none."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.receipts: list[replicas.Receipt] = []
        self.failures: list[errors.ReplicasError] = []
        self._over = False

    @property
    def worst_s(self) -> float:
        return max(receipt.seconds for receipt in self.receipts)

    async def run(self) -> None:
        await anyio.to_thread.run_sync(self._publish)

    def _publish(self) -> None:
        step = 0
        while not self._over:
            step += 1
            try:
                self.receipts.append(self._one(step))
            except errors.ReplicasError as error:
                self.failures.append(error)
            time.sleep(0.01)

    def _one(self, step: int) -> replicas.Receipt:
        return self.channel.publish({"w": torch.full((1000,), float(step))}, meta={"stamp": step}).wait()

    async def more(self, number: int = 2) -> None:
        """So many more versions are committed."""
        enough = len(self.receipts) + number
        await wait_until(lambda: len(self.receipts) >= enough or self.failures, "more versions", timeout_s=60)
        assert not self.failures

    def stop(self) -> None:
        self._over = True


@asynccontextmanager
async def publishing(world: ChannelWorld) -> AsyncIterator[Publisher]:
    publisher = Publisher(await world.join("trainer"))
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        publisher.stop()
        await task
    assert not publisher.failures


async def newest(channel: Channel) -> int:
    with await channel.receive(deadline=30) as update:
        values = {value for _, tensor in update for value in tensor.tolist()}
        assert len(values) == 1, "a torn set of weights"
        return update.version


def epoch(world: ChannelWorld) -> int:
    return world.coordinator.channel_statuses()[0].epoch


async def test_eight_joins_at_once_make_one_epoch() -> None:
    """A transfer is held up while they join: they wait for its end together, and get
    the newest version."""
    async with channel_world({"deadline": "100s"}, rollout=10) as world, publishing(world) as publisher:
        slow = Client(world.coordinator, replica=9, incarnation="slow")
        await slow.join()
        await slow.until(wire.TransferOffer)
        before = epoch(world)
        beats = asyncio.create_task(keep_alive(slow))
        crowd = await asyncio.gather(*(world.join("rollout", index) for index in range(8)))
        roster = world.coordinator.engine.channels["policy"].roster
        await wait_until(lambda: all(state.host for state in roster), "everybody has said where it is")
        beats.cancel()
        await slow.say(wire.Bye())
        versions = await asyncio.gather(*(newest(channel) for channel in crowd))
        assert min(versions) >= 1
        live = [member.name for member in world.coordinator.channel_statuses()[0].members if member.state == "live"]
        assert len(live) == 9
        assert epoch(world) - before == 2, "one for the one that left, one for the eight"
        await publisher.more()
        assert len(publisher.receipts[-1].members) == 8


async def keep_alive(client: Client) -> None:
    while True:
        await client.say(wire.Heartbeat(), seq=0)
        await asyncio.sleep(0.5)


async def test_a_member_that_dies_after_each_join_costs_nobody_a_publish() -> None:
    """Twenty times: it is there for long enough to be offered a version, and its
    process is killed."""
    async with channel_world({"deadline": "20s"}, rollout=2) as world, publishing(world) as publisher:
        good = await world.join("rollout", 0)
        await publisher.more()
        for index in range(20):
            child = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                flapping = Client(world.coordinator, replica=1, incarnation=f"flap{index}", process=identity(child.pid))
                assert isinstance(await flapping.join(), wire.Welcome)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await flapping.until(wire.TransferOffer)
            finally:
                child.kill()
                await child.wait()
        await publisher.more()
        assert await newest(good) > 0
        assert publisher.worst_s < 10, "one flap held up a publish for most of its deadline"


def identity(pid: int) -> ProcessIdentity:
    """The process of this machine, as a member would say it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return ProcessIdentity(pid, started, boot_id, Path("/proc/self/ns/pid").stat().st_ino)


async def test_two_that_claim_one_identity_fence_each_other_and_harm_nobody() -> None:
    async with channel_world({"deadline": "20s"}, rollout=2) as world, publishing(world) as publisher:
        good = await world.join("rollout", 0)
        first = await world.join("rollout", 1)
        await newest(first)
        await publisher.more()
        second = await world.join("rollout", 1)
        with pytest.raises(errors.Fenced, match="this process joined again as rollout/1/0"):
            while True:
                await newest(first)
        await newest(second)
        for _ in range(5):  # both keep claiming it
            began = time.monotonic()
            claims = await asyncio.gather(world.join("rollout", 1), world.join("rollout", 1))
            assert time.monotonic() - began < 10
            outcomes = await asyncio.gather(*map(newest, claims), return_exceptions=True)
            assert all(isinstance(one, int | errors.Fenced) for one in outcomes), outcomes
        await publisher.more()
        assert await newest(good) > 0
        names = [member.name for member in world.coordinator.channel_statuses()[0].members]
        assert names.count("rollout/1/0") == 1
        assert publisher.worst_s < 10


async def test_a_store_that_freezes_costs_nobody_a_publish() -> None:
    """What runs goes on; what has to form does without, until there is a new store."""
    async with channel_world({"transport": "group"}, rollout=2) as world, publishing(world) as publisher:
        first = await world.join("rollout", 0)
        await publisher.more()
        pid = world.coordinator.store_pid
        assert pid is not None
        before = world.coordinator.store_address
        os.kill(pid, signal.SIGSTOP)
        second = await world.join("rollout", 1)
        assert await newest(second) > 0
        await wait_until(lambda: world.coordinator.store_address != before, "the store is replaced")
        await publisher.more()
        assert {member.name for member in publisher.receipts[-1].members} == {"rollout/0/0", "rollout/1/0"}
        assert await newest(first) > 0
        assert not alive(pid)


def config(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    out = {"OUT": str(folder)}
    return {
        "schema_version": 1,
        "run": {"name": "scaled", "state_dir": str(folder / "state")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {
            name: {"launcher": "exec", "env": out, **group} if "command" in group else group
            for name, group in groups.items()
        },
        "channels": {"policy": {"sources": ["trainer"], "targets": ["rollout"], "deadline": "20s"}},
    }


async def test_scaling_while_a_trainer_publishes(tmp_path: Path) -> None:
    """The trainer is this process."""
    rollout = {"command": [sys.executable, "-c", RECEIVES], "replicas": 1}
    text = config(tmp_path, rollout=rollout, trainer={"launcher": "external"})
    async with replicas.Supervisor(text) as supervisor:
        world = ChannelWorld(supervisor.coordinator, "policy")
        try:
            async with publishing(world) as publisher:
                await supervisor.wait_ready("rollout", timeout=60)
                await publisher.more()
                await supervisor.scale("rollout", 3)
                await supervisor.wait_ready("rollout", timeout=60)
                await publisher.more()
                assert 'weight_version{channel="policy",group="rollout",replica="2",run="scaled"}' in text_of(
                    supervisor
                )
                pids = [one.pid for one in supervisor.status().groups[0].replicas]
                await supervisor.scale("rollout", 1)
                await publisher.more()
                assert {member.name for member in publisher.receipts[-1].members} >= {"rollout/0/0"}
                metrics = text_of(supervisor)
                assert 'replica="1"' not in metrics
                assert 'replica="2"' not in metrics
                assert 'replicas_group_replicas{group="rollout",run="scaled",state="ready"} 1.0' in metrics
                assert [one.pid for one in supervisor.status().groups[0].replicas] == pids[:1]
        finally:
            await world.aclose()


def text_of(supervisor: replicas.Supervisor) -> str:
    return supervisor.metrics_text().decode()

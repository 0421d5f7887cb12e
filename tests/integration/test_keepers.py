"""What was committed outlives its source on any host: keepers, on hosts that are namespaces."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from replicas import keeper
from replicas.channel.keeper import GROUP
from replicas.coordinator import Coordinator, GroupShape
from replicas.core.keepers import Keepers
from tests.support.channels import wait_until
from tests.support.host_ranks import PROGRAM, ROOT, HostRank, HostWorld
from tests.support.networks import Machine, hosts, why_no_hosts
from tests.support.processes import children, name_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

POLICY = {"sources": ["trainer"], "targets": ["rollout"], "deadline": "40s"}
NAME = "replica-keeper"
SHORT_LEASE = {GROUP: GroupShape(heartbeat_timeout_s=8.0)}
"""Nobody sees a process on another host end."""


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


class World(HostWorld):
    """With a coordinator that can be started again."""

    async def keeping(self, *versions: int) -> None:
        """Wait until there is one keeper that holds these versions, and no other."""

        def held() -> list[tuple[int, ...]]:
            (channel,) = self.coordinator.channel_statuses()
            return [member.held for member in channel.members if member.role == "keeper"]

        await wait_until(lambda: held() == [versions], f"one keeper holds {versions}", timeout_s=60.0)

    def keepers(self) -> list[int]:
        """Pids of those on all hosts, and beside the coordinator."""
        found = [pid for host in self.hosts for pid in host.processes(NAME)]
        return found + [pid for pid in children(os.getpid()) if name_of(pid) == NAME]

    async def no_keepers(self) -> None:
        await wait_until(lambda: not self.keepers(), "all keepers have ended", timeout_s=20.0)


class Here(Machine):
    """The machine of the test itself, and of its coordinator."""

    def command(self, *words: str) -> list[str]:
        return list(words)


@asynccontextmanager
async def world_of(size: int, state_dir: Path | None = None) -> AsyncIterator[tuple[World, AsyncExitStack]]:
    """In the end of it nothing is left but the hosts, and they have no keepers."""
    with hosts(size) as network:
        address = network.address
        coordinator = Coordinator(
            {"policy": POLICY}, groups=SHORT_LEASE, host=address, store_bind=address, state_dir=state_dir
        )
        async with AsyncExitStack() as ranks:
            async with AsyncExitStack() as coordinators:
                await coordinators.enter_async_context(coordinator)
                world = World(network, coordinator, ranks)
                yield world, coordinators
            await world.no_keepers()


async def published(trainer: HostRank, seed: int) -> int:
    receipt = await trainer.ask("publish", seed=seed)
    version: int = receipt["version"]
    return version


async def test_a_source_on_another_host_publishes_and_dies() -> None:
    async with world_of(2) as (world, _):
        trainer = await world.join(0, "trainer")
        assert await published(trainer, 7) == 1, "it waits for the keeper that is being started"
        trainer.kill()
        await world.keeping(1)
        far = await world.join(1, "rollout")
        assert await far.ask("receive") == {"version": 1, "seed": 7}
        again = await world.join(0, "trainer")
        assert await published(again, 8) == 2
        assert await far.ask("receive") == {"version": 2, "seed": 8}
        await world.keeping(2)


async def test_a_keeper_that_is_killed_is_replaced() -> None:
    async with world_of(1) as (world, _):
        trainer = await world.join(0, "trainer")
        await published(trainer, 7)
        [first] = world.keepers()
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: world.keepers() not in ([], [first]), "another one starts", timeout_s=60.0)
        await world.keeping(1)
        trainer.kill()
        target = await world.join(0, "rollout")
        assert await target.ask("receive") == {"version": 1, "seed": 7}
        assert world.sidecars() == [0], "it is mapped"


async def test_it_outlives_the_coordinator_and_the_source(tmp_path: Path) -> None:
    async with world_of(1, tmp_path) as (world, coordinators):
        trainer = await world.join(0, "trainer")
        await published(trainer, 7)
        await world.keeping(1)
        old = world.coordinator
        old.keep_decisions = True
        await coordinators.aclose()
        trainer.kill()
        address, _, port = old.endpoint.rpartition(":")
        world.coordinator = Coordinator(
            {"policy": POLICY}, host=address, port=int(port), store_bind=address, token=old.token, state_dir=tmp_path
        )
        await coordinators.enter_async_context(world.coordinator)
        target = await world.join(0, "rollout")
        assert await target.ask("receive") == {"version": 1, "seed": 7}


async def test_what_the_coordinator_keeps_is_sent_to_other_hosts() -> None:
    async with world_of(1) as (world, _):
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", PROGRAM, stdin=PIPE, stdout=PIPE, cwd=ROOT)
        trainer = HostRank("trainer/0/0", Here(0, ""), process)
        where = {"endpoint": world.coordinator.endpoint, "token": world.coordinator.token}
        await trainer.ask("join", group="trainer", replica=0, rank=0, world_size=1, **where)
        await published(trainer, 7)
        process.kill()
        await process.wait()
        assert not world.keepers(), "nobody needs one"
        far = await world.join(0, "rollout")
        assert await far.ask("receive") == {"version": 1, "seed": 7}
        await world.no_keepers()


async def test_one_without_a_coordinator_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keepers, "advance", lambda self, now: None)  # or it would be told to leave at once
    async with world_of(1) as (world, coordinators):
        where = world.coordinator
        keeper.start(keeper.Job(where.endpoint, where.token, "embedded", "policy", lease_s=2.0))

        roster = where.engine.channels["policy"].roster
        await wait_until(lambda: len(roster), "it has joined", timeout_s=60.0)
        [pid] = [state.hello.process.pid for state in roster]
        where.keep_decisions = True  # another coordinator will go on, as far as it knows
        await coordinators.aclose()
        assert name_of(pid) == NAME
        await wait_until(lambda: name_of(pid) != NAME, "it has ended", timeout_s=20.0)

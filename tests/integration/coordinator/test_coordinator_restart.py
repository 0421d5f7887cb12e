"""A coordinator that is stopped, or killed at the worst moment, and started again:
publishes and receives go on."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import replicas
from replicas import errors
from replicas.channel import Channel, Receipt, Update
from tests.support.channel.coordinator_process import CoordinatorProcess
from tests.support.channels import POLICY
from tests.support.machine.proxy import Proxy
from tests.support.programs import PUBLISHES, RECEIVES
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(value)), "b": torch.full((3,), float(value))}


def value_of(update: Update) -> float:
    """The one value that all tensors must have."""
    values: set[float] = {value for _, tensor in update for value in tensor.tolist()}
    assert len(values) == 1, "a torn set of weights"
    return values.pop()


async def publish(channel: Channel, value: float) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, weights(value)))


async def load(channel: Channel) -> tuple[int, float]:
    with await channel.receive(deadline=40) as update:
        return update.version, value_of(update)


class RestartWorld:
    """Members in this process, the coordinator in one of its own."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.coordinator = coordinator
        self.joined: list[Channel] = []

    async def join(self, group: str, replica: int | Literal["auto"] = 0, rank: int = 0, world_size: int = 1) -> Channel:
        def join() -> Channel:
            where: dict[str, Any] = {"endpoint": self.coordinator.endpoint, "token": self.coordinator.token}
            return replicas.join("policy", group=group, replica=replica, rank=rank, world_size=world_size, **where)

        self.joined.append(await asyncio.to_thread(join))
        return self.joined[-1]

    async def restarted(self) -> None:
        """It has killed itself at its moment, and is started again."""
        await self.coordinator.died()
        await self.coordinator.start()


@asynccontextmanager
async def world_of(
    state_dir: Path | None, config: dict[str, Any] | None = None, **groups: int
) -> AsyncIterator[RestartWorld]:
    """``groups``: ranks of each replica."""
    coordinator = CoordinatorProcess({**POLICY, **(config or {})}, groups, state_dir)
    world = RestartWorld(coordinator)
    try:
        await coordinator.start()
        yield world
    finally:
        await asyncio.gather(*(asyncio.to_thread(channel.close, wait=False) for channel in world.joined))
        await coordinator.clean_up()


MOMENTS = [
    ("auto", True, ["publish begun", "admitting", "packed", "mapping"]),
    ("auto", True, ["first done", "decided", "telling", "told"]),
    ("auto", False, ["packed", "mapping", "decided", "telling"]),
    ("group", True, ["packed", "going", "first done"]),
    ("group", False, ["going", "decided"]),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("transport", "log", "moments"), MOMENTS)
async def test_a_publish_outlives_its_coordinator_at_any_moment(
    transport: str, log: bool, moments: list[str], tmp_path: Path
) -> None:
    async with world_of(tmp_path if log else None, {"transport": transport}) as world:
        trainer = await world.join("trainer")
        rollouts = [await world.join("rollout", replica) for replica in range(2)]
        await publish(trainer, 1)
        for rollout in rollouts:
            assert await load(rollout) == (1, 1.0)
        for version, moment in enumerate(moments, 2):
            asked = [rollout.receive() for rollout in rollouts]
            await world.coordinator.arm(moment)
            publishing = asyncio.create_task(publish(trainer, version))
            await world.restarted()
            receipt = await publishing
            assert (receipt.version, receipt.lost) == (version, ()), moment
            assert trainer.version == trainer.latest == version
            for pending in asked:
                with await pending as update:
                    assert (update.version, value_of(update)) == (version, version), moment
            assert await trainer.loaded(version, deadline=20) == version


async def test_a_coordinator_that_dies_while_it_reads_a_manifest() -> None:
    async with world_of(None) as world:
        trainer, rollout = await world.join("trainer"), await world.join("rollout")
        await world.coordinator.arm("reading")
        publishing = asyncio.create_task(publish(trainer, 1))
        await world.restarted()
        assert (await publishing).lost == ()
        assert await load(rollout) == (1, 1.0)


async def test_an_index_is_given_when_those_that_have_one_are_back(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        trainer = await world.join("trainer")
        first = await world.join("rollout", "auto")
        await publish(trainer, 1)
        assert await load(first) == (1, 1.0)
        await world.coordinator.arm("decided")
        publishing = asyncio.create_task(publish(trainer, 2))
        await world.coordinator.died()
        joining = asyncio.create_task(world.join("rollout", "auto"))
        await world.coordinator.start()
        second = await joining
        assert [one.member.replica for one in (first, second)] == [0, 1]
        assert (await publishing).version == 2
        for rollout in (first, second):
            assert await load(rollout) == (2, 2.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["auto", "group"])
async def test_all_ranks_of_a_source_get_one_verdict(transport: str) -> None:
    config = {"sources": [{"group": "trainer", "ranks": "all"}], "transport": transport}
    async with world_of(None, config, trainer=2) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        rollout = await world.join("rollout")
        moments = [("admitting", 1), ("admitting", 2), ("packed", 2), ("telling", 2)]
        for version, (moment, times) in enumerate(moments, 1):
            asked = rollout.receive()
            await world.coordinator.arm(moment, times)
            publishing = [asyncio.create_task(publish(trainer, version)) for trainer in trainers]
            await world.restarted()
            receipts = await asyncio.gather(*publishing)
            assert [receipt.version for receipt in receipts] == [version, version], moment
            with await asked as update:
                assert (update.version, value_of(update)) == (version, version), moment


async def test_one_rank_had_a_number_and_the_other_had_not() -> None:
    async with world_of(None, {"sources": [{"group": "trainer", "ranks": "all"}]}, trainer=2) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        rollout = await world.join("rollout")
        first = asyncio.create_task(publish(trainers[0], 1))
        await wait_until(lambda: trainers[0]._hub.held_versions.publishing, "it has a number")
        await world.coordinator.arm("publish begun")
        second = asyncio.create_task(publish(trainers[1], 1))
        await world.restarted()
        assert [(await task).version for task in (first, second)] == [1, 1]
        assert await load(rollout) == (1, 1.0)


@pytest.mark.parametrize("log", [True, False])
async def test_a_clean_stop(log: bool, tmp_path: Path) -> None:
    """Publishes and receives may begin while nobody is there; a fresh target is caught
    up afterwards."""
    async with world_of(tmp_path if log else None) as world:
        trainer, rollout = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1)
        assert await load(rollout) == (1, 1.0)
        epoch = trainer.epoch
        await world.coordinator.stop()
        publishing, asked, watching = asyncio.create_task(publish(trainer, 2)), rollout.receive(), trainer.loaded(2)
        assert (trainer.latest, rollout.version) == (1, 1)
        await world.coordinator.start()
        assert (await publishing).version == 2
        assert trainer.epoch > epoch
        with await asked as update:
            assert (update.version, value_of(update)) == (2, 2.0)
        assert await watching == 2
        await world.coordinator.kill()
        await world.coordinator.start()
        late = await world.join("rollout", 1)
        assert await load(late) == (2, 2.0)
        assert (await publish(trainer, 3)).version == 3
        assert [await load(target) for target in (rollout, late)] == [(3, 3.0), (3, 3.0)]


async def test_a_load_goes_on_while_the_coordinator_is_away() -> None:
    """One rank has been granted a version: the other one gets the same, though a newer
    one is committed meanwhile."""
    async with world_of(None, rollout=2) as world:
        trainer = await world.join("trainer")
        ranks = [await world.join("rollout", 0, rank, 2) for rank in range(2)]
        await publish(trainer, 1)
        update = await ranks[0].receive(deadline=20)
        assert dict(update)
        await world.coordinator.kill()
        await world.coordinator.start()
        assert (await publish(trainer, 2)).version == 2
        update.loaded()
        assert await load(ranks[1]) == (1, 1.0)
        assert [await load(rank) for rank in ranks] == [(2, 2.0), (2, 2.0)]
        assert await trainer.loaded(2, deadline=20) == 2


@pytest.mark.parametrize("moment", ["granting", "loaded"])
async def test_a_grant_and_a_load_that_nobody_heard_of(moment: str) -> None:
    async with world_of(None) as world:
        trainer, rollout = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1)
        watching = trainer.loaded(1)
        await world.coordinator.arm(moment)
        loading = asyncio.create_task(load(rollout))
        await world.restarted()
        assert await loading == (1, 1.0)
        assert await watching == 1
        await publish(trainer, 2)
        assert await load(rollout) == (2, 2.0)


@pytest.mark.parametrize(
    ("transport", "moment"),
    [("group", "pulling"), ("group", "first done"), ("auto", "locating"), ("auto", "mapping"), ("auto", "first done")],
)
async def test_a_catch_up_begins_anew(transport: str, moment: str) -> None:
    async with world_of(None, {"transport": transport}) as world:
        trainer, first = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1)
        assert await load(first) == (1, 1.0)
        await world.coordinator.arm(moment)
        joining = asyncio.create_task(world.join("rollout", 1))
        await world.restarted()
        late = await joining
        with await late.receive() as update:
            assert (update.version, value_of(update)) == (1, 1.0)
        assert (await publish(trainer, 2)).lost == ()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["packed", "decided"])
async def test_an_outcome_that_stayed_unknown_is_settled_when_the_coordinator_is_back(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(None) as world:
        trainer, rollout = await world.join("trainer"), await world.join("rollout")
        await publish(trainer, 1)
        await world.coordinator.arm(moment)
        with monkeypatch.context() as patch:
            patch.setattr("replicas.channel.versions.publish.GRACE_S", 0.2)
            pending = await asyncio.to_thread(trainer.publish, weights(2), deadline=2.0)
            with pytest.raises(errors.OutcomeUnknown):
                await pending
        await world.coordinator.died()
        await world.coordinator.start()
        receipt = await publish(trainer, 3)
        assert receipt.version == 3
        settled = await pending
        assert settled.version == 2
        assert await load(rollout) == (3, 3.0)


async def test_a_prepared_version_goes_forward_when_its_source_is_gone(tmp_path: Path) -> None:
    async with world_of(tmp_path) as world:
        trainer = await world.join("trainer")
        rollouts = [await world.join("rollout", replica) for replica in range(2)]
        await publish(trainer, 1)
        for rollout in rollouts:
            assert await load(rollout) == (1, 1.0)
        asked = [rollout.receive() for rollout in rollouts]
        await world.coordinator.arm("telling")
        publishing = asyncio.create_task(publish(trainer, 2))
        await world.coordinator.died()
        await asyncio.to_thread(trainer.close, wait=False)
        with pytest.raises(errors.Gone):
            await publishing
        await world.coordinator.start()
        for pending in asked:
            with await pending as update:
                assert (update.version, value_of(update)) == (2, 2.0)
        again = await world.join("trainer")
        assert again.latest == 2
        assert (await publish(again, 3)).version == 3


async def test_the_old_incarnation_does_not_fence_the_new_one() -> None:
    """It was out of reach while the coordinator started again and another process took
    its place."""
    async with world_of(None) as world:
        trainer = await world.join("trainer")
        async with Proxy(world.coordinator.endpoint) as proxy:
            port, world.coordinator.port = world.coordinator.port, int(proxy.endpoint.rpartition(":")[2])
            old = await world.join("rollout")
            world.coordinator.port = port
            await publish(trainer, 1)
            proxy.freeze()
            await world.coordinator.kill()
            await world.coordinator.start()
            new = await world.join("rollout")
            assert await load(new) == (1, 1.0)
            asked = old.receive()
            proxy.thaw()
            with pytest.raises(errors.Fenced):
                await asked
            assert (await publish(trainer, 2)).version == 2
            assert await load(new) == (2, 2.0)


# ------------------------------------------------------ ranks in processes of their own


async def spawn(coordinator: CoordinatorProcess, out: Path, group: str, replica: int, code: str) -> Process:
    token = out / "token"
    if not token.exists():
        token.touch(mode=0o600)
        token.write_text(coordinator.token)
    env = {
        **os.environ,
        "REPLICAS_ENDPOINT": coordinator.endpoint,
        "REPLICAS_TOKEN_FILE": str(token),
        "REPLICAS_GROUP": group,
        "REPLICA_ID": str(replica),
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, stdin=DEVNULL)


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.timeout(300)
async def test_ranks_that_never_stop_see_nothing_of_it(tmp_path: Path) -> None:
    out = tmp_path
    async with world_of(None) as world:
        coordinator = world.coordinator
        ranks = [
            await spawn(coordinator, out, "trainer", 0, PUBLISHES),
            *[await spawn(coordinator, out, "rollout", replica, RECEIVES) for replica in range(2)],
        ]
        try:

            def received(replica: int) -> list[dict[str, Any]]:
                return read(out / f"rollout-{replica}.jsonl")

            async def go_on(replica: int, versions: int) -> None:
                newest = max((line["version"] for line in received(replica)), default=0)
                await wait_until(
                    lambda: any(line["version"] >= newest + versions for line in received(replica)),
                    f"rollout/{replica} goes on from version {newest}",
                    timeout_s=60,
                )

            await go_on(0, 3)
            await go_on(1, 3)
            for moment, times in (("first done", 1), ("decided", 2), ("loaded", 3)):
                await coordinator.arm(moment, times)
                await world.restarted()
                await asyncio.gather(go_on(0, 3), go_on(1, 3))
            ranks.append(await spawn(coordinator, out, "rollout", 2, RECEIVES))
            await go_on(2, 3)
            (out / "stop").touch()
            assert await asyncio.wait_for(ranks[0].wait(), 60) == 0
        finally:
            for rank in ranks:
                if rank.returncode is None:
                    rank.kill()
                    await rank.wait()
        published = {line["version"]: line["ended"] for line in read(out / "trainer-0.jsonl") if "version" in line}
        assert not [line for line in read(out / "trainer-0.jsonl") if "error" in line]
        assert list(published) == sorted(published)
        for replica in range(3):
            versions = [line["version"] for line in received(replica)]
            assert versions == sorted(set(versions))
            for line in received(replica):
                assert line["values"] == [line["stamp"]] == [published[line["version"]]]

"""Whole channels whose slots are on GPUs (``staging = "device"``), with fake ones:
:mod:`tests.support.devices.fake_accelerator`.

The members are in this process, on the GPU that they were told; those that are killed
have processes of their own.

Covers: channel/versions/on_device.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import replicas
from replicas import environ, errors
from replicas.channel import Channel, Pending, Receipt, Update
from replicas.channel.session.held_versions import HeldVersions
from replicas.coordinator import GroupShape
from replicas.weights.copies.accelerator import accelerator
from tests.integration.coordinator.test_coordinator_restart import world_of
from tests.support.channel.memory import statistics
from tests.support.channels import ChannelWorld, channel_world, load
from tests.support.devices import fake_accelerator
from tests.support.devices.fake_accelerator import fake_memory_nbytes
from tests.support.ranks import ELEMENTS, RankProcess
from tests.support.root import ROOT
from tests.support.sidecars import kill_next, shared_forkserver
from tests.support.waits import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("gpus")]

GPUS = ("FAKE-0", "FAKE-1", "FAKE-2", "FAKE-3")
ENVIRONMENT = {
    "REPLICAS_ACCELERATOR": fake_accelerator.NAME,
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    "FAKE_GPUS": ",".join(GPUS),
}
DEVICE = {"staging": "device"}
IMAGE_NBYTES = 4 * ELEMENTS


@pytest.fixture(scope="module")
def gpus() -> Iterator[None]:
    """These GPUs are there, also for the sidecars of all ranks, which one forkserver
    makes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with shared_forkserver() as forkserver:
            patch.setenv(environ.FORKSERVER, forkserver)
            yield


async def join(world: ChannelWorld, group: str, replica: int, gpu: str, rank: int = 0, world_size: int = 1) -> Channel:
    """A member whose current GPU is this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_GPUS", ",".join(sorted(GPUS, key=lambda name: name != gpu)))
        channel = await world.join(group, replica, rank, world_size)
    assert channel._hub.device == gpu
    return channel


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), float(value)), "b": torch.full((7,), float(value))}


async def publish(channel: Channel, value: float) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, weights(value)))


def lanes(world: ChannelWorld) -> list[list[str]]:
    found = world.coordinator.engine.channels["policy"].lanes._lanes.values()
    return sorted(sorted(member.name for member in lane.members) for lane in found)


async def test_members_on_one_gpu_copy_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with channel_world(DEVICE) as world:
        trainer = await join(world, "trainer", 0, "FAKE-0")
        before = accelerator_allocated()
        rollouts = [await join(world, "rollout", index, "FAKE-0") for index in (0, 1)]
        assert accelerator_allocated() <= before, "that sidecars can use the memory has been shown once"
        monkeypatch.setenv("FAKE_DELAY_S", "0.02")  # from here on a missing wait would show
        for value in range(1, 5):
            receipt = await publish(trainer, value)
            assert (receipt.version, receipt.staging, receipt.lost) == (value, "device", ())
            assert receipt.phases["hold"] > 0
            assert [await load(rollout) for rollout in rollouts] == [(value, value)] * 2
        assert lanes(world) == []
        for member in (trainer, *rollouts):
            found = statistics(member._hub.arena)
            assert (found.foreign, found.held) == (0, 2), "each has copies of its own"
        known: HeldVersions = rollouts[0]._hub.held_versions
        digest = known.latest_digest
        assert digest.startswith("d"), "it was made on the GPU"
        # what it does for a new coordinator: tell where the bytes are, and digest them
        # there if they are in doubt
        assert {held.place.device for held in known.held() if held.place is not None} == {"FAKE-0"}
        assert known.describe(4).device == "cuda"
        loop = rollouts[0]._hub.loop.loop
        for said, right in ((digest, True), ("d0", False)):
            assert asyncio.run_coroutine_threadsafe(known.verify_doubtful(4, said), loop).result(20) == right

        await publish(trainer, 5)
        update: Update = await rollouts[0].receive(deadline=40)
        with update:
            with pytest.raises(errors.UsageError, match="no path"):
                print(update.path)
            model = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
            update.load_into(model)
            assert all(tensor.eq(5).all() for tensor in model.values())


async def test_other_gpus_get_every_byte_once() -> None:
    async with channel_world(DEVICE) as world:
        trainer = await join(world, "trainer", 0, "FAKE-0")
        near = await join(world, "rollout", 0, "FAKE-0")
        far = [await join(world, "rollout", index, "FAKE-1") for index in (1, 2)]
        for value in (1, 2, 3):
            receipt = await publish(trainer, value)
            assert len(receipt.members) == 3
            assert [await load(rollout) for rollout in (near, *far)] == [(value, value)] * 3
        (lane,) = lanes(world)
        assert lane in (["rollout/1/0", "trainer/0/0"], ["rollout/2/0", "trainer/0/0"]), "one of each GPU"
        roster = world.coordinator.engine.channels["policy"].roster
        assert len({state.host for state in roster}) == 2


async def test_the_parts_of_a_version_on_two_gpus() -> None:
    """Each target copies the part that lies on its own GPU, and pulls the other one."""
    async with channel_world(
        {**DEVICE, "sources": [{"group": "trainer", "ranks": "all"}]}, trainer=GroupShape(1, 2)
    ) as world:
        trainers = [await join(world, "trainer", 0, f"FAKE-{rank}", rank, 2) for rank in (0, 1)]
        rollouts = [await join(world, "rollout", index, f"FAKE-{index}") for index in (0, 1)]
        for value in (1.0, 2.0):
            receipts = await publish_parts(trainers, value)
            assert [receipt.version for receipt in receipts] == [int(value)] * 2
            assert [await load(rollout) for rollout in rollouts] == [(int(value), value)] * 2
            (status,) = world.coordinator.channel_statuses()
            assert status.last_sync is not None
            assert set(status.last_sync.pulled) == {"rollout/0/0", "rollout/1/0"}
        assert not lanes(world)


async def test_a_version_is_pulled_through_host_memory_where_a_lane_has_failed() -> None:
    """Down the chain of the GPUs, while the trainer's GPU still copies; then each GPU
    has a copy for all of its members, and a later version has a lane again."""
    async with channel_world(DEVICE) as world:
        trainer = await join(world, "trainer", 0, "FAKE-0")
        rollouts = [
            await join(world, "rollout", index, gpu) for index, gpu in enumerate(("FAKE-1", "FAKE-1", "FAKE-2"))
        ]
        members = [trainer, *rollouts]
        await publish(trainer, 1)
        version, allocated = 1, accelerator_allocated()

        async def pulls() -> int:
            """How many pull the next version."""
            nonlocal version
            version += 1
            receipt = await publish(trainer, version)
            assert (receipt.version, receipt.lost, receipt.staging) == (version, (), "device")
            assert len(receipt.members) == 3
            assert [await load(rollout) for rollout in rollouts] == [(version, version)] * 3
            (digest,) = {one._hub.held_versions.digest(version) for one in members}
            assert digest.startswith("d"), "it was made on the GPU"
            (status,) = world.coordinator.channel_statuses()
            assert status.last_sync is not None
            return len(status.last_sync.pulled)

        in_lane = [one for one in members if any(one._hub.member.name in lane for lane in lanes(world))]
        assert len(in_lane) == 3
        for victim in in_lane:
            kill_next(victim)
            wanting = {2} if victim is trainer else {1, 2}  # a receiver may have had all before
            assert await pulls() in wanting, "one of each GPU, and the others copy"
            async with asyncio.timeout(60):
                while await pulls():
                    assert not lanes(world), "lanes rest"
        assert len(lanes(world)) == 1
        for member in members:
            assert not member._transfers._transfers, "nothing is served any more"
        await wait_until(lambda: not part_memory(), "the host memory is given back")
        assert accelerator_allocated() <= allocated + len(members) * (IMAGE_NBYTES + 28)


async def test_what_lies_on_gpus_is_pulled_as_a_delta() -> None:
    """Both ends have the version before on a GPU."""
    async with channel_world(DEVICE) as world:
        trainer = await join(world, "trainer", 0, "FAKE-0")
        rollout = await join(world, "rollout", 0, "FAKE-1")
        await publish(trainer, 1)
        for version in (2, 3):
            if version == 2:
                kill_next(rollout)
            changed = weights(1)
            changed["w"].view(-1)[version] = 7.0
            receipt = await asyncio.to_thread(lambda given: trainer.publish(given).wait(40), changed)
            assert (receipt.version, receipt.lost, receipt.staging) == (version, (), "device")
            assert receipt.wire_nbytes < receipt.nbytes / 20
            update: Update = await rollout.receive(deadline=40)
            with update:
                assert update.version == version
                model = {name: torch.zeros_like(tensor) for name, tensor in changed.items()}
                update.load_into(model)
            assert all(torch.equal(model[name], tensor) for name, tensor in changed.items())
        await wait_until(lambda: not part_memory(), "the host memory is given back")


def part_memory() -> list[str]:
    """Host memory of this process in which versions of GPUs travel."""
    names: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            names += [name for name in [str(link.readlink())] if "part-of" in name]
    return names


async def test_a_latecomer_pulls_from_a_target() -> None:
    async with channel_world(DEVICE) as world:
        trainer = await join(world, "trainer", 0, "FAKE-0")
        first = await join(world, "rollout", 0, "FAKE-1")
        await publish(trainer, 1)
        late = await join(world, "rollout", 1, "FAKE-2")
        assert await load(late) == (1, 1.0)
        assert (await publish(trainer, 2)).lost == ()
        assert [await load(rollout) for rollout in (first, late)] == [(2, 2.0)] * 2


async def publish_parts(trainers: list[Channel], value: float) -> list[Receipt]:
    """Each trainer gives its rows."""
    rows, size = ELEMENTS // len(trainers), len(trainers)
    shards = [replicas.Shard(torch.full((rows,), value), (rank * rows,), (size * rows,)) for rank in range(size)]
    calls = [asyncio.to_thread(one.publish, {"w": shard}) for one, shard in zip(trainers, shards, strict=True)]
    return await asyncio.gather(*await asyncio.gather(*calls))


async def test_a_target_without_memory_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with channel_world({**DEVICE, "deadline": "4s"}) as world:
        trainer, rollout = await join(world, "trainer", 0, "FAKE-0"), await join(world, "rollout", 0, "FAKE-0")
        monkeypatch.setenv("FAKE_MEMORY_NBYTES", str(accelerator_allocated() + IMAGE_NBYTES * 3 // 2))
        with pytest.raises(errors.NoCapacity):
            await publish(trainer, 1)
        monkeypatch.delenv("FAKE_MEMORY_NBYTES")
        receipt = await publish(trainer, 2)
        assert receipt.version == 2
        assert await load(rollout) == (2, 2.0)


def accelerator_allocated() -> int:
    found = accelerator()
    assert isinstance(found, fake_accelerator.FakeAccelerator)
    return found.allocated


async def test_a_coordinator_that_starts_again_in_the_midst_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its decision log: what it learns, it learns from the members, who tell
    where on which GPU they have what."""
    async with world_of(None, DEVICE) as world:
        trainer, *rollouts = [await world.join(*place) for place in (("trainer",), ("rollout", 0), ("rollout", 1))]
        monkeypatch.setenv("FAKE_DELAY_S", "0.02")
        await publish(trainer, 1)
        assert [await load(rollout) for rollout in rollouts] == [(1, 1.0)] * 2
        await world.coordinator.arm("first done")
        publishing = asyncio.create_task(publish(trainer, 2))
        await world.restarted()
        receipt = await publishing
        assert (receipt.version, receipt.lost, receipt.staging) == (2, (), "device")
        assert [await load(rollout) for rollout in rollouts] == [(2, 2.0)] * 2


async def test_a_member_that_may_not_open_what_is_on_its_gpu_gets_it_sent() -> None:
    """Its sidecar may: that has been shown when it joined."""
    async with processes({}) as (world, start):
        trainer, rollout = await asyncio.gather(
            join(world, "trainer", 0, "FAKE-0"), start("rollout", FAKE_RANK_FAULTS="ipc")
        )
        for value in (1, 2):
            receipt = await publish(trainer, value)
            assert (receipt.version, receipt.lost) == (value, ())
            assert receipt.phases["transfer"] > 0
            assert await rollout.ask("receive") == {"version": value, "values": [float(value)]}
            assert await rollout.ask("loaded") == value
        assert lanes(world) == [["rollout/0/0", "trainer/0/0"]]


# ---------------------------------------------------------------- who may join


async def test_a_rank_without_a_gpu_and_one_whose_sidecar_cannot_use_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    async with channel_world(DEVICE) as world:
        with monkeypatch.context() as patch, shared_forkserver() as another:
            patch.setenv(environ.FORKSERVER, another)  # sidecars of the one before have another environment
            patch.setattr(
                "replicas.sidecar.rank_side.device_probe._proven", set()
            )  # other tests of this process have shown it
            patch.setenv("FAKE_SIDECAR_FAULTS", "hidden")
            with pytest.raises(errors.Preflight, match="FAKE-0 is not visible") as caught:
                await world.join("rollout", 0)
            assert caught.value.phase == "join"
            assert caught.value.members == ("rollout/0/0",)
            assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
        with monkeypatch.context() as patch:
            patch.setenv("FAKE_GPUS", ",")
            with pytest.raises(errors.Preflight, match="sees no GPU") as caught:
                await world.join("rollout", 0)
            assert 'staging = "host"' in caught.value.hint
        roster = world.coordinator.engine.channels["policy"].roster
        await wait_until(lambda: not len(roster), "nobody is left of them")
        observer = await world.join("watcher", observe=True)
        assert observer.role == "observer"


# ---------------------------------------------------------------- peers

PEERS = {**DEVICE, "peers": [{"group": "peer", "ranks": "each"}]}


async def everyone(peers: list[Channel], call: Callable[[int, Channel], Pending[Receipt]]) -> list[Receipt]:
    return await asyncio.gather(*(call(index, peer) for index, peer in enumerate(peers)))


@asynccontextmanager
async def two_replicas_of_two(config: dict[str, Any]) -> AsyncIterator[tuple[ChannelWorld, list[Channel]]]:
    async with channel_world({**PEERS, **config}, peer=GroupShape(2, 2)) as world:
        places = [(replica, rank) for replica in (0, 1) for rank in (0, 1)]
        peers = [await join(world, "peer", replica, GPUS[2 * replica + rank], rank, 2) for replica, rank in places]
        yield world, peers


async def test_equal_ranks_of_two_replicas_reduce_on_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_replicas_of_two({}) as (world, peers):
        monkeypatch.setenv("FAKE_DELAY_S", "0.01")
        for step in range(12):
            given = [torch.full((1000,), float(step + index)) for index in range(4)]
            receipts = await everyone(peers, lambda i, p: p.all_reduce(given[i], "mean", step=step))  # noqa: B023  # awaited
            assert [set(tensor.tolist()) for tensor in given] == [{step + 1.0}, {step + 2.0}] * 2
            assert [len(receipt.members) for receipt in receipts] == [2] * 4
            assert receipts[0].staging == ""
        assert lanes(world) == [["peer/0/0", "peer/1/0"], ["peer/0/1", "peer/1/1"]]
        for peer in peers:
            scratch = peer._operations._scratches[peer._hub.device]
            await wait_until(lambda scratch=scratch: scratch._idle, "the last operation gives its memory back")  # type: ignore[misc]  # mypy cannot infer the default
            assert len(scratch._idle) <= 2
            assert all(buffer.device == peer._hub.device for buffer in scratch._idle)

        gathered = await everyone(peers, lambda i, p: p.all_gather(torch.full((3,), float(i))))
        assert [[out[0][0].item() for out in receipt.outputs.values()] for receipt in gathered] == [[0, 2], [1, 3]] * 2

        got = [torch.zeros(5) for _ in range(4)]
        pendings = [peers[0].send(torch.full((5,), 7.0), "peer/1"), peers[2].recv(got[2], src="peer/0")]
        await asyncio.gather(*pendings)
        assert got[2].eq(7).all()


async def test_a_sidecar_that_dies_in_the_midst_of_a_reduction_on_gpus() -> None:
    async with two_replicas_of_two({"deadline": "40s"}) as (_, peers):
        given = [torch.full((1000,), float(index)) for index in range(4)]
        await everyone(peers, lambda i, p: p.all_reduce(given[i], step=0))
        before = accelerator_allocated()
        (lane,) = peers[0]._lanes._lanes.values()
        assert lane.sidecar is not None
        os.kill(lane.sidecar.pid, signal.SIGSTOP)
        pendings = [peer.all_reduce(torch.ones(1000), step=1) for peer in peers]
        await asyncio.gather(pendings[1], pendings[3])
        receipts = await asyncio.gather(pendings[0], pendings[2])
        assert [len(receipt.members) for receipt in receipts] == [2, 2], "nobody is lost with a sidecar"
        after = [torch.full((1000,), float(index)) for index in range(4)]
        await everyone(peers, lambda i, p: p.all_reduce(after[i], step=2))
        assert [tensor[0].item() for tensor in after] == [2, 4, 2, 4]
        await wait_until(lambda: accelerator_allocated() <= before, "its memory has come back")


# ---------------------------------------------------------------- deaths


@asynccontextmanager
async def processes(config: dict[str, Any]) -> AsyncIterator[tuple[ChannelWorld, Callable[..., Any]]]:
    """Ranks in processes of their own, on FAKE-0."""
    started: list[RankProcess] = []
    async with channel_world({**DEVICE, **config}) as world:

        async def start(group: str, replica: int = 0, **env: str) -> RankProcess:
            environment = {"FAKE_GPUS": "FAKE-0", **env}
            token = world.coordinator.token
            rank = await RankProcess.start(world.endpoint, token, group, replica, env=environment)
            started.append(rank)
            return rank

        try:
            yield world, start
        finally:
            await asyncio.gather(*(rank.clean_up() for rank in started))


async def test_publishers_and_targets_that_die_at_rest_and_in_the_midst_of_a_copy() -> None:
    async with processes({"deadline": "20s"}) as (world, start):
        trainer, first, slow = await asyncio.gather(
            start("trainer"), start("rollout", 0), start("rollout", 1, FAKE_DELAY_S="1.5")
        )
        channel = world.coordinator.engine.channels["policy"]
        await wait_until(lambda: len(channel.roster.targets) == 2, "both targets are live")

        def copying(name: str) -> bool:
            maps = [
                one.member.name
                for transfer in channel.commits.transfers
                for one in transfer.attempt.of("offered", "taking")
                if one.way == "map"
            ]
            return name in maps

        trainer.tell("publish", value=1)
        await wait_until(lambda: copying("rollout/1/0"), "the slow one copies")
        await slow.kill()
        answer = await trainer.answer()
        assert (answer["version"], answer["lost"]) == (1, ["rollout/1/0"])
        assert "hold" in answer["phases"]
        assert await first.ask("load_until", version=1) == [1]
        assert (await trainer.ask("publish_many", first=2, count=3)) == 4, "its slots are free again"

        assert fake_memory_nbytes(trainer.pid) >= IMAGE_NBYTES
        await trainer.kill()
        assert fake_memory_nbytes(trainer.pid) == 0
        assert (await first.ask("load_until", version=4))[-1] == 4
        trainer, slow = await asyncio.gather(start("trainer"), start("rollout", 2, FAKE_DELAY_S="1.5"))
        assert await slow.ask("load_until", version=4) == [4], "it has it from another rollout"

        await wait_until(lambda: len(channel.roster.targets) == 2, "the slow one has caught up")
        trainer.tell("publish", value=5)
        await wait_until(lambda: copying("rollout/2/0"), "the slow one copies")
        await trainer.kill()
        await wait_until(lambda: channel.roster.holder_of("trainer/0/0") is None, "the trainer is lost")
        trainer = await start("trainer")
        version = (await trainer.ask("publish", value=6))["version"]
        for rollout in (first, slow):
            assert (await rollout.ask("load_until", version=version))[-1] == version
        assert lanes(world) == []

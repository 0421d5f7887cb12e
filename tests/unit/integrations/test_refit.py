"""Syncs of a checkpoint engine over a channel: seats, numbers, and what breaks off.

Covers: integrations/shared/refit.py, integrations/shared/releases.py,
integrations/nemo.py.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.core.members.roster import PROBATION
from replicas.core.versions.recovery import RECOVERY_S
from replicas.integrations import sglang, vllm
from replicas.integrations.nemo import CheckpointEngine
from replicas.integrations.shared import refit, releases
from replicas.integrations.shared.refit import CoordinatorAddress, Refit, Seat, channel_settings, first_sync, seats
from replicas.testing import FakeRun
from tests.support.waits import eventually

SIZE = 100


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "_BEAT_S", 0.01)


@pytest.fixture
def run() -> Iterator[FakeRun]:
    with FakeRun({"policy": {"sources": [{"group": "trainer"}], "targets": ["rollout"]}}) as run:
        yield run


def weights(value: float, count: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    return ((f"layer{number}", torch.full((SIZE,), value)) for number in range(count))


class World:
    """A manager, with trainers and rollout workers of one run."""

    def __init__(self, run: FakeRun, trainers: list[Refit], rollouts: list[Refit]) -> None:
        self.place = CoordinatorAddress(run.endpoint, run.token, "")
        self.trainers, self.rollouts = trainers, rollouts

    def begin(self) -> None:
        workers = [*self.trainers, *self.rollouts]
        metadata = [worker.prepare() for worker in workers]
        for worker, seat in zip(workers, seats(metadata, len(self.trainers)), strict=True):
            worker.init_process_group(seat=seat, place=self.place, sync=first_sync(metadata))

    def close(self) -> None:
        for worker in (*self.trainers, *self.rollouts):
            worker.close()


@pytest.fixture
def world(run: FakeRun) -> Iterator[World]:
    world = World(run, [Refit(deadline=20)], [Refit(deadline=20), Refit(deadline=20)])
    world.begin()
    yield world
    world.close()


async def take(worker: Refit) -> dict[str, float]:
    return {name: float(tensor.mean()) async for name, tensor in worker.receive_weights()}


def metadata(seat: Seat | None = None, **more: Any) -> dict[str, Any]:
    return {**Refit().prepare(), "seat": seat, **more}


def test_workers_keep_their_seats_and_new_ones_take_free_ones() -> None:
    workers = [metadata(), metadata(), metadata(Seat("rollout", 2)), metadata(), metadata(Seat("rollout", 0))]
    assert seats(workers, 2) == [
        Seat("trainer", 0),
        Seat("trainer", -1),
        Seat("rollout", 2),
        Seat("rollout", 1),
        Seat("rollout", 0),
    ]


def test_two_workers_do_not_keep_one_seat() -> None:
    twice = [metadata(), *[metadata(Seat("rollout", 0))] * 2]
    assert [seat.replica for seat in seats(twice, 1)[1:]] == [0, 1]


def test_all_trainers_are_ranks_of_one_source() -> None:
    workers = [metadata(ranks="all") for _ in range(2)] + [metadata()]
    assert seats(workers, 2)[:2] == [Seat("trainer", 0, 0, 2), Seat("trainer", 0, 1, 2)]


def test_the_first_trainer_says_what_channel_is_made() -> None:
    worker = Refit(channel="weights", ranks="all", options={"slots": 3})
    source = {"group": "trainer", "ranks": "all"}
    assert channel_settings([worker.prepare(), metadata()]) == {
        "weights": {"sources": [source], "targets": ["rollout"], "slots": 3}
    }


def test_a_worker_is_handed_each_name_of_a_tied_tensor(world: World) -> None:
    tied: Any = dict.fromkeys(("head", "embed"), torch.ones(SIZE))

    async def sync() -> list[Any]:
        return await asyncio.gather(world.trainers[0].send_weights(tied), *map(take, world.rollouts))

    assert asyncio.run(sync())[1:] == [{"head": 1.0, "embed": 1.0}] * 2


def test_a_sync_reaches_all_rollouts_and_counts_as_loaded_at_its_end(world: World) -> None:
    async def sync(value: float) -> list[Any]:
        return await asyncio.gather(world.trainers[0].send_weights(weights(value), 7), *map(take, world.rollouts))

    for number in (1, 2):
        world.begin()
        figures, *taken = asyncio.run(sync(float(number)))
        assert figures["replicas/version"] == number
        assert taken == [dict.fromkeys(("layer0", "layer1", "layer2"), float(number))] * 2
        assert [worker.channel.version for worker in world.rollouts if worker.channel is not None] == [number - 1] * 2
        for worker in (*world.trainers, *world.rollouts):
            worker.finalize()
        assert [worker.channel.version for worker in world.rollouts if worker.channel is not None] == [number] * 2


def test_a_version_of_a_sync_that_broke_off_is_not_taken_for_the_next(world: World) -> None:
    async def scene() -> dict[str, float]:
        await world.trainers[0].send_weights(weights(1.0))  # committed, and nobody has received it
        world.begin()
        taking = asyncio.create_task(take(world.rollouts[0]))
        await asyncio.sleep(0)
        await world.trainers[0].send_weights(weights(2.0))
        return await taking

    assert set(asyncio.run(scene()).values()) == {2.0}


def test_a_receive_under_way_ends_when_the_next_sync_begins(world: World) -> None:
    async def scene() -> None:
        taking = asyncio.create_task(take(world.rollouts[0]))
        await asyncio.sleep(0)
        world.begin()
        with pytest.raises(errors.ReplicasError, match=r"broken off|another bound|replaced"):
            await taking
        await world.trainers[0].send_weights(weights(3.0))
        assert set((await take(world.rollouts[0])).values()) == {3.0}

    asyncio.run(scene())


def test_an_update_that_was_not_finalized_counts_as_failed(world: World) -> None:
    asyncio.run(world.trainers[0].send_weights(weights(1.0)))
    asyncio.run(take(world.rollouts[0]))
    world.begin()
    channel = world.rollouts[0].channel
    assert channel is not None
    assert channel.version == 0


def test_a_load_that_fails_half_way_counts_as_failed(world: World) -> None:
    async def load() -> None:
        received = world.rollouts[0].receive_weights()
        async for _ in received:
            break
        await received.aclose()  # type: ignore[attr-defined]  # an async generator

    asyncio.run(world.trainers[0].send_weights(weights(1.0)))
    asyncio.run(load())
    world.rollouts[0].finalize()
    channel = world.rollouts[0].channel
    assert channel is not None
    assert channel.version == 0


def test_a_rollout_without_a_trainer_gives_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "ALONE_S", 0.0)
    world.trainers[0].close()
    with pytest.raises(errors.SyncError, match="no trainer has joined channel 'policy'"):
        asyncio.run(take(world.rollouts[0]))


def test_a_trainer_that_lives_is_no_member_for_less_than_a_rollout_waits() -> None:
    assert PROBATION.max_s + RECOVERY_S < refit.ALONE_S


def test_a_worker_that_is_new_says_that_a_sync_must_begin_first() -> None:
    walked: list[str] = []
    feed = ((walked.append(name) or name, tensor) for name, tensor in weights(1.0))  # type: ignore[func-returns-value]  # None
    with pytest.raises(errors.UsageError, match="send_weights: this worker has not joined"):
        asyncio.run(Refit().send_weights(feed))
    assert len(walked) == 3, "the gathers of other trainers need it"
    with pytest.raises(errors.UsageError, match="receive_weights: this worker has not joined"):
        asyncio.run(take(Refit()))


def test_other_trainers_walk_and_publish_nothing(run: FakeRun) -> None:
    world = World(run, [Refit(), Refit()], [Refit()])
    world.begin()
    walk = weights(1.0)
    assert asyncio.run(world.trainers[1].send_weights(walk)) == {}
    assert next(walk, None) is None
    world.close()


@pytest.mark.slow
def test_trainers_share_the_tensors() -> None:
    with FakeRun({"policy": {"sources": [{"group": "trainer", "ranks": "all"}], "targets": ["rollout"]}}) as run:
        world = World(run, [Refit(ranks="all", dtype="float16"), Refit(ranks="all", dtype="float16")], [Refit()])
        world.begin()

        async def scene() -> dict[str, float]:
            sent = [asyncio.to_thread(asyncio.run, one.send_weights(weights(4.0, 5))) for one in world.trainers]
            return (await asyncio.gather(*sent, take(world.rollouts[0])))[-1]

        assert asyncio.run(scene()) == dict.fromkeys((f"layer{number}" for number in range(5)), 4.0)
        world.close()


@pytest.mark.slow
def test_a_share_of_the_next_sync_is_not_taken_for_that_of_a_lost_trainer() -> None:
    with FakeRun({"policy": {"sources": [{"group": "trainer", "ranks": "all"}], "targets": ["rollout"]}}) as run:
        world = World(run, [Refit(ranks="all"), Refit(ranks="all")], [Refit()])
        world.begin()

        async def send(worker: Refit, value: float) -> dict[str, float]:
            return await asyncio.to_thread(asyncio.run, worker.send_weights(weights(value, 5)))

        async def scene() -> dict[str, float]:
            waits = asyncio.create_task(send(world.trainers[0], 2.0))
            await asyncio.to_thread(eventually, lambda: world.trainers[0]._sending, "the publish")
            lost = world.trainers[1].channel
            assert lost is not None
            run.kill(lost)
            world.trainers[1] = Refit(ranks="all")
            world.begin()
            with pytest.raises(errors.ReplicasError):
                await waits
            sent = [send(worker, 3.0) for worker in world.trainers]
            return (await asyncio.gather(*sent, take(world.rollouts[0])))[-1]

        assert asyncio.run(scene()) == dict.fromkeys((f"layer{number}" for number in range(5)), 3.0)
        world.close()


@pytest.mark.parametrize("wrong", [{"ranks": "each"}, {"dtype": "bf16"}, {"dtype": 3}])
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.UsageError, match=next(str(value) for value in wrong.values())):
        Refit(**wrong)


class NemoWorld:
    """NeMo-RL's synchronizer: one ``prepare`` for many refits."""

    def __init__(self, policies: list[CheckpointEngine], rollouts: list[CheckpointEngine]) -> None:
        self.policies, self.rollouts = policies, rollouts
        self.begin()

    def begin(self) -> None:
        found = [{**worker.prepare(), "rank": rank} for rank, worker in enumerate(self.policies)]
        found += [worker.prepare() for worker in self.rollouts]
        sizes = {"train_world_size": len(self.policies), "rollout_world_size": len(self.rollouts)}
        for rank, worker in enumerate(self.policies):
            worker.init_policy_process_group(worker_rank=rank, metadata=found, **sizes)
        for rank, worker in enumerate(self.rollouts):
            worker.init_rollout_process_group(rollout_rank=rank, metadata=found, **sizes)

    async def refit(self, value: float) -> list[list[list[float]]]:
        taken = asyncio.gather(*map(batches, self.rollouts))
        await asyncio.gather(*(policy.send_weights(weights(value)) for policy in self.policies))
        return await taken


async def batches(worker: CheckpointEngine) -> list[list[float]]:
    return [[float(tensor.mean()) for _, tensor in batch] async for batch in worker.receive_weight_batches()]


def test_refits_of_nemo_rl(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in run.environ("trainer").items():
        monkeypatch.setenv(name, value)
    two = 2 * SIZE * 4
    made = [CheckpointEngine(two, release_after_refit=False, deadline=20) for _ in range(3)]
    world = NemoWorld(made[:1], made[1:])
    for number in (1.0, 2.0):
        assert asyncio.run(world.refit(number)) == [[[number, number], [number]]] * 2
    reborn = CheckpointEngine(two, deadline=20)
    world.rollouts[0]._refit.close()
    world.rollouts[0] = reborn
    with pytest.raises(errors.UsageError, match="has not joined"):
        asyncio.run(batches(reborn))
    world.begin()
    assert asyncio.run(world.refit(3.0)) == [[[3.0, 3.0], [3.0]]] * 2
    for worker in (*world.policies, *world.rollouts):
        worker.finalize()
        worker._refit.close()


def test_nemo_rl_without_a_coordinator_is_told_so() -> None:
    worker = CheckpointEngine(1)
    found = [worker.prepare()]
    with pytest.raises(errors.UsageError, match="no coordinator: policy worker 0"):
        worker.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=0, metadata=found)


@pytest.mark.parametrize(
    ("release", "wanted", "out"),
    [
        ("0.9.1", ">=0.9,<0.10", False),
        ("0.9", ">=0.9.0,<0.10", False),
        ("0.10.0", ">=0.9,<0.10", True),
        ("0.8.9.post1", ">=0.9", True),
        ("0.9.1+cpu", "<0.10,>=0.9", False),
        ("unknown", ">=0.9", False),
        ("1.0", "", False),
    ],
)
def test_releases_and_ranges(release: str, wanted: str, out: bool) -> None:
    assert releases.outside(release, wanted) is out


def test_a_release_outside_of_its_extra_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ['verl<0.10,>=0.9; extra == "verl"', 'ray[default]<3,>=2.41; extra == "ray"', "torch>=2.10"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(errors.UsageError, match=r"verl 0\.8\.0 .*verl<0\.10,>=0\.9.*\n?.*torch-replicas\[verl\]"):
        releases.check("verl")
    with pytest.raises(errors.UsageError, match=r"ray<3,>=2\.41"):
        releases.check("ray")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.1")
    releases.check("verl")
    releases.check("torch")  # no extra


@pytest.mark.parametrize("serve", [vllm.main, sglang.main])
def test_a_server_of_a_release_outside_is_not_started(
    serve: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requirements = [f'{name}>=0.29; extra == "{name}"' for name in ("vllm", "sglang")]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.1")
    assert serve(["serve", "model"]) == 1
    assert " 0.5.1 is installed, and this integration is written for " in capsys.readouterr().err


def test_what_is_not_installed_is_in_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    releases.check("no-such-distribution")

"""Bare iterators, of which nothing is known beforehand: their first version is staged
once, and is as any other; on all ranks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch
from safetensors.torch import load_file

from replicas import errors
from replicas.channel.versions import filling
from replicas.coordinator import GroupShape
from replicas.weights.feed import Feed
from replicas.weights.memory import buffers
from replicas.weights.packing import Staged, stage
from tests.support.channel.memory import statistics
from tests.support.channels import channel_world, publish

pytestmark = pytest.mark.anyio

COUNT = 64


def tensor_of(number: int) -> torch.Tensor:
    return torch.full((512, 1024), number, dtype=torch.bfloat16)


def stream(look: Callable[[int], object] = id) -> Iterator[tuple[str, torch.Tensor]]:
    """64 MiB in matrices that are there one at a time, and a few numbers of another
    size. ``look``: told how many came."""
    for number in range(COUNT):
        yield f"layers.{number}.weight", tensor_of(number)
        yield f"layers.{number}.scale", torch.tensor([float(number)])
        look(number + 1)


async def test_a_bare_iterator_is_staged_once_and_ends_as_any_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    stagings: list[Feed] = []

    def staging(feed: Feed) -> Staged:
        stagings.append(feed)
        return stage(feed)

    monkeypatch.setattr(filling, "stage", staging)
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        first = await publish(trainer, stream())
        with await rollout.receive() as update:
            found = load_file(update.path)
            assert all(torch.equal(found[name], tensor) for name, tensor in stream())
            del found
        assert (await publish(trainer, dict(stream()))).nbytes == first.nbytes  # else the manifest had changed
        assert (await publish(trainer, stream())).nbytes == first.nbytes
        assert len(stagings) == 1  # the second one goes where the first one went
        again = await publish(trainer, stream(), new_manifest=True)
        assert again.nbytes == first.nbytes
        assert len(stagings) == 2
        with await rollout.receive() as update:
            assert update.version == again.version
            assert all(
                torch.equal(tensor, tensor_of(int(name.split(".")[1]))) for name, tensor in update if "we" in name
            )


@pytest.mark.parametrize("ranks", ["leader", "all"])
async def test_no_memory_for_it_is_the_same_error_on_all_ranks(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"sources": [{"group": "trainer", "ranks": ranks}]}
    async with channel_world(config, trainer=GroupShape(1, 2)) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        poor = trainers[0]._hub.arena
        monkeypatch.setattr(poor.pool, "_name", "poor")

        def check_capacity(nbytes: int, what: str) -> None:
            if "'poor" in what:
                raise errors.NoCapacity(f"{what} needs {nbytes} bytes, but the machine's memory leaves none")

        monkeypatch.setattr(buffers, "check_capacity", check_capacity)
        walked: list[int] = []
        tasks = [asyncio.create_task(publish(trainer, stream(walked.append))) for trainer in trainers]
        for task in tasks:
            with pytest.raises(errors.NoCapacity, match=r"'poor.* leaves none") as caught:
                await task
            assert caught.value.unanimous
        assert walked.count(COUNT) == 2
        assert [slot.state for slot in poor.slots] == ["free"] * len(poor.slots)
        assert statistics(poor).nbytes == 0
        monkeypatch.undo()
        receipts = await asyncio.gather(*(publish(trainer, stream()) for trainer in trainers))
        assert {receipt.version for receipt in receipts} == {2}

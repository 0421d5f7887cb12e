"""Bare iterators, of which nothing is known beforehand, are written once, into memory that grows; on all ranks alike."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from replicas import errors
from replicas.channel import Channel, Receipt
from replicas.coordinator import GroupShape
from replicas.weights import growing
from replicas.weights.arena import Arena
from tests.support.channels import channel_world
from tests.support.memfds import memories

pytestmark = pytest.mark.anyio

MIB = 1 << 20
COUNT = 64


def tensor_of(number: int) -> torch.Tensor:
    return torch.full((512, 1024), number, dtype=torch.bfloat16)


def stream(look: Callable[[int], object] = id) -> Iterator[tuple[str, torch.Tensor]]:
    """64 MiB in matrices that are there one at a time, and a few numbers of another size. ``look``: told how many came."""
    for number in range(COUNT):
        yield f"layers.{number}.weight", tensor_of(number)
        yield f"layers.{number}.scale", torch.tensor([float(number)])
        look(number + 1)


async def publish(channel: Channel, given: object, **options: Any) -> Receipt:
    return await (await asyncio.to_thread(channel.publish, given, **options))


def own_nbytes() -> int:
    """What this process has to itself, files in memory left out."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def shared_nbytes() -> int:
    """Pages of all memory of channels that this process has open."""
    wanted = memories(os.getpid(), "replicas-policy").keys()
    sizes: dict[int, int] = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            status = link.stat()
        except FileNotFoundError:  # closed meanwhile
            continue
        if status.st_ino in wanted:
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


async def test_a_bare_iterator_is_in_memory_once_and_ends_as_any_other_version() -> None:
    async with channel_world() as world:
        trainer, rollout = await world.trainer_and_rollouts()
        own = own_nbytes()
        seen: list[tuple[int, int, int]] = []
        first = await publish(trainer, stream(lambda n: seen.append((n, own_nbytes() - own, shared_nbytes()))))
        for count, private, shared in seen:
            assert private < COUNT * MIB // 2
            assert shared >= count * MIB
            assert shared <= count * MIB + growing.STEP_NBYTES + 2 * MIB
        with await rollout.receive() as update:
            found = load_file(update.path)
            assert all(torch.equal(found[name], tensor) for name, tensor in stream())
            del found
        assert (await publish(trainer, dict(stream()))).nbytes == first.nbytes  # else the manifest had changed
        again = await publish(trainer, stream(), new_manifest=True)
        assert again.nbytes == first.nbytes
        with await rollout.receive() as update:
            assert update.version == again.version
            assert all(
                torch.equal(tensor, tensor_of(int(name.split(".")[1]))) for name, tensor in update if "we" in name
            )


@pytest.mark.parametrize("ranks", ["leader", "all"])
async def test_no_memory_in_the_middle_is_the_same_error_on_all_ranks(
    ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"sources": [{"group": "trainer", "ranks": ranks}]}
    async with channel_world(config, trainer=GroupShape(1, 2)) as world:
        trainers = [await world.join("trainer", 0, rank, 2) for rank in range(2)]
        poor = trainers[0]._hub.arena
        begin = Arena.growing

        def begin_poor(self: Arena, *args: Any) -> growing.Growing:
            memory = begin(self, *args)
            memory._name = "poor" if self is poor else memory._name
            return memory

        def check_capacity(nbytes: int, what: str) -> None:
            if "'poor'" in what and "has 0 bytes" not in what:
                raise errors.NoCapacity(f"{what} needs {nbytes} bytes, but the machine's memory leaves none")

        monkeypatch.setattr(Arena, "growing", begin_poor)
        monkeypatch.setattr(growing, "check_capacity", check_capacity)
        walked: list[int] = []
        tasks = [asyncio.create_task(publish(trainer, stream(walked.append))) for trainer in trainers]
        for task in tasks:
            with pytest.raises(errors.NoCapacity, match=r"'poor', which grows .* leaves none") as caught:
                await task
            assert caught.value.unanimous
        assert walked.count(COUNT) == 2
        assert [slot.state for slot in poor.slots] == ["free"] * len(poor.slots)
        assert poor.statistics().nbytes == 0
        monkeypatch.undo()
        receipts = await asyncio.gather(*(publish(trainer, stream()) for trainer in trainers))
        assert {receipt.version for receipt in receipts} == {2}

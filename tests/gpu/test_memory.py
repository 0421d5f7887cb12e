"""Memory of a GPU that is freed, swapped or not there when it is to be copied: the
tensor is named, the CUDA context goes on, and so does the channel."""

from __future__ import annotations

import pytest

from tests.gpu.gpu_rank import GpuRank, gpu_world
from tests.gpu.test_staging import STAGINGS, send, trainer_and_rollout

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

WHY = {
    "free": "has no memory: its storage was freed",
    "fake": "is a FakeTensor without memory",
    "half": "was torch.float",
}


async def refused(rank: GpuRank, error: str, name: str, why: str, call: str, **how: object) -> None:
    said = await rank.ask(call, **how)
    assert isinstance(said, dict), said
    assert said.get("error") == error, said
    assert name in said["text"], said
    assert why in said["text"], said


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_publish_names_what_has_no_memory_also_when_it_goes_while_it_waits(staging: str) -> None:
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world)
        await send(trainer, rollout, 1.0)
        for name in ("w", "on the host"):
            for how in ("free", "fake"):
                await trainer.ask("spoil", which=name, how=how)
                await refused(trainer, "ManifestMismatch", repr(name), WHY[how], "publish_spoiled", which=name, how="")
                await trainer.ask("spoil", which=name, how="mend")
        for how in ("free", "half"):
            await refused(trainer, "ManifestMismatch", "'w'", WHY[how], "publish_spoiled", which="w", how=how)
            await trainer.ask("spoil", which="w", how="mend")
        await send(trainer, rollout, 7.0)
        rollout.tell("load")
        assert await trainer.ask("publish_spoiled", which="w", how="swap") is True
        assert (await rollout.answer())["values"] == [7.0]
        assert await trainer.ask("go_on")


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_load_leaves_the_weights_as_they_are(staging: str) -> None:
    async with gpu_world({"staging": staging}, rollout=1) as world:
        trainer, rollout = await trainer_and_rollout(world)
        await send(trainer, rollout, 1.0)
        for value, name, how in ((2.0, "w", "free"), (3.0, "on the host", "fake"), (4.0, "on the host", "free")):
            await rollout.ask("spoil", which=name, how=how)
            trainer.tell("publish", value=value)
            await refused(rollout, "ManifestMismatch", repr(name), WHY[how], "load")
            await trainer.answer()
            await rollout.ask("spoil", which=name, how="mend")
            assert set(await rollout.ask("values")) <= {0.0, 1.0}
            await rollout.ask("write", value=1.0)
        assert (await rollout.ask("load"))["values"] == [4.0]
        assert await rollout.ask("go_on")


@pytest.mark.parametrize("staging", STAGINGS)
async def test_a_collective_names_what_was_freed(staging: str) -> None:
    async with gpu_world({"peers": ["peer"], "staging": staging}, peer=1) as world:
        peer = await world.start("peer")
        await refused(peer, "UsageError", "tensor 0", WHY["free"], "reduce_freed")
        assert await peer.ask("go_on")

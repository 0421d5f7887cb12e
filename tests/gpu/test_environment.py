"""Environments in which a GPU cannot be shared, or only in another way: found at the
join, with what to do."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from tests.gpu.card import REAL, environment, uuid
from tests.gpu.gpu_rank import JoinRefused, gpu_world
from tests.support.sidecars import start_forkserver

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DEVICE = {"staging": "device"}
UNSEEN = "CUDA_VISIBLE_DEVICES" if REAL else "FAKE_GPUS"


async def test_expandable_segments_change_nothing() -> None:
    how = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    async with gpu_world(DEVICE, rollout=1) as world:
        trainer, rollout = await asyncio.gather(
            world.start("trainer", environment=how), world.start("rollout", environment=how)
        )
        for value in (1.0, 2.0, 3.0):
            _, got = await asyncio.gather(trainer.ask("publish", value=value), rollout.ask("load"))
            assert got["values"] == [value]
    async with gpu_world(DEVICE | {"transport": "group"}, rollout=1) as world:
        trainer, rollout = await asyncio.gather(
            world.start("trainer", environment=how), world.start("rollout", environment=how)
        )
        _, got = await asyncio.gather(trainer.ask("publish", value=4.0), rollout.ask("load"))
        assert got["values"] == [4.0]


async def test_one_gpu_by_two_names() -> None:
    """One process knows it by its number, the other by its UUID."""
    names = ("0", uuid()) if REAL else (f"{uuid()},FAKE-OTHER", uuid())
    async with gpu_world(DEVICE, rollout=1) as world:
        trainer, rollout = await asyncio.gather(
            world.start("trainer", environment={UNSEEN: names[0]}),
            world.start("rollout", environment={UNSEEN: names[1]}),
        )
        _, got = await asyncio.gather(trainer.ask("publish", value=1.0), rollout.ask("load"))
        assert got["values"] == [1.0]
        assert world.lanes() == []


async def test_device_staging_without_a_gpu_is_refused_at_the_join() -> None:
    async with gpu_world(DEVICE, rollout=1) as world:
        with pytest.raises(JoinRefused, match="CUDA_VISIBLE_DEVICES") as caught:
            await world.start("trainer", environment={UNSEEN: ""})
        assert caught.value.kind == "Preflight"
        assert 'staging = "host"' in caught.value.text


async def test_sidecars_use_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver was started where another GPU is visible, or none."""
    name = f"replicas-test-{secrets.token_hex(8)}"
    monkeypatch.setenv(UNSEEN, "" if REAL else "FAKE-OTHER")
    forkserver = start_forkserver(name)
    monkeypatch.undo()
    for key, value in {**environment(), "REPLICAS_FORKSERVER": name}.items():
        monkeypatch.setenv(key, value)
    try:
        async with gpu_world(DEVICE | {"transport": "group"}, rollout=1) as world:
            trainer, rollout = await world.start_all(("trainer", 0), ("rollout", 0))
            _, got = await asyncio.gather(trainer.ask("publish", value=1.0), rollout.ask("load"))
            assert got["values"] == [1.0]
    finally:
        forkserver.kill()
        forkserver.communicate()


@pytest.mark.skipif(REAL, reason="needs a container that forbids CUDA IPC; the fake can forbid it")
async def test_a_container_that_forbids_ipc_is_found_at_the_join() -> None:
    async with gpu_world(DEVICE, rollout=1) as world:
        with pytest.raises(JoinRefused, match="IPC") as caught:
            await world.start("trainer", environment={"FAKE_FAULTS": "ipc", "REPLICAS_FORKSERVER": ""})
        assert caught.value.kind == "Preflight"
        assert 'staging = "host"' in caught.value.text

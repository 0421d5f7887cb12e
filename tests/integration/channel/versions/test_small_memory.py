"""A target whose memory is too small for a version: said at the offer, with numbers,
before anything breaks, and it counts as lost.

Where it maps the version it needs none.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import replicas
from tests.support.channels import channel_world
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

LIMIT_NBYTES = 640 << 20  # torch alone takes some 250 MiB
SMALL_NBYTES = 1 << 20
LARGE_NBYTES = 768 << 20

TARGET = """
import os, sys
with open(sys.argv[3], "w") as file:
    file.write(str(os.getpid()))
import replicas
where = {"endpoint": sys.argv[1], "token": sys.argv[2], "group": "rollout", "replica": 0, "rank": 0, "world_size": 1}
with replicas.join("policy", **where) as channel:
    while True:
        with channel.receive().wait(100) as update:
            (tensor,) = dict(update).values()
            assert not tensor.any()
            print(update.version, flush=True)
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit; its ``cgroup.procs`` takes processes."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()  # version 1
    folder = (root / "memory" if first else root) / f"replicas-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a cgroup cannot be made here: {error}")
    try:
        (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(LIMIT_NBYTES))
    except OSError as error:
        pytest.skip(f"a memory limit cannot be set here: {error}")
    else:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.parametrize("transport", ["group", "auto"])
async def test_a_version_that_does_not_fit_a_target_breaks_nothing(cgroup: Path, transport: str) -> None:
    async with channel_world({"deadline": "60s", "transport": transport}, rollout=1) as world:
        trainer = await world.join("trainer")
        target = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", TARGET, world.coordinator.endpoint, world.coordinator.token),
            str(cgroup / "cgroup.procs"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=asyncio.subprocess.PIPE,
        )
        assert target.stdout is not None

        async def receipt(nbytes: int) -> replicas.Receipt:
            weights = {"w": torch.zeros(nbytes, dtype=torch.uint8)}
            return await (await asyncio.to_thread(trainer.publish, weights, new_manifest=True))

        async def publish(nbytes: int) -> int:
            return (await receipt(nbytes)).version

        try:
            await wait_until(lambda: len(trainer.members) == 2, "the target has joined", timeout_s=60)
            assert await publish(SMALL_NBYTES) == int(await target.stdout.readline()) == 1
            if transport == "auto":
                assert await publish(LARGE_NBYTES) == int(await target.stdout.readline()) == 2
            else:
                message = (await receipt(LARGE_NBYTES)).reasons["rollout/0/0"]
                assert message.startswith("the buffer 'replicas-policy-")
                assert "needs 768 MiB" in message
                assert " of cgroup " in message
                assert "leaves " in message
            assert await publish(SMALL_NBYTES) == int(await target.stdout.readline())
            assert target.returncode is None
        finally:
            target.kill()
            await target.communicate()

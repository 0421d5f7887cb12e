"""Nothing piles up in a rank: hundreds of publishes, receives and reconnects leave all
its tables as they were."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sized
from pathlib import Path

import pytest
import torch

from replicas.channel import Channel, Update
from replicas.channel.session.pending import Promise
from replicas.channel.versions.filling import PublishJob
from tests.support.channels import channel_world
from tests.support.machine.proxy import Proxy
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

ROUNDS = 300


def census(*channels: Channel) -> dict[str, int]:
    """What may grow."""
    gc.collect()
    loop = channels[0]._hub.loop
    found = {
        "tasks": len(loop._tasks),
        "connections": len(loop.inherited) + len(loop.fds),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "memory": Path("/proc/self/maps").read_text().count("/memfd:replicas"),
    }
    for kind in (Promise, PublishJob, Update):
        found[kind.__name__] = sum(type(thing) is kind for thing in gc.get_objects())
    for index, channel in enumerate(channels):
        known = channel._hub.held_versions
        tables: dict[str, Sized] = {
            "facts": known._facts,
            "prepared": known.prepared,
            "publishing": known.publishing,
            "doubtful": known.doubtful,
            "jobs": channel._publisher._jobs,
            "transfers": channel._transfers._transfers,
            "manifests": channel._manifests._fetches,
            "lanes": channel._lanes._lanes,
            "watches": channel._watches._watches,
            "failures": channel._hub.failures,
            "outbox": channel._hub.session._outbox,
        }
        found.update({f"{name} of {index}": len(table) for name, table in tables.items()})
    return found


@pytest.mark.timeout(300)
async def test_hundreds_of_versions_and_reconnects_leave_a_rank_as_it_was() -> None:
    async with channel_world() as world, Proxy(world.endpoint) as proxy:
        world.endpoint = proxy.endpoint
        trainer, rollout = await world.trainer_and_rollouts(1)
        early: dict[str, int] = {}
        for step in range(1, ROUNDS + 1):
            await (await asyncio.to_thread(trainer.publish, {"w": torch.full((64,), float(step))}))
            with await rollout.receive() as update:
                assert next(iter(update))[1][0] == step
            assert await trainer.loaded(step) == step
            if step % 30 == 0:
                proxy.cut()
            if step == ROUNDS // 5:
                early = await quiet(trainer, rollout)
        late = await quiet(trainer, rollout)
        grown = {name: (early[name], count) for name, count in late.items() if count > early[name] + SLACK.get(name, 0)}
        assert not grown
        assert len(trainer._hub.loop.loop._scheduled) < 200  # type: ignore[attr-defined]  # the heap of asyncio's timers


SLACK = {"threads": 8, "tasks": 3, "descriptors": 4, "connections": 2}
"""Of pools that fill up as they are used, and of connections that are just being
made."""


async def quiet(*channels: Channel) -> dict[str, int]:
    """The census, once everybody is connected and everything was acknowledged."""
    sessions = [channel._hub.session for channel in channels]
    await wait_until(lambda: all(s.connected and not s._outbox for s in sessions), "everything is acknowledged")
    return census(*channels)

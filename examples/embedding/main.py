"""A program that starts its own processes embeds only the coordinator, and passes them
the address and the token.

    python examples/embedding/main.py

One asyncio program starts one trainer and two rollouts: there is no supervisor and no
config file. It writes the events to a file, of which `replicas report .` makes a page.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

ROLLOUTS = 2
VERSIONS = 3


def join(channel: str, group: str, replica: int):  # type: ignore[no-untyped-def]  # torch must not load in the parent
    import replicas

    return replicas.join(
        channel,
        endpoint=os.environ["MY_ENDPOINT"],
        token=os.environ["MY_TOKEN"],
        group=group,
        replica=replica,
        rank=0,
        world_size=1,
    )


def trainer() -> None:
    import torch

    with join("policy", "trainer", 0) as channel:
        for version in range(1, VERSIONS + 1):
            weights = {"layer": torch.full((1000,), float(version)), "scale": torch.tensor(version)}
            receipt = channel.publish(weights, meta={"value": version}).wait(60)
            assert receipt.version == version
            if version < VERSIONS:
                channel.loaded(version).wait(60)  # synchronous RL: every rollout serves it before we go on


def rollout(replica: int) -> None:
    import torch

    model = torch.nn.ParameterDict({"layer": torch.zeros(1000), "scale": torch.tensor(0.0)})
    with join("policy", "rollout", replica) as channel:
        while channel.version < VERSIONS:
            with channel.receive().wait(60) as update:
                tensors = dict(update)
                assert tensors["layer"].sum().item() == 1000 * update.version == 1000 * update.meta["value"]
                with torch.no_grad():
                    model["layer"].copy_(tensors["layer"])
    print(f"rollout {replica} serves version {update.version}", flush=True)


async def start(endpoint: str, token: str, role: str, replica: int) -> int:
    """Run one worker to its end; return its exit code."""
    environment = {**os.environ, "MY_ENDPOINT": endpoint, "MY_TOKEN": token}
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, role, str(replica), env=environment)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def main() -> int:
    from replicas import Coordinator
    from replicas.coordinator import Event
    from replicas.telemetry.event_log import EventLog

    channels = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
    async with Coordinator(channels, groups={"trainer": 1, "rollout": ROLLOUTS}) as coordinator, asyncio.timeout(150):
        everybody = asyncio.Event()
        events = EventLog(Path("events.jsonl"))

        def look(event: Event) -> None:
            events.emit(event)
            (policy,) = coordinator.channel_statuses()
            if sum(member.state == "live" for member in policy.members) == ROLLOUTS:
                everybody.set()

        coordinator.subscribe(look)
        where = (coordinator.endpoint, coordinator.token)
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(start(*where, "rollout", replica)) for replica in range(ROLLOUTS)]
            await everybody.wait()  # so that each of them sees every version
            workers.append(tasks.create_task(start(*where, "trainer", 0)))
        (status,) = coordinator.channel_statuses()
    events.close()
    codes = [worker.result() for worker in workers]
    print(f"RESULT version {status.committed_version} committed, {status.bytes_total} bytes moved, exit codes {codes}")
    return 0 if not any(codes) and status.committed_version == VERSIONS else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(asyncio.run(main()))
    elif sys.argv[1] == "trainer":
        trainer()
    else:
        rollout(int(sys.argv[2]))

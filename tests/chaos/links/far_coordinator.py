"""The coordinator of a :mod:`tests.chaos.links.far_world`, on one of its hosts, and
what shows of it.

Run as a program with the JSON of its settings. It prints a line when it serves, appends
each event of its channels to ``events.jsonl``, and answers each line that it reads with
what it says of its members. At the end of its input it stops.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from replicas.coordinator import Coordinator, GroupShape
from replicas.core.base.effects import Event

__all__ = ["PORT"]

PORT = 7077
TOKEN = "secret"


def _status(coordinator: Coordinator) -> dict[str, Any]:
    channels = {
        one.name: {
            "members": {member.name: {"state": member.state, "note": member.note} for member in one.members},
            "committed": one.committed_version,
            "epoch": one.epoch,
            "syncs": one.syncs,
        }
        for one in coordinator.channel_statuses()
    }
    store = coordinator.store_status()
    return {"channels": channels, "keys": store.keys, "up": store.up, "refused": coordinator.refused()}


async def _serve(given: dict[str, Any]) -> None:
    out = Path(given["out"])
    shapes = {name: GroupShape(size, 1, given["lease_s"]) for name, size in given["groups"].items()}
    coordinator = Coordinator(
        given["channels"],
        groups=shapes,
        host=given["host"],
        port=PORT,
        store_bind=given["host"],
        token=TOKEN,
        state_dir=out,
    )
    coordinator.keep_decisions = True
    with (out / "events.jsonl").open("a", buffering=1) as file:

        def note(event: Event) -> None:
            line = {"at": time.monotonic(), "event": type(event).__name__, **msgspec.to_builtins(event)}
            file.write(json.dumps(line) + "\n")

        coordinator.subscribe(note)
        async with coordinator:
            (out / "token").write_text(coordinator.token)  # it names the port's key, the same at each start
            print("serves", flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(_status(coordinator)), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))

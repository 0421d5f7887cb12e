"""A trainer and a rollout for runs on clusters, and what they have committed."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROLLOUT", "TRAINER", "commits"]

TRAINER = """
import sys, time, torch, replicas
with replicas.join("policy") as channel:
    for step in range(int(sys.argv[1])):
        receipt = channel.publish({"w": torch.full((1000,), float(step))}, meta={"step": step}).wait()
        print("committed", receipt.version, time.time(), *(one.name for one in receipt.members), flush=True)
        time.sleep(0.1)
"""
ROLLOUT = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            print("loaded", update.version, flush=True)
"""


def commits(folder: Path) -> list[tuple[int, float, list[str]]]:
    """Number, time and members of each version, in the order of their times."""
    lines = [line for path in folder.rglob("trainer/**/rank-0.log") for line in path.read_text().splitlines()]
    words = [line.split() for line in lines if line.startswith("committed ")]
    return sorted(((int(one[1]), float(one[2]), one[3:]) for one in words), key=lambda found: found[1])

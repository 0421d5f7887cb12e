"""A bad step never reaches the fleet: one replica tries each version, and its reward
decides whether the others load it.

python examples/steering/guarded.py
"""

from __future__ import annotations

import torch

import replicas
from replicas.testing import FakeRun

CHANNEL = {
    "policy": {
        "sources": ["trainer"],
        "targets": ["rollout"],
        "follow": "promoted",
        "slots": 4,
        "canary": {"group": "rollout", "promote": "scored", "metric": "reward", "min": 0.5},
    }
}


def serve(channel: replicas.Channel) -> str:
    """Load the version that this replica is given, and report its reward."""
    with channel.receive(deadline=10).wait() as update:
        reward = float(dict(update)["weight"].mean())  # what your environment says
        update.report(reward=reward).wait()
        same = f", which is version {update.content_of} again" if update.content_of else ""
        return f"{channel.member.replica_name} serves version {update.version}{same}: reward {reward:g}"


def main() -> None:
    with FakeRun(CHANNEL) as run:
        trainer, canary, other = run.join("trainer"), run.join("rollout"), run.join("rollout", 1)
        for reward in (0.8, 0.1, 0.9):  # the second step diverges
            trainer.publish({"weight": torch.full((4,), reward)}).wait()
            print(serve(canary))
            if reward < 0.5:
                print(serve(canary))
            print(serve(other))
        for version in run.status("policy").versions:
            if version.rejected:
                print(f"version {version.number} was rejected: {version.rejected}")


if __name__ == "__main__":
    main()

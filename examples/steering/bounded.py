"""A rollout whose batches are at most two steps older than the trainer's weights.

python examples/steering/bounded.py
"""

from __future__ import annotations

import torch

import replicas
from replicas.testing import FakeRun

MOST_BEHIND = 2


def weights_for(channel: replicas.Channel, step: int, model: torch.nn.Module) -> int:
    """Load weights for a batch of this step; wait only if they would be too old.

    :returns: the step of the weights.
    """
    with channel.receive(at_least=("step", step - MOST_BEHIND)).wait() as update:
        update.load_into(model)
        return int(str(update.meta["step"]))


def main() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        for step in range(8):
            if step % 3 == 0:  # the trainer is slower than the rollout
                trainer.publish({"weight": torch.full((1, 2), float(step))}, meta={"step": step}).wait()
            print(f"batch {step} is generated with the weights of step {weights_for(rollout, step, model)}")


if __name__ == "__main__":
    main()

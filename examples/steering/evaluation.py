"""An evaluation holds one version while training goes on, scores it, and lets it go.

python examples/steering/evaluation.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

import replicas
from replicas.testing import FakeRun

CHANNEL = {"policy": {"sources": ["trainer"], "targets": ["rollout", "evaluator"], "slots": 4}}
Measure = Callable[[Mapping[str, torch.Tensor]], float]


def evaluate(channel: replicas.Channel, version: int, measure: Measure) -> float:
    """Return and report the score of one version, whatever is published meanwhile."""
    with channel.versions.hold(version), channel.versions.read(version).wait() as update:
        score = measure(dict(update))
        update.report(accuracy=score).wait()
    return score


def main() -> None:
    with FakeRun(CHANNEL) as run:
        trainer, evaluator = run.join("trainer"), run.join("evaluator")

        def train() -> None:
            step = trainer.latest + 1
            trainer.publish({"weight": torch.full((4,), float(step))}, meta={"step": step}).wait()

        def measure(weights: Mapping[str, torch.Tensor]) -> float:
            for _ in range(5):  # training does not wait for the evaluation
                train()
            return float(weights["weight"].mean())

        train()
        score = evaluate(evaluator, 1, measure)
        kept = {version.number: version.scores for version in run.status("policy").versions}
        print(f"version 1 has the accuracy {score:g}, the newest is version {trainer.latest}")
        print(f"recorded with it: {kept[1]}")


if __name__ == "__main__":
    main()

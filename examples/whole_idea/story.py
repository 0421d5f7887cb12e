"""The whole idea in one process: a version reaches its readers, and survives faults.

    python story.py

A trainer and two rollouts share the channel "policy". `FakeRun` replaces the network
and the coordinator's process; channels and coordinator are those of a real run. The
program prints one line for each event, and asserts it.

The flow of a version: ``publish`` copies the weights -> the coordinator offers them to
all live targets -> each target verifies the bytes -> commit -> ``receive`` returns
them.

Not shown here, because one process cannot: restarts by the supervisor, transfers
between hosts, process groups (see `examples/grpo` and `examples/cluster`).
"""

from __future__ import annotations

import torch

import replicas
from replicas import errors
from replicas.testing import FakeRun

Model = dict[str, torch.Tensor]


def weights(step: int) -> Model:
    """Return the trainer's weights after ``step``: every value is the step."""
    return {"layer.weight": torch.full((4, 2), float(step)), "layer.bias": torch.full((4,), float(step))}


def show(text: str) -> None:
    print(f"- {text}")


class Rollout:
    """A program that generates: a channel, and the model that it serves."""

    def __init__(self, channel: replicas.Channel) -> None:
        self.channel, self.model = channel, weights(0)

    @property
    def name(self) -> str:
        return self.channel.member.name

    def load_newest(self) -> int:
        """Wait for a version newer than the one loaded, load it, return its step."""
        with self.channel.receive().wait(timeout=30) as update:
            update.load_into(self.model)  # leaving the block reports it as loaded
            step = update.meta["step"]
        assert isinstance(step, int)
        return step

    def step_served(self) -> float:
        """Return the step of the weights; fail if they are a mix of two versions."""
        (step,) = {value for one in self.model.values() for value in one.flatten().tolist()}
        return float(step)


def publish(trainer: replicas.Channel, step: int) -> replicas.Receipt:
    """Publish and wait for the commit; a real trainer trains on meanwhile."""
    return trainer.publish(weights(step), meta={"step": step}).wait(timeout=30)


def a_version_reaches_all(trainer: replicas.Channel, rollouts: list[Rollout]) -> None:
    receipt = publish(trainer, 1)
    assert receipt.version == 1
    assert receipt.lost == ()
    for rollout in rollouts:
        assert rollout.load_newest() == 1
        assert rollout.step_served() == 1.0
    show("version 1 is committed after both rollouts have verified it; both serve step 1")


def a_target_dies(run: FakeRun, trainer: replicas.Channel, left: Rollout, dying: Rollout) -> None:
    pending = trainer.publish(weights(2), meta={"step": 2})  # offered to both of them
    run.kill(dying.channel)
    receipt = pending.wait(timeout=30)
    assert receipt.version == 2
    assert left.load_newest() == 2
    show(
        f"{dying.name} is killed while version 2 is published; {left.name} gets version 2, and the trainer its receipt"
    )
    receipt = publish(trainer, 3)
    assert [member.name for member in receipt.members] == [left.name]
    assert left.load_newest() == 3
    show("version 3 is committed without the dead rollout")


def the_dead_member_is_fenced(dead: Rollout) -> None:
    try:
        dead.channel.receive().wait(timeout=30)
    except errors.Fenced as error:
        show(f"calls on the channel of the dead {dead.name} raise {type(error).__name__}")
    else:
        raise AssertionError("a member that was declared dead must not receive")


def the_target_returns(run: FakeRun, trainer: replicas.Channel) -> Rollout:
    """Join again, as the process that a supervisor restarts does."""
    returned = Rollout(run.join("rollout", 1))
    assert returned.load_newest() == 3
    show(f"{returned.name} is back, and its first version is the newest: version 3, from the trainer's slot")
    receipt = publish(trainer, 4)
    assert receipt.lost == ()
    assert returned.load_newest() == 4
    show("version 4 reaches both rollouts")
    return returned


def a_bad_version_is_rejected(trainer: replicas.Channel, rollouts: list[Rollout]) -> None:
    bad = weights(5)
    bad["layer.bias"][2] = float("nan")
    try:
        trainer.publish(bad, meta={"step": 5}, check_finite=True).wait(timeout=30)
    except errors.ManifestMismatch as error:
        show(f"a version with a NaN is rejected: {error.args[0]}")
    else:
        raise AssertionError("a version with a NaN must not be committed")
    receipt = publish(trainer, 6)
    for rollout in rollouts:
        assert rollout.load_newest() == 6
        assert rollout.step_served() == 6.0
    show(f"version {receipt.version} follows; no rollout has seen the rejected version 5")


def main() -> None:
    with FakeRun() as run:
        trainer = run.join("trainer")
        first, second = Rollout(run.join("rollout", 0)), Rollout(run.join("rollout", 1))
        a_version_reaches_all(trainer, [first, second])
        a_target_dies(run, trainer, first, second)
        the_dead_member_is_fenced(second)
        second = the_target_returns(run, trainer)
        assert first.load_newest() == 4
        a_bad_version_is_rejected(trainer, [first, second])


if __name__ == "__main__":
    main()

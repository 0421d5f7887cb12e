"""A user's program: what the README shows, and a bit more, under ``mypy --strict``.

It is not run with this repository on its path: ``make dist`` checks and runs it against
the installed wheel.
"""

from __future__ import annotations

import torch

import replicas
from replicas import errors
from replicas.testing import FakeRun

LIMIT_S = 30.0


def train(channel: replicas.Channel, model: torch.nn.Module, step: int) -> int:
    try:
        receipt = channel.publish(model, dtype=torch.bfloat16, meta={"step": step}).wait(timeout=LIMIT_S)
    except errors.DeadlineExceeded as error:
        raise SystemExit(f"{error}") from error
    lost: tuple[str, ...] = receipt.lost
    assert not lost
    return receipt.version


def roll_out(channel: replicas.Channel, model: torch.nn.Module) -> int:
    with channel.receive().wait(timeout=LIMIT_S) as update:
        update.load_into(model)
        return update.version


def main() -> None:
    source, copy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).to(torch.bfloat16)
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        version = train(trainer, source, step=1)
        assert roll_out(rollout, copy) == version
    assert torch.equal(copy.weight, source.weight.to(torch.bfloat16))
    print(f"version {version} was published and loaded")


if __name__ == "__main__":
    main()

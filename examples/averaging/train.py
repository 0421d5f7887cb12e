"""Two trainers average their progress every few steps: DiLoCo (Douillard et al. 2023,
arXiv:2311.08105), in small.

Each trainer sees only its own half of the inputs. An outer step all-reduces the mean
change of the trainers' parameters since the last one (the outer gradient) and applies
it with Nesterov momentum, the same on each, so that they stay equal.

    python -m replicas.supervisor examples/averaging/run.toml
    cat examples/averaging/.replicas/*/logs/trainer/*/gen-1/rank-0.log
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import replicas

OUTER_STEPS = 40
INNER_STEPS = 10


def data(low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return a curve to fit between ``low`` and ``high``: x and y, both ``(128,
    1)``."""
    x = torch.linspace(low, high, 128)[:, None]
    return x, torch.sin(2 * x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    for _ in range(INNER_STEPS):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()


def main() -> None:
    replica = int(os.environ["REPLICA_ID"])
    torch.manual_seed(0)  # all start equal
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
    shared = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    x, y = data(-2, 0) if replica == 0 else data(0, 2)
    everything = data(-2, 2)

    with replicas.join("outer") as channel:
        first = loss_of(model, *everything).item()
        for step in range(OUTER_STEPS):
            inner_steps(model, inner, x, y)
            with torch.no_grad():
                moved = [start - now for start, now in zip(shared, model.parameters(), strict=True)]
            channel.all_reduce(moved, op="mean", step=step).wait(90)
            for parameter, gradient in zip(shared, moved, strict=True):
                parameter.grad = gradient
            outer.step()
            with torch.no_grad():
                for parameter, start in zip(model.parameters(), shared, strict=True):
                    parameter.copy_(start)
        last = loss_of(model, *everything).item()

        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        outputs = channel.all_gather(flat).wait(90).outputs
    assert all(torch.equal(tensors[0], flat) for tensors in outputs.values()), "the trainers have drifted apart"
    assert last < first / 4, f"the loss over both halves went from {first:.3f} to {last:.3f} only"
    print(
        f"RESULT trainer {replica}: loss over both halves {first:.3f} -> {last:.3f}, equal on {len(outputs)} trainers"
    )


if __name__ == "__main__":
    main()

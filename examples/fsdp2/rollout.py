"""Serves the FSDP2 trainer's weights in a plain model until the run ends (see
train.py)."""

from __future__ import annotations

import torch
from torch import nn

import replicas


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7))
    with replicas.join("policy") as channel:
        while True:
            with channel.receive().wait() as update:
                update.load_into(model)
                sums = {name: value.detach().double().sum().item() for name, value in model.named_parameters()}
                assert sums == update.meta["sums"], f"version {update.version}: {sums} is not {update.meta['sums']}"
                print(
                    f"RESULT rollout: version {update.version} is step {update.meta['step']}, tensor by tensor",
                    flush=True,
                )


if __name__ == "__main__":
    main()

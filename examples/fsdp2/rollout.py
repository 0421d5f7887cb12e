"""Takes the FSDP2 trainer's weights into a plain model (see train.py)."""

from __future__ import annotations

import torch
from torch import nn

import replicas


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7))
    last = False
    with replicas.join("policy") as channel:
        while not last:
            with channel.receive().wait(90) as update:
                update.load_into(model)
            sums = {name: value.detach().double().sum().item() for name, value in model.named_parameters()}
            assert sums == update.meta["sums"], f"version {update.version}: {sums} is not {update.meta['sums']}"
            print(f"version {update.version} of step {update.meta['step']} is whole")
            last = bool(update.meta["last"])
    print(f"RESULT rollout: version {update.version} is the trainer's, tensor by tensor")


if __name__ == "__main__":
    main()

"""An FSDP2 trainer publishes DTensors without gathering them: with `ranks = "all"` each
rank writes its own shards.

python -m replicas.supervisor examples/fsdp2/run.toml
cat examples/fsdp2/.replicas/*/logs/*/*/gen-1/rank-*.log
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import replicas

STEPS = 3


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """Gather a parameter: a collective of the trainer's own group."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7))  # 33 and 7 rows: uneven shards
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with replicas.join("policy") as channel:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            sums = {name: whole(value.detach()).double().sum().item() for name, value in model.named_parameters()}
            receipt = channel.publish(model, meta={"step": step, "sums": sums}).wait(90)
            channel.loaded(receipt.version).wait(90)
    elements = sum(value.to_local().numel() for value in model.parameters() if isinstance(value, DTensor))
    print(f"RESULT trainer rank {rank}: {STEPS} versions of {receipt.nbytes} bytes, {elements} elements here")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

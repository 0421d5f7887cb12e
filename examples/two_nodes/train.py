"""One replica of two torchrun nodes: each agent starts one rank, and together they are
one trainer.

python -m replicas.supervisor examples/two_nodes/run.toml
cat examples/two_nodes/.replicas/*/logs/*/*/gen-1/rank-*.log
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import replicas


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes: list[int] = [-1] * world_size
    dist.all_gather_object(nodes, int(os.environ["GROUP_RANK"]))
    assert sorted(nodes) == [0, 1], f"two ranks on two nodes are wanted, these are on {nodes}"

    weight = torch.full((8, 8), float(rank + 1))
    dist.all_reduce(weight)  # the sum over both nodes
    with replicas.join("policy") as channel:
        receipt = channel.publish({"weight": weight}, meta={"value": 3}).wait(90)
        channel.loaded(receipt.version).wait(90)
    dist.all_reduce(weight)  # the replica's own group still works
    torch.testing.assert_close(weight, torch.full((8, 8), 6.0))
    print(f"RESULT rank {rank} of {world_size} on node {os.environ['GROUP_RANK']}: version {receipt.version} is loaded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

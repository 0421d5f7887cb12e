"""Rank 1 of two torchrun jobs all-reduce a 4x4 tensor across the jobs, over the run's
long-lived master store.

python -m replicas.supervisor examples/two_replicas_all_reduce/run.toml
cat examples/two_replicas_all_reduce/.replicas/*/logs/worker/*/gen-1/rank-*.log
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import replicas


def own_group_works() -> None:
    """Check that the default group of this replica works: the library never touches
    it."""
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    torch.testing.assert_close(ranks, torch.tensor([1.0]))  # 0 + 1


def main() -> None:
    replica, count = int(os.environ["REPLICA_ID"]), int(os.environ["REPLICA_NUM"])
    dist.init_process_group("gloo")
    own_group_works()
    with replicas.join("gradients") as channel:
        if dist.get_rank() == 1:
            tensor = torch.full((4, 4), float(replica + 1))
            receipt = channel.all_reduce(tensor, op="sum").wait(90)
            torch.testing.assert_close(tensor, torch.full((4, 4), count * (count + 1) / 2))
            names = ", ".join(member.name for member in receipt.members)
            print(f"RESULT replica {replica}: the sum over {names} is {tensor[0, 0]:.0f}")
    own_group_works()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""``scene_trainer.py OUT``: an FSDP2 trainer that really trains, and publishes its
shards after each step.

``meta`` has the digest of each whole tensor. Rank 0 appends a JSON line for each
publish to ``OUT/trainer.jsonl``. It goes on after errors of a sync, as they harm
nothing; a process that has lost its place ends, and is started again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import replicas
from replicas import errors


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A collective of the trainer's own group."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().view(torch.uint8).numpy().data)


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(509, 256), *(nn.Linear(256, 256) for _ in range(12)), nn.Linear(256, 509))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with replicas.join("policy") as channel, (Path(out) / "trainer.jsonl").open("a") as lines:
        while True:
            tokens = torch.randint(0, 509, (8, 16))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            digests = {name: digest(whole(value.detach())) for name, value in model.named_parameters()}
            began = time.monotonic()
            told: dict[str, object]
            try:
                told = {"version": channel.publish(model, meta={"digests": digests}).wait(120).version}
            except (errors.SyncError, errors.NoCapacity) as error:
                told = {"error": f"{type(error).__name__}: {error}"}
            if dist.get_rank() == 0:
                print(json.dumps({**told, "seconds": time.monotonic() - began}), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

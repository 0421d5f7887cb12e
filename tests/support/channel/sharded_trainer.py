"""One of four ranks of a trainer that publishes sharded models: ``python -m
tests.support.channel.sharded_trainer RANK FILE ENDPOINT``, with the token on its
standard input.

It publishes each of :data:`CASES` on channel ``leader`` (DTensors are gathered) and on
channel ``all`` (each rank's own shards), and waits until the target has loaded it. What
the target must have is :func:`whole` of the case and the step.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import replicas
from replicas.sources import hf, megatron
from tests.support.channel.dtensor_rank import Model
from tests.support.models.adapters import ADAPTERS, randomise
from tests.support.models.architectures import make, quiet
from tests.support.models.saved import merged, saved

__all__ = ["CASES", "CHANNELS", "STEPS", "WORLD", "whole"]

WORLD = 4
STEPS = 2
CHANNELS = "leader", "all"
TIMEOUT_S = 90.0


class Even(nn.Module):
    """Its matrices can be sharded by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 3)
        self.two = nn.Linear(4, 9, dtype=torch.bfloat16)


def plain(kind: type[nn.Module], step: int) -> nn.Module:
    torch.manual_seed(step)
    return kind()


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Of each dtype that a checkpoint has, and of odd shapes."""
    torch.manual_seed(step)
    found = {name: torch.randn(shape) for name, shape in _SHAPES.items()}
    found |= {f"dtype.{dtype}": (torch.randn(5, 4) * 50).to(dtype) for dtype in _DTYPES}
    return found | {"dtype.bool": torch.randn(5, 4) > 0, "dtype.u8": torch.randint(0, 255, (6, 4), dtype=torch.uint8)}


_SHAPES = {"rows": (5, 3), "columns": (3, 5), "few": (2,), "square": (4, 4), "empty": (0, 3), "cube": (3, 2, 5)}
_DTYPES = (torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_LINE = ([Shard(0)], [Shard(1)], [Replicate()])
_GRID = (
    *([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Shard(1)]),
    *([Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]),
)


def distributed(mesh: DeviceMesh, ways: Any, step: int) -> dict[str, torch.Tensor]:
    """Each tensor in each way that fits it."""
    found: dict[str, torch.Tensor] = {}
    for (name, value), (number, placements) in itertools.product(tensors(step).items(), enumerate(ways)):
        if all(not isinstance(one, Shard) or one.dim < value.ndim for one in placements):
            bits = value.view(torch.uint8) if value.itemsize == 1 else value  # Gloo moves no float8
            made = distribute_tensor(bits, mesh, placements)
            local = made.to_local().view(value.dtype)
            found[f"{name}.{number}"] = DTensor.from_local(
                local, mesh, placements, shape=value.shape, stride=value.stride(), run_check=False
            )
    return found


def undistributed(ways: Any, step: int) -> dict[str, torch.Tensor]:
    """The same without a mesh."""
    return {
        f"{name}.{number}": value
        for (name, value), (number, placements) in itertools.product(tensors(step).items(), enumerate(ways))
        if all(not isinstance(one, Shard) or one.dim < value.ndim for one in placements)
    }


def tuned(step: int) -> Any:
    """A model with packed experts, of which each, and some other layers, have an
    adapter."""
    with quiet():
        return randomise(ADAPTERS["experts"](make("Qwen3-MoE", seed=step)))


def export(step: int) -> Iterator[tuple[str, torch.Tensor, str]]:
    """As Megatron-Bridge exports: each rank has some tensors, and tells the others."""
    for number, (name, value) in enumerate(tensors(step).items()):
        given = value.clone() if number % WORLD == dist.get_rank() else torch.empty_like(value)
        dist.broadcast(given.view(torch.uint8) if given.numel() else given, src=number % WORLD)
        yield name, given, f"decoder.{name}"
        given.zero_()


CASES = "line", "grid", "megatron", "fsdp", "fsdp by columns", "hsdp", "fsdp of tp", "hf", "tuned experts"


def whole(case: str, step: int) -> dict[str, torch.Tensor]:
    """What a target must have of it."""
    if case == "line":
        return undistributed(_LINE, step)
    if case == "grid":
        return undistributed(_GRID, step)
    if case == "megatron":
        return tensors(step)
    if case == "hf":
        state = plain(Model, step).state_dict()
        return {name: one.bfloat16() if one.is_floating_point() else one for name, one in state.items()}
    if case == "tuned experts":
        return saved(merged(tuned(step)))
    found: dict[str, torch.Tensor] = plain(Even if case == "fsdp by columns" else Model, step).state_dict()
    return found


def made(case: str, step: int, channel: str, line: DeviceMesh, grid: DeviceMesh) -> object:
    """What is published of it."""
    rank = dist.get_rank()
    if case == "line":
        return distributed(line, _LINE, step)
    if case == "grid":
        return distributed(grid, _GRID, step)
    if case == "megatron":
        return megatron(lambda: export(step), share=(rank, WORLD) if channel == "all" else None)
    if case == "tuned experts":
        adapted = tuned(step)
        for layer in adapted.base_model.model.model.layers:
            fully_shard(layer, mesh=line)
        return hf(fully_shard(adapted, mesh=line))
    model = plain(Even if case == "fsdp by columns" else Model, step)
    if case == "fsdp":
        return fully_shard(model, mesh=line)
    if case == "fsdp by columns":
        return fully_shard(model, mesh=line, shard_placement_fn=lambda one: Shard(one.ndim - 1 if one.ndim > 1 else 0))
    if case == "hsdp":
        return fully_shard(model, mesh=grid)
    parallelize_module(model, grid["in"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["out"])
    return hf(model) if case == "hf" else model


def main() -> None:
    rank, path, endpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    token = sys.stdin.readline().strip()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    line = init_device_mesh("cpu", (WORLD,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
    who: dict[str, Any] = {"group": "trainer", "replica": 0, "rank": rank, "world_size": WORLD}
    joined = [replicas.join(name, endpoint=endpoint, token=token, **who) for name in CHANNELS]
    for case, step, channel in itertools.product(CASES, range(STEPS), joined):
        weights = made(case, step, channel.name, line, grid)
        cast = torch.bfloat16 if case == "hf" else None
        pending = channel.publish(weights, meta={"case": case, "number": step}, dtype=cast, new_manifest=step == 0)
        receipt = pending.wait(TIMEOUT_S)
        channel.loaded(receipt.version).wait(TIMEOUT_S)
    for channel in joined:
        channel.close()
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's own group works
    dist.destroy_process_group()
    print("done", int(total), flush=True)


if __name__ == "__main__":
    main()

"""One of four ranks that pack and load DTensors: ``python -m
tests.support.channel.dtensor_rank RANK FILE``. Fails by assertion.

The ranks form a 2 x 2 mesh (data parallel x tensor parallel) over a file store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from replicas.core.base.manifest import PartManifest
from replicas.core.versions.manifests import merge_parts
from replicas.errors import ManifestMismatch
from replicas.weights.copies.copying import copy_pairs
from replicas.weights.feed import Feed
from replicas.weights.loading import piece_pairs, views
from replicas.weights.packing import stage
from tests.support.channel.packing import load_tensors, pack
from tests.support.channel.pairs import Pair

WORLD = 4


class Model(nn.Module):
    """Uneven and tied; more ranks than some dimensions have rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.gate = nn.Parameter(torch.randn(1, 3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))


def sharded(mesh: DeviceMesh) -> tuple[Model, dict[str, torch.Tensor]]:
    """An FSDP2 over tensor-parallel model, and the values that it has as a whole."""
    torch.manual_seed(3)
    model = Model()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, whole


def gathered(manifest: PartManifest, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everyone's part, put together as a receiver does."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, (manifest.encode(), data))
    merged = merge_parts([PartManifest.decode(encoded) for encoded, _ in everyone])
    image = torch.zeros(merged.image_nbytes, dtype=torch.uint8)
    for pieces, (_, memory) in zip(merged.parts or (), everyone, strict=True):
        copy_pairs(piece_pairs(merged, pieces, memory, image[merged.data_offset :]))
    return views(image, merged)


def check_parts(mesh: DeviceMesh) -> None:
    """``ranks = "all"``: each rank writes its own shards, and together they are the
    model."""
    model, whole = sharded(mesh)
    feed = Feed(model, mode="parts")
    manifest = feed.plan()
    assert manifest is not None
    assert manifest.aliases == (("head.weight", "embed.weight"),)
    data = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    pack(feed, manifest, data)
    assert manifest.nbytes < sum(value.nbytes for value in whole.values()) * 0.75
    found = gathered(manifest, data)
    assert found.keys() == whole.keys() - {"head.weight"}
    assert all(torch.equal(value, whole[name]) for name, value in found.items())


def check_image(mesh: DeviceMesh) -> None:
    """Leader mode: DTensors are gathered on every rank, and only the leader writes."""
    model, whole = sharded(mesh)
    feed = Feed(model, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        manifest = feed.plan()
        assert manifest is not None
        image = torch.zeros(manifest.nbytes, dtype=torch.uint8)
        pack(feed, manifest, image[manifest.whole.data_offset :])
        found = views(image, manifest)
        assert all(torch.equal(found[name], whole[name].bfloat16()) for name in found if name != "steps")
    else:
        feed.drain()
    assert feed.finished


def check_failure_of_the_leader(mesh: DeviceMesh) -> None:
    """The leader cannot use a tensor in the middle: it walks on, and the group works
    afterwards."""
    model, _ = sharded(mesh)

    def stream() -> Iterator[tuple[str, Any]]:
        for name, value in model.state_dict().items():
            yield name, value
            yield f"{name}.bad", 3

    feed = Feed(stream())
    if dist.get_rank() == 0:
        with pytest.raises(ManifestMismatch, match=r"publish was given \('.*\.bad', int\)"):
            stage(feed)
    else:
        feed.drain()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == WORLD


def check_load(mesh: DeviceMesh) -> None:
    """A DTensor model takes its local parts of whole tensors, without communication."""
    model, _ = sharded(mesh)
    torch.manual_seed(11)
    source = Model()
    load_tensors(model, source.state_dict())
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, source.state_dict()[name]), name
    total = torch.ones(1)
    dist.all_reduce(total)


def check_changes(mesh: DeviceMesh) -> None:
    """A tensor of which something has changed is written whole, to this rank's part."""
    pair = Pair(same=("float32", (5, 3)), changed=("float32", (6, 4)))
    placements = [Shard(0), Shard(1)]
    model = {name: distribute_tensor(value, mesh, placements) for name, value in pair.model.items()}
    kept = model["same"].to_local().add_(1).clone()
    pair.new["changed"][4, 3] += 1
    pair.load(model)
    assert torch.equal(model["changed"].full_tensor(), pair.new["changed"])
    assert torch.equal(model["same"].to_local(), kept), "nothing had changed there"


def check_placements(mesh: DeviceMesh) -> None:
    torch.manual_seed(5)
    whole = {
        "a": torch.randn(5, 3),
        "b": torch.randn(3, 5),
        "c": torch.randn(2),
        "d": torch.randn(4, 4),
        "e": torch.randn(3),
    }
    given = {
        "a": distribute_tensor(whole["a"], mesh, [Shard(0), Shard(0)]),
        "b": distribute_tensor(whole["b"], mesh, [Shard(1), Shard(0)]),
        "c": distribute_tensor(whole["c"], mesh, [Replicate(), Shard(0)]),
        "d": distribute_tensor(whole["d"], mesh, [Replicate(), Replicate()]),
        "e": whole["e"],
    }
    staged = stage(Feed(iter(given.items()), mode="parts"))
    data = torch.zeros(staged.manifest.nbytes, dtype=torch.uint8)
    staged.write(data)
    found = gathered(staged.manifest, data)
    assert all(torch.equal(found[name], value) for name, value in whole.items())
    partial = DTensor.from_local(torch.ones(2), mesh["dp"], [Partial()])
    with pytest.raises(ManifestMismatch, match="tensor 'p' is a DTensor with placements"):
        Feed({"p": partial}, mode="parts").plan()


def main() -> None:
    rank, path = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for check in (check_placements, check_parts, check_image, check_failure_of_the_leader, check_load, check_changes):
        check(mesh)
    dist.destroy_process_group()
    print("passed", flush=True)


if __name__ == "__main__":
    main()

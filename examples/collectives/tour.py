"""A tour of every collective between replicas. Each returns a Pending; a failed one
leaves the tensors as they were.

python -m replicas.supervisor examples/collectives/run.toml
cat examples/collectives/.replicas/*/logs/peer/0/gen-1/rank-0.log
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

import replicas
from replicas import errors

ME, COUNT = int(os.environ["REPLICA_ID"]), int(os.environ["REPLICA_NUM"])
WAIT_S = 90.0


def check(name: str, found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected))
    print(f"{name}: {found.tolist()}")


def mine() -> Tensor:
    """Return a tensor with this replica's number, twice."""
    return torch.tensor([float(ME), float(ME)])


def reductions(channel: replicas.Channel) -> None:
    tensors = {"sum": mine(), "mean": mine(), "min": mine(), "max": mine()}
    pending = channel.all_reduce(
        tensors["sum"], op="sum"
    )  # several may be under way; they run in the order of the calls
    channel.all_reduce(tensors["mean"], op="mean").wait(WAIT_S)
    channel.all_reduce(tensors["min"], op="min").wait(WAIT_S)
    channel.all_reduce(tensors["max"], op="max").wait(WAIT_S)
    pending.wait(WAIT_S)
    for op, expected in (("sum", 3.0), ("mean", 1.0), ("min", 0.0), ("max", 2.0)):
        check(f"all_reduce {op}", tensors[op], [expected, expected])
    tensor = mine()
    channel.reduce(tensor, dst="peer/1", op="sum").wait(WAIT_S)
    check("reduce to 1", tensor, [3.0, 3.0] if ME == 1 else mine().tolist())
    parts = [mine() + 10 * index for index in range(COUNT)]  # the part for each peer
    receipt = channel.reduce_scatter(parts, op="sum").wait(WAIT_S)
    check("reduce_scatter", receipt.tensors[0], [3.0 + 30 * ME] * 2)


def movements(channel: replicas.Channel) -> None:
    tensor = mine()
    channel.broadcast(tensor, src="peer/2").wait(WAIT_S)
    check("broadcast from 2", tensor, [2.0, 2.0])

    ragged = torch.full((ME + 1,), float(ME))  # shapes may differ between peers
    outputs = channel.all_gather(ragged).wait(WAIT_S).outputs
    check("all_gather", torch.cat([outputs[member][0] for member in sorted(outputs)]), [0, 1.0, 1, 2, 2, 2])
    outputs = channel.gather(ragged, dst="peer/0").wait(WAIT_S).outputs
    if ME == 0:
        check("gather to 0", torch.cat([outputs[member][0] for member in sorted(outputs)]), [0, 1.0, 1, 2, 2, 2])

    parts = [torch.full((2,), 5.0 * index) for index in range(COUNT)] if ME == 0 else None
    check("scatter from 0", channel.scatter(parts, src="peer/0").wait(WAIT_S).tensors[0], [5.0 * ME] * 2)

    sending = channel.send(mine(), dst=f"peer/{(ME + 1) % COUNT}")  # a ring: post both, then wait
    receiving = channel.recv(src=f"peer/{(ME - 1) % COUNT}")
    check("send and recv", receiving.wait(WAIT_S).tensors[0], [float((ME - 1) % COUNT)] * 2)
    sending.wait(WAIT_S)


def failure(channel: replicas.Channel) -> None:
    """Peers that disagree get an error, and keep their tensors."""
    tensor = mine()
    try:
        channel.all_reduce(tensor, op="sum" if ME == 0 else "max").wait(WAIT_S)
    except errors.RanksDisagree as error:
        check(f"untouched after {type(error).__name__}", tensor, mine().tolist())
    else:
        raise AssertionError("an all_reduce of a sum and a max must fail")


def main() -> None:
    with replicas.join("tour") as channel:
        reductions(channel)
        movements(channel)
        failure(channel)
        channel.barrier().wait(WAIT_S)
        print(f"RESULT replica {ME}: every collective gave the right numbers")


if __name__ == "__main__":
    main()

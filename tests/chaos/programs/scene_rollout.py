"""``scene_rollout.py OUT``: looks at each tensor of each version, and serves nothing.

Appends a JSON line for each version to ``OUT/rollout-N.PID.jsonl``: its number, and the
tensors that were not as published.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import cast

import torch
import xxhash

import replicas


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().data)


def main(out: str) -> None:
    torch.set_num_threads(1)
    name = f"rollout-{os.environ['REPLICA_ID']}.{os.getpid()}.jsonl"
    with replicas.join("policy") as channel, (Path(out) / name).open("a") as lines:
        while True:
            with channel.receive(deadline=3600).wait() as update:
                digests = cast("dict[str, str]", update.meta["digests"])
                found = {name: digest(tensor) for name, tensor in update}
                wrong = sorted(name for name in digests.keys() | found.keys() if digests.get(name) != found.get(name))
            print(json.dumps({"version": update.version, "wrong": wrong}), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

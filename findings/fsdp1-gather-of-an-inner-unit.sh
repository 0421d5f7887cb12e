#!/usr/bin/env bash
# torch 2.13.0: FullyShardedDataParallel.summon_full_params(inner, recurse=False) on an inner unit, before the outermost
# one has run or was gathered, works, and makes the whole model unusable: the inner unit takes itself for the root, and
# the next forward, or summon_full_params of the outermost unit, raises AssertionError ("Non-root FSDP instance's
# `_is_root` should not have been set yet"). The outermost unit first, then the inner one: both work.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cd "$folder"
"$folder/env/bin/python" -W ignore - 2> "$folder/stderr" <<'PY'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo", init_method="file://" + __import__("os").getcwd() + "/rendezvous", rank=0, world_size=1)


def model() -> FSDP:
    cpu = torch.device("cpu")
    return FSDP(nn.Sequential(FSDP(nn.Linear(4, 4), device_id=cpu), nn.Linear(4, 4)), device_id=cpu)


def gather(unit: FSDP) -> None:
    with FSDP.summon_full_params(unit, recurse=False, writeback=False):
        pass


good = model()
gather(good)
gather(good.module[0])
good(torch.ones(1, 4))
print("outermost first: works")
bad = model()
gather(bad.module[0])
try:
    gather(bad)
    raise SystemExit("an inner unit can be gathered first now")
except AssertionError as error:
    print("inner first:", error)
    assert "_is_root" in str(error)
dist.destroy_process_group()
PY

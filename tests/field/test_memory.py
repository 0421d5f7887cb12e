"""Host memory of a trainer that shards its model (FSDP2) and of a rollout, over many
syncs and at the peak of one: reports of group D in docs/field.md."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import running

MEASURES = """
import gc, os, re
from pathlib import Path

def field(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def usage():
    gc.collect()
    pss = int(re.search(r"^Pss:\\s+(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) * 1024
    maps = [line for line in Path("/proc/self/maps").read_text(errors="replace").splitlines() if "/memfd:" in line]
    return {"rss": field("VmRSS"), "pss": pss, "anonymous": field("RssAnon"), "memfds": len(maps),
            "fds": len(list(Path("/proc/self/fd").iterdir()))}

def peak(call):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    call()
    return field("VmHWM") - before
"""
TRAINER = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import replicas
from measures import peak, usage

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, (layers, width, versions) = dist.get_rank(), map(int, sys.argv[1:])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
mesh = init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
for parameter in model.parameters():
    parameter.full_tensor()  # what torch loads at its first gather is not of the sync
told = {}
with replicas.join("policy") as channel:
    def publish():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(channel.latest + 1.0)
        channel.publish(model, meta={"value": channel.latest + 1}).wait()
    for name in ("first", "second", "third"):
        told[name] = peak(publish)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    told["state_dict"] = peak(lambda: get_model_state_dict(model, options=whole))
    for version in range(4, versions + 1):
        publish()
        if version % (versions // 3) == 0:
            told["early" if version == versions // 3 else "late"] = usage()
    Path(f"trainer-{rank}.json").write_text(json.dumps(told))
    if rank == 0:
        channel.loaded(channel.latest).wait(60)
dist.barrier()
dist.destroy_process_group()
"""
ROLLOUT = """
import json, sys
from pathlib import Path
import torch, replicas
from measures import peak, usage

versions, told, model = int(sys.argv[1]), {}, {}

def load(channel):
    with channel.receive().wait() as update:
        if not model:
            model.update({name: torch.zeros(tensor.shape) for name, tensor in update})
        update.load_into(model)
    assert all(tensor.eq(float(update.meta["value"])).all() for tensor in model.values())
    return update.version

with replicas.join("policy") as channel:
    told["first"] = peak(lambda: load(channel))
    told["second"] = peak(lambda: load(channel))
    version = 0
    while version < versions:
        version = load(channel)
        if "early" not in told and version >= versions // 3:
            told["early"] = usage()
    told["late"] = usage()
Path("rollout.json").write_text(json.dumps(told))
"""
MIB = 2**20
LOADED_NBYTES = 64 * MIB
"""Code that the first sync of a process loads."""
SLACK_NBYTES = 4 * MIB
"""What malloc keeps for later."""
VERSIONS = int(os.environ.get("FIELD_VERSIONS", "300"))


def measured(folder: Path, layers: int, width: int, versions: int) -> dict[str, dict[str, Any]]:
    """What trainer-0, trainer-1 and the rollout have measured of themselves."""
    for name, text in (("measures", MEASURES), ("trainer", TRAINER), ("rollout", ROLLOUT)):
        (folder / f"{name}.py").write_text(text)
    text = f"""
[groups.trainer]
nproc_per_node = 2
command = ["trainer.py", "{layers}", "{width}", "{versions}"]
[groups.rollout]
command = ["rollout.py", "{versions}"]
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""
    with running(folder, text, stop_when='["trainer", "rollout"]') as run:
        assert run.wait(timeout_s=280) == 0, run.lines
        run.assert_nothing_left()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("trainer-0", "trainer-1", "rollout")}


@pytest.mark.timeout(300)
def test_verl_6468_host_memory_is_the_same_after_many_syncs(tmp_path: Path) -> None:
    for name, found in measured(tmp_path, layers=8, width=256, versions=VERSIONS).items():
        early, late = found["early"], found["late"]
        print(name, early, late)
        for kind in ("rss", "anonymous"):
            assert late[kind] < early[kind] * 1.01 + SLACK_NBYTES, (name, kind)
        assert late["memfds"] <= early["memfds"] + 1, name
        assert late["fds"] <= early["fds"] + 2, name


SLOTS = 2
"""Images that a source keeps, by default."""
LAYERS, WIDTH = 24, 1448
LAYER_NBYTES = WIDTH * WIDTH * 4
IMAGE_NBYTES = LAYERS * LAYER_NBYTES


@pytest.mark.timeout(300)
def test_miles_3147_a_sync_takes_no_more_than_what_is_being_gathered(tmp_path: Path) -> None:
    """The first sync makes the slots, later ones take what is being gathered. torch's
    own full state dict takes an image more, each time."""
    found = measured(tmp_path, LAYERS, WIDTH, versions=6)
    print(
        {
            name: {one: f"{value / IMAGE_NBYTES:.2f}" for one, value in its.items() if isinstance(value, int)}
            for name, its in found.items()
        }
    )
    slack = 3 * LAYER_NBYTES + 8 * MIB
    leader, other = found["trainer-0"], found["trainer-1"]
    assert leader["first"] < SLOTS * IMAGE_NBYTES + slack + LOADED_NBYTES
    assert max(leader["second"], leader["third"]) < slack, "slots are kept: no image more, only what is being gathered"
    assert max(other["second"], other["third"]) < slack
    assert leader["state_dict"] > IMAGE_NBYTES / 2
    assert found["rollout"]["first"] < 2 * IMAGE_NBYTES + slack + LOADED_NBYTES, "what it maps, and its own model"
    assert found["rollout"]["second"] < IMAGE_NBYTES + slack, "the other slot"

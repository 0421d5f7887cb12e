"""Two ranks of one replica never hold different versions, and get one verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.supervisor.test_end_to_end import config, lines, out
from tests.support.runs import running

__all__ = ["out"]

FSDP = """
import os, resource, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import replicas

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 64))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
with replicas.join("policy") as channel:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))   # no arena fits
    try:
        channel.publish(model).wait(timeout=60)
    except replicas.errors.NoCapacity as error:
        text = f"{type(error).__name__} {error.message} {error.unanimous}"
    else:
        sys.exit("the publish succeeded")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.eq(2.0).all()
    receipt = channel.publish(model).wait(timeout=60)
    open(os.environ["OUT"] + f"/verdict-{dist.get_rank()}", "w").write(f"{text} then {receipt.version}")
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_ranks_of_a_target_never_hold_different_versions(tmp_path: Path, out: Path) -> None:
    text = config(out, steps=40, size=1000, replicas=1, nproc=2)
    with running(tmp_path, text, stop_when='["trainer"]') as run:
        assert run.wait(timeout_s=100) == 0, run.lines
    first, second = ([line["version"] for line in lines(out / f"seen-0-{rank}.jsonl")] for rank in range(2))
    assert first == second
    assert first[-1] == 40
    assert first == sorted(set(first))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", ["leader", "all"])
def test_an_arena_that_cannot_be_had_is_one_verdict_for_both_ranks(tmp_path: Path, out: Path, ranks: str) -> None:
    (tmp_path / "fsdp.py").write_text(FSDP)
    text = f"""
[groups.trainer]
nproc_per_node = 2
command = ["fsdp.py"]
env = {{ OUT = "{out}" }}
restart = {{ policy = "never" }}
[groups.rollout]
launcher = "exec"
command = ["true"]
[channels.policy]
sources = [{{ group = "trainer", ranks = "{ranks}" }}]
targets = ["rollout"]
"""
    with running(tmp_path, text, stop_when='["trainer"]') as run:
        code = run.wait(timeout_s=100)
        log = run.log("trainer/0").read_text() if run.log("trainer/0").exists() else ""
        assert code == 0, (run.lines, log)
    verdicts = {(out / f"verdict-{rank}").read_text() for rank in range(2)}
    assert len(verdicts) == 1
    assert verdicts.pop().startswith("NoCapacity ")

"""Whole runs, as a user has them: torchrun jobs with groups of their own, weights that
flow, and a kill on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import name_of, sidecars_of
from tests.support.runs import Run, running
from tests.support.waits import eventually

TRAINER = """
import json, os, sys, time
import torch, torch.distributed as dist
import replicas

dist.init_process_group("gloo")
rank = dist.get_rank()
steps, size = int(sys.argv[1]), int(sys.argv[2])
receipts = open(os.environ["OUT"] + f"/receipts-{rank}.jsonl", "a", buffering=1)
with replicas.join("policy") as channel:
    for step in range(1, steps + 1):
        gate = os.environ["OUT"] + f"/go-{step}"
        while len(sys.argv) > 3 and not os.path.exists(gate):
            time.sleep(0.01)
        weights = {"a": torch.full((size,), float(step)), "b": torch.full((3, 5), step, dtype=torch.int64)}
        pending = channel.publish(weights, meta={"step": step})
        for _ in range(5):   # the trainer's own collectives go on while the weights travel
            total = torch.full((4,), float(rank + 1))
            dist.all_reduce(total)
            assert total.eq(3.0).all(), total
        receipt = pending.wait(timeout=60)
        line = {"version": receipt.version, "lost": list(receipt.lost), "seconds": receipt.seconds,
                "members": [m.name for m in receipt.members]}
        receipts.write(json.dumps(line) + "\\n")
    assert dist.get_world_size() == 2
    if rank == 0:
        channel.loaded(receipt.version).wait(timeout=60)
    dist.barrier()
dist.destroy_process_group()
"""

ROLLOUT = """
import json, os, sys
import torch, torch.distributed as dist
import replicas

rank = int(os.environ["RANK"])
name = f"{os.environ['REPLICA_ID']}-{rank}"
assert os.environ["REPLICA_NUM"] == sys.argv[2]
seen = open(os.environ["OUT"] + f"/seen-{name}.jsonl", "a", buffering=1)
with replicas.join("policy") as channel:
    while channel.version < int(sys.argv[1]):
        with channel.receive().wait() as update:
            tensors = dict(update)
            values = {float(v) for t in tensors.values() for v in (t.min(), t.max())}
            assert len(values) == 1, f"torn: {values}"
            assert values == {float(update.meta["step"])}, (values, update.meta, update.version)
        seen.write(json.dumps({"version": update.version, "pid": os.getpid()}) + "\\n")
    assert not dist.is_initialized()
"""


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def config(
    out: Path, *, steps: int, size: int, replicas: int, nproc: int = 1, gated: bool = False, more: str = ""
) -> str:
    gate = ', "gated"' if gated else ""
    return f"""
[groups.trainer]
nproc_per_node = 2
command = ["trainer.py", "{steps}", "{size}"{gate}]
env = {{ OUT = "{out}" }}
[groups.rollout]
replicas = {replicas}
nproc_per_node = {nproc}
command = ["rollout.py", "{steps}", "{replicas}"]
env = {{ OUT = "{out}" }}
restart = {{ initial_delay = "100ms" }}
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
{more}
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "rollout.py").write_text(ROLLOUT)
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def start(run: Run, steps: int) -> None:
    (run.folder / "out" / f"go-{steps}").touch()


@pytest.mark.timeout(120)
def test_weights_flow_while_the_trainer_uses_its_own_group(tmp_path: Path, out: Path) -> None:
    text = config(out, steps=6, size=100_000, replicas=2, more="min_targets = 2")
    with running(tmp_path, text, stop_when='["trainer"]') as run:
        assert run.wait(timeout_s=100) == 0, run.lines
        run.assert_nothing_left()
    for rank in range(2):
        receipts = lines(out / f"receipts-{rank}.jsonl")
        assert [receipt["version"] for receipt in receipts] == [1, 2, 3, 4, 5, 6]
    for replica in range(2):
        versions = [line["version"] for line in lines(out / f"seen-{replica}-0.jsonl")]
        assert versions[-1] == 6
        assert versions == sorted(set(versions))


@pytest.mark.timeout(180)
def test_a_target_killed_in_the_middle_of_a_sync(tmp_path: Path, out: Path) -> None:
    """The sync hangs on a frozen sidecar of rollout/1, whose rank is then killed with
    -9."""
    text = config(out, steps=3, size=1_000_000, replicas=2, gated=True, more='transport = "group"')
    with running(tmp_path, text, stop_when='["trainer"]') as run:
        eventually(lambda: run.status().ready, "all groups ready", timeout_s=60)
        start(run, 1)
        eventually(lambda: lines(out / "seen-1-0.jsonl"), "rollout/1 has version 1", timeout_s=60)
        victim = lines(out / "seen-1-0.jsonl")[0]["pid"]
        sidecar = _sidecar_of(victim)
        pidfd = os.pidfd_open(victim)
        os.kill(sidecar, signal.SIGSTOP)
        start(run, 2)
        eventually(lambda: _moving(run), "version 2 of policy is being transferred")
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        eventually(lambda: len(lines(out / "receipts-0.jsonl")) == 2, "version 2 commits over the survivor")
        receipt = lines(out / "receipts-0.jsonl")[1]
        assert receipt["members"] == ["rollout/0/0"]
        assert receipt["lost"] == ["rollout/1/0"]
        assert receipt["seconds"] < 20
        eventually(lambda: _replica(run, "rollout/1").state != "ready", "the kill is seen")  # the commit may be first
        eventually(lambda: _replica(run, "rollout/1").state == "ready", "rollout/1 is back", timeout_s=60)
        assert _replica(run, "rollout/1").versions == {"policy": 2}
        assert _replica(run, "rollout/1").restarts == 1
        assert _replica(run, "trainer/0").restarts == 0
        start(run, 3)
        assert run.wait(timeout_s=60) == 0, run.lines
        run.assert_nothing_left()
    versions = [line["version"] for line in lines(out / "seen-1-0.jsonl")]
    assert versions == [1, 2, 3]


def _replica(run: Run, name: str) -> Any:
    groups = run.status().groups
    return next(replica for group in groups for replica in group.replicas if replica.name == name)


def _moving(run: Run) -> bool:
    """The survivor holds version 2 already, or is about to: the source has begun to
    send."""
    members = run.status().channels[0].members
    return any(2 in member.held for member in members)


def _sidecar_of(rank_pid: int) -> int:
    """The sidecar attached to a rank: the youngest one that is not a spare one."""
    return max(pid for pid in sidecars_of(rank_pid) if name_of(pid) == "replica-sidecar")

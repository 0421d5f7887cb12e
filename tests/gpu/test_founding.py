"""What this project was begun for, as one run: two torchrun replicas of two ranks on
one master store; their sidecars of equal ranks all-reduce a tensor on the GPU that
their parents share with them, while the ranks' own default group goes on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.card import given_back, used_nbytes
from tests.support.runs import running
from tests.support.waits import eventually

pytestmark = pytest.mark.timeout(240)

STEPS = 4
MIB = 1 << 20

WORKER = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import replicas
from tests.gpu import card

rank, replica = int(os.environ["RANK"]), int(os.environ["REPLICA_ID"])
os.environ.update(card.as_host(f"{replica}-{rank}"))  # all ranks are on one GPU
dist.init_process_group(card.BACKEND)
log = open(os.environ["OUT"] + f"/{replica}-{rank}.jsonl", "a", buffering=1)
with replicas.join("outer") as channel:
    tensor = torch.empty(1 << 20, device=card.DEVICE)
    for step in range(1, int(sys.argv[1]) + 1):
        tensor.fill_(step * 10 + replica * 4 + rank)
        own = torch.full((64,), float(rank + 1), device=card.DEVICE)
        pending = channel.all_reduce(tensor, "sum", step=step)
        dist.all_reduce(own)                      # the default group, meanwhile
        assert own.eq(3.0).all(), own
        receipt = pending.wait(90)
        found = sorted({float(tensor.min()), float(tensor.max())})
        sidecars = [lane.sidecar.pid for lane in channel._lanes._lanes.values()]
        log.write(json.dumps({"step": step, "found": found, "members": [m.name for m in receipt.members],
                              "sidecars": sidecars, "pid": os.getpid()}) + "\\n")
        gate = os.environ["OUT"] + f"/go-{step + 1}"
        while step + 1 == int(sys.argv[2]) and not os.path.exists(gate):
            time.sleep(0.01)
    dist.barrier()
dist.destroy_process_group()
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


@pytest.mark.parametrize("staging", ["device", "host"])
def test_two_replicas_of_two_ranks_reduce_what_they_share_with_their_sidecars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    gated = STEPS // 2 + 1
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("OUT", str(tmp_path))
    text = f"""
[groups.worker]
replicas = 2
nproc_per_node = 2
command = ["{tmp_path}/worker.py", "{STEPS}", "{gated}"]
[channels.outer]
peers = [{{ group = "worker", ranks = "each" }}]
staging = "{staging}"
deadline = "90s"
"""
    before = used_nbytes()
    logs = {(replica, rank): tmp_path / f"{replica}-{rank}.jsonl" for replica in range(2) for rank in range(2)}
    with running(tmp_path, text, stop_when='["worker"]') as run:
        eventually(
            lambda: all(len(lines(log)) == gated - 1 for log in logs.values()), "half of the steps", timeout_s=120
        )
        victim = lines(logs[0, 1])[-1]["sidecars"]
        for pid in victim:
            pidfd = os.pidfd_open(pid)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        (tmp_path / f"go-{gated}").touch()
        assert run.wait(timeout_s=150) == 0, run.said()
        run.assert_nothing_left()
    for (replica, rank), log in logs.items():
        found = lines(log)
        assert [one["step"] for one in found] == list(range(1, STEPS + 1)), (replica, rank)
        for one in found:
            assert one["found"] == [float(2 * (one["step"] * 10 + rank) + 4)]
            assert one["members"] == [f"worker/0/{rank}", f"worker/1/{rank}"]
        assert len({one["pid"] for one in found}) == 1, "nobody was restarted"
        if staging == "device" and (replica, rank) == (0, 1):
            assert victim
            assert set(found[-1]["sidecars"]).isdisjoint(victim)
    given_back(before + 16 * MIB, "after the run")

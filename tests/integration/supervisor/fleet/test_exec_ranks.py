"""One program whose children join as its ranks (a tensor-parallel engine)."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.control.client import Client
from replicas.control.commands import Drain
from tests.support.programs import PUBLISHES, group
from tests.support.runs import running
from tests.support.waits import eventually

RANK = """
import sys
import replicas

with replicas.join("policy", rank=int(sys.argv[1]), world_size=2) as channel:
    while True:
        with channel.receive().wait() as update:
            list(update)
        print("rank", sys.argv[1], "has version", update.version, flush=True)
"""

ENGINE = """
import os, signal, subprocess, sys
ranks = [subprocess.Popen([sys.executable, os.environ["OUT"] + "/rank.py", str(rank)]) for rank in range(2)]
def stop(*_):
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait()
    sys.exit(0)
if os.environ["HANDLES"] == "1":
    signal.signal(signal.SIGTERM, stop)
ranks[0].wait()
"""


@pytest.mark.parametrize("handles", [False, True])
def test_children_that_are_ranks_end_without_a_traceback(tmp_path: Path, handles: bool) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "trainer.py").write_text(PUBLISHES)
    env = f'env = {{ OUT = "{tmp_path}", HANDLES = "{int(handles)}" }}\n'
    text = f'[groups.trainer]\ncommand = ["trainer.py"]\n{env}' + group("engine", ENGINE, f"nproc_per_node = 2\n{env}")
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = [{ group = "engine", ranks = "all" }]\n'
    with running(tmp_path, text) as run:
        run.wait_line("engine/0: ready", timeout_s=90.0)
        log = run.log("engine/0")
        words = {f"rank {rank} has version" for rank in range(2)}
        eventually(lambda: all(one in log.read_text() for one in words), "a version of each rank")
        Client(f"unix:{run.state_dir}/control.sock", timeout_s=60.0).order(Drain(target="engine"))
        (status,) = next(one.replicas for one in run.status().groups if one.name == "engine")
        assert status.state == "drained"
        assert "Traceback" not in log.read_text()

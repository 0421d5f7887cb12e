"""The released trainers on two ranks under torchrun, supervised, with a target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_trainers import model
from tests.support.runs import running

PROGRAM = Path(__file__).parent / "programs" / "distributed_trainer.py"
STEPS = 3


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3", "zero3-lora"])
def test_each_step_of_two_ranks_arrives_whole(tmp_path: Path, kind: str) -> None:
    text = f"""
[groups.trainer]
nproc_per_node = 2
command = ["{PROGRAM}", "train", "{kind}", "{STEPS}"]
restart = {{ max_restarts = 0 }}
[groups.trainer.env]
DS_ACCELERATOR = "cpu"
TORCH_EXTENSIONS_DIR = "{sys.prefix}/torch_extensions"
[groups.rollout]
launcher = "exec"
command = ["{PROGRAM}", "listen"]
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
min_targets = 1
deadline = "120s"
"""
    model().save_pretrained(tmp_path / "model")
    with running(tmp_path, text, stop_when='["trainer"]') as run:
        code = run.wait(timeout_s=240)
        assert code == 0, [
            run.lines,
            *(path.read_text()[-3000:] for path in run.state_dir.glob("logs/*/0/gen-1/*.log")),
        ]
        run.assert_nothing_left()
    expected, seen = rows(tmp_path / "expected.jsonl"), rows(tmp_path / "seen.jsonl")
    assert [row["step"] for row in seen] == [*range(STEPS + 1)]
    assert [row["digests"] for row in seen] == [row["digests"] for row in expected]
    assert [row["metadata"] for row in seen] == [row["metadata"] for row in expected]
    assert expected[0]["digests"] != expected[-1]["digests"]
    assert all(bool(row["sharded"]) is (kind != "ddp") for row in expected)
    history = rows(tmp_path / "history.jsonl")[0]["history"]
    assert [entry["replicas/version"] for entry in history if "loss" in entry] == [2.0, 3.0, 4.0]

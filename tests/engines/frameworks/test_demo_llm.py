"""`make demo-llm` in short: TRL's trainer, two vLLM servers behind a router, and kill
-9 of an EngineCore."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.world import MODEL
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked
from tests.support.waits import eventually

STEPS = 5
LIMIT_S = 1500.0
TOO_SHORT = {"the reward did not rise", "server/1 did not come back after SIGKILL to its core"}
"""What so few steps need not reach: an engine takes longer to start again than two."""


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 120)
def test_the_demo_goes_on_after_the_kill_of_an_engine(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    command = [sys.executable, "llm_demo.py", str(MODEL), "--steps", f"{STEPS}", "--out", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", MARK: mark}
    done = subprocess.run(
        command,
        cwd=ROOT / "examples" / "grpo_llm",
        env=environ,
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["problems"]) <= TOO_SHORT, said
    assert done.returncode == (1 if summary["problems"] else 0), said
    assert [(one["process"], one["signal"]) for one in summary["faults"]] == [("core of server/1", "SIGKILL")]
    assert summary["steps"] == STEPS
    assert summary["versions_committed"] >= STEPS
    assert (tmp_path / "reward.png").stat().st_size > 5_000
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=30)

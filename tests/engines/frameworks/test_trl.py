"""The released TRL trains a real model, and its weights go over a channel."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas import errors
from tests.engines.programs.one_url import one_url
from tests.support.runs import Run, running
from tests.support.waits import eventually

PROGRAMS = Path(__file__).parent.parent / "programs"
MODEL = Path(sys.prefix) / "model"
SERVERS = f"""
[groups.server]
replicas = 2
launcher = "exec"
command = ["{PROGRAMS}/lookalike.py"]
restart = {{ initial_delay = "100ms" }}
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def training(folder: Path, kind: str, steps: int, servers: str = SERVERS, **options: Any) -> Iterator[Run]:
    """A run of a trainer of TRL's and servers behind one URL."""
    urls: list[Run] = []

    def living() -> list[str]:
        try:
            members = urls[0].status().channels[0].members if urls else ()
        except errors.ReplicasError:
            return []  # the run has ended
        return [one.info["url"] for one in members if "url" in one.info and one.state != "gone"]

    with one_url(living) as url:
        text = f"""
[groups.trainer]
launcher = "exec"
command = ["{PROGRAMS}/trl_trainer.py", "{kind}", "{MODEL}", "{steps}", "{url}"]
restart = {{ max_restarts = 0 }}
[groups.trainer.env]
HF_HUB_OFFLINE = "1"
{servers}
[channels.policy]
sources = ["trainer"]
targets = ["server"]
deadline = "60s"
"""
        with running(folder, text, stop_when='["trainer"]', **options) as run:
            run.endpoint()
            urls.append(run)
            yield run


def finished(run: Run, *, timeout_s: float) -> None:
    code = run.wait(timeout_s=timeout_s)
    assert code == 0, [run.lines, *(path.read_text()[-4000:] for path in run.state_dir.glob("logs/*/*/gen-*/*"))]
    run.assert_nothing_left()


def versions_in(history: list[dict[str, Any]]) -> list[float]:
    return [entry["replicas/version"] for entry in history if "replicas/version" in entry]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["grpo", pytest.param("async", marks=pytest.mark.long)])
def test_each_step_of_trl_arrives_and_a_killed_server_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    steps = 8
    with training(tmp_path, kind, steps) as run:
        eventually(lambda: len(rows(tmp_path / "seen-1.jsonl")) >= 2, "the second version", timeout_s=180)
        os.kill(rows(tmp_path / "seen-1.jsonl")[0]["pid"], signal.SIGKILL)
        finished(run, timeout_s=180)
    expected = rows(tmp_path / "expected.jsonl")
    assert [row["step"] for row in expected] == [*range(steps + 1)]
    assert len({row["digest"] for row in expected}) == steps + 1
    digests = {number: row["digest"] for number, row in enumerate(expected, 1)}
    synced = steps if kind == "grpo" else steps + 1  # GRPO syncs before it samples, the other after each step
    unharmed, killed = rows(tmp_path / "seen-0.jsonl"), rows(tmp_path / "seen-1.jsonl")
    assert unharmed[-1]["version"] == synced
    assert all(row["digest"] == digests[row["version"]] for row in (*unharmed, *killed))
    assert len({row["pid"] for row in killed}) == 2
    assert killed[-1]["version"] > killed[1]["version"]
    if kind == "grpo":
        assert [row["version"] for row in unharmed] == [*range(1, steps + 1)]
    history = json.loads((tmp_path / "history.json").read_text())
    assert versions_in(history)[-1] == synced
    assert {"replicas/seconds", "replicas/copied_seconds", "replicas/waited_seconds"} <= history[1].keys()
    assert sum("loss" in entry for entry in history) == steps

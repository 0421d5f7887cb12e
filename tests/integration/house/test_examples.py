"""Every example does what it says, with the numbers that it promises; and a short run
of the demo."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.telemetry import event_log, spans
from tests.support.house.pages import files
from tests.support.root import ROOT
from tests.support.runs import MARK, processes_marked, shared_memory
from tests.support.waits import eventually

EXAMPLES = ROOT / "examples"
LIMIT_S = 110.0


def _run(*command: str, cwd: Path, limit_s: float = LIMIT_S, mark: str = "") -> subprocess.CompletedProcess[str]:
    # The folder of the package is put first, so that the test is of this tree whatever
    # is installed.
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1", MARK: mark}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def _example(tmp_path: Path, name: str) -> list[str]:
    """Run ``name`` under a supervisor to its end; the RESULT lines of its ranks."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns(".replicas", "__pycache__"))
    done = _run("-m", "replicas.supervisor", str(folder / "run.toml"), cwd=tmp_path)
    logs = {path: path.read_text() for path in sorted(folder.glob(".replicas/*/logs/**/*.log"))}
    said = "\n".join([done.stderr, *(f"--- {path.relative_to(folder)}\n{text}" for path, text in logs.items())])
    assert done.returncode == 0, said
    results = [line.removeprefix("RESULT ") for text in logs.values() for line in text.splitlines() if "RESULT" in line]
    return sorted(results)


def test_every_example_is_run() -> None:
    elsewhere = (
        "tests/integration/house/test_handbook.py",
        "tests/unit/testing/test_whole_idea.py",
        "tests/unit/testing/test_steering_examples.py",
        "tests/engines/frameworks/test_demo_llm.py",
    )
    told = "".join((ROOT / path).read_text() for path in elsewhere) + Path(__file__).read_text()
    folders = [path.name for path in EXAMPLES.iterdir() if any(path.glob("*.py"))]
    assert [name for name in folders if f'"{name}"' not in told and f"examples/{name}" not in told] == []


def test_two_replicas_all_reduce(tmp_path: Path) -> None:
    names = "worker/0/1, worker/1/1"
    assert _example(tmp_path, "two_replicas_all_reduce") == [
        f"replica 0: the sum over {names} is 3",
        f"replica 1: the sum over {names} is 3",
    ]


def test_ping_pong(tmp_path: Path) -> None:
    (result,) = _example(tmp_path, "ping_pong")
    assert result.startswith("the ball is at 20 after 10 rounds")


def test_collectives(tmp_path: Path) -> None:
    assert _example(tmp_path, "collectives") == [
        f"replica {replica}: every collective gave the right numbers" for replica in range(3)
    ]


def test_averaging(tmp_path: Path) -> None:
    results = _example(tmp_path, "averaging")
    assert len(results) == 2
    assert all(result.endswith("equal on 2 trainers") for result in results), results


def test_embedding(tmp_path: Path) -> None:
    done = _run(str(EXAMPLES / "embedding" / "main.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout 0 serves version 3" in done.stdout
    assert "rollout 1 serves version 3" in done.stdout
    assert "RESULT version 3 committed" in done.stdout
    kept = spans.read(event_log.read(tmp_path / "events.jsonl"))
    assert [span.attributes["version"] for span in kept.spans() if span.kind == "sync"] == [1, 2, 3]
    made = _run("-m", "replicas", "report", ".", cwd=tmp_path)  # as its first lines say
    assert made.returncode == 0, made.stderr
    (page,) = tmp_path.glob("*.html")
    assert "rollout" in page.read_text()


def test_two_nodes(tmp_path: Path) -> None:
    rank_0, rank_1, rollout = _example(tmp_path, "two_nodes")
    nodes = {rank_0.split("on node ")[1][0], rank_1.split("on node ")[1][0]}
    assert nodes == {"0", "1"}
    assert rollout == "rollout: version 1, every weight is 3"


def test_fsdp2(tmp_path: Path) -> None:
    *rollout, rank_0, rank_1 = _example(tmp_path, "fsdp2")
    assert rollout == [f"rollout: version {number} is step {number}, tensor by tensor" for number in (1, 2, 3)]
    assert rank_0.startswith("trainer rank 0: 3 versions")
    assert rank_1.startswith("trainer rank 1: 3 versions")


def test_own_engine(tmp_path: Path) -> None:
    *engine, first, second, third, _, _, last = _example(tmp_path, "own_engine")
    for version, line in enumerate((first, second, third), 1):
        assert line == f"server: version {version} answers {[2.0 * version * row for row in range(8)]}"
    assert last == "trainer: version 3 is served by all ranks of the engine"
    parts = [f"engine rank {rank}: rows {4 * rank} to {4 * rank + 3} of version" for rank in (0, 1)]
    assert sorted(engine) == [f"{part} {version}" for part in parts for version in (1, 2, 3)]


def test_the_demo_sees_a_torn_version() -> None:
    program = """
import torch, model
whole, other = model.Policy(), model.Policy()
model.stamp(whole, 7)
model.verify(whole, 7)
whole.head.weight.data[3, 5] += 1e-3
try:
    model.verify(whole, 7)
except model.TornWeights as error:
    print(error)
model.stamp(other, 8)
try:
    model.verify(other, 7)
except model.TornWeights as error:
    print(error)
"""
    done = _run("-c", program, cwd=EXAMPLES / "grpo")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("1 of ")
    assert second.endswith("(the weights say step 8)")


@pytest.mark.timeout(200)
def test_the_cluster_outlives_its_supervisor_and_a_machine(tmp_path: Path) -> None:
    demo = str(EXAMPLES / "cluster" / "cluster_demo.py")
    mark, before = secrets.token_hex(8), shared_memory()
    done = _run(demo, "--adopt", "24s", "--out", str(tmp_path / "out"), cwd=tmp_path, limit_s=190, mark=mark)
    logs = "\n".join(path.read_text() for path in (tmp_path / "out").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert re.search(r"rollout/[01] runs on (left|right) .* generation 2, with version \d+", done.stdout), done.stdout
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=10)
    assert shared_memory() <= before


@pytest.mark.timeout(200)
def test_two_sites_share_an_archive(tmp_path: Path) -> None:
    """With the configs of the page, which are those of the example."""
    page = files((ROOT / "docs/howto/two-data-centres.md").read_text())
    assert page == {name: (EXAMPLES / "two_sites" / name).read_text() for name in ("a.toml", "b.toml")}
    mark = secrets.token_hex(8)
    demo = str(EXAMPLES / "two_sites" / "sites_demo.py")
    done = _run(demo, "--out", str(tmp_path / "out"), cwd=tmp_path, limit_s=190, mark=mark)
    logs = "\n".join(path.read_text() for path in (tmp_path / "out").glob("*/supervisor.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "each bit for bit what was published" in done.stdout
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=10)


def test_the_demo_gives_up_only_without_progress_and_says_so(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["matplotlib"] = None
sys.path.insert(0, {str(EXAMPLES / "grpo")!r})
import demo
sys.argv = ["demo.py", "--patience", "0", "--out", {str(tmp_path / "out")!r}]
sys.exit(demo.main())
"""
    done = _run("-c", program, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: given up at step 0 of 120: no step and no change for 0 s; --patience S waits longer" in done.stdout
    assert "matplotlib is not installed" in done.stdout
    assert not (tmp_path / "out" / "reward.png").exists()


@pytest.mark.timeout(180)
def test_demo_learns_survives_its_kill_and_leaves_nothing(tmp_path: Path) -> None:
    demo = str(EXAMPLES / "grpo" / "demo.py")
    mark, before = secrets.token_hex(8), shared_memory()
    done = _run(demo, "--steps", "70", "--out", str(tmp_path / "out"), cwd=tmp_path, limit_s=170, mark=mark)
    assert done.returncode == 0, done.stdout + done.stderr
    eventually(lambda: not processes_marked(mark), "the end of its processes", timeout_s=10)
    assert shared_memory() <= before
    said = (tmp_path / "out" / "summary.json").read_text()
    summary = json.loads(said)
    assert summary["problems"] == []
    assert summary["versions_committed"] == 71
    assert summary["reward_last"] > summary["reward_first"] + 0.4
    assert summary["restarts"] == 1, said
    port = int(re.findall(r"http://127\.0\.0\.1:(\d+)", done.stdout)[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert (tmp_path / "out" / "reward.png").stat().st_size > 5_000

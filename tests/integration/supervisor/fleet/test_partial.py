"""A replica one of whose ranks fails to load: out of ready, restarted, and then the
same version on all its ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import PUBLISHES, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

ROLLOUT = """
import json, os, time
import replicas

rank, generation = os.environ["RANK"], int(os.environ["REPLICAS_GENERATION"])
log = open(os.environ["OUT"] + f"/rollout-{rank}.jsonl", "a", buffering=1)
with replicas.join("policy") as channel:
    while True:
        try:
            with channel.receive().wait() as update:
                values = {int(v) for _, t in update for v in (t.min(), t.max())}
                assert values == {update.meta["stamp"]}, "torn"
                if rank == "1" and generation == 1 and update.version >= 3:
                    raise RuntimeError("half a load")
        except RuntimeError:
            log.write(json.dumps({"generation": generation, "version": update.version, "failed": True}) + "\\n")
            time.sleep(600)   # alive, and with half of a version: nobody may ask it anything
        log.write(json.dumps({"generation": generation, "version": update.version}) + "\\n")
"""


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def states(run: Run) -> tuple[str, int]:
    replica = run.status().groups[1].replicas[0]
    return replica.state, replica.generation


@pytest.mark.timeout(240)
def test_a_half_loaded_replica_is_restarted_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "rollout.py").write_text(ROLLOUT)
    text = group("trainer", PUBLISHES, f'env = {{ OUT = "{out}" }}')
    text += f'[groups.rollout]\nnproc_per_node = 2\ncommand = ["rollout.py"]\nenv = {{ OUT = "{out}" }}\n'
    text += 'restart = { initial_delay = "100ms" }\nstop_timeout = "2s"\n'
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
    with running(tmp_path, text) as run:
        line = run.wait_line("its weights may be a mix of versions", timeout_s=90)
        assert re.search(
            r"rollout/0: channel policy, version \d+ was not loaded: .*RuntimeError: half a load; its weights", line
        )
        failed = next(one for one in lines(out / "rollout-1.jsonl") if "failed" in one)
        assert failed["version"] >= 3
        run.wait_line("rollout/0: ready", timeout_s=60)
        assert states(run) == ("ready", 2)
        assert run.status().groups[1].restarts == {"load_failed": 1}
        assert run.status().groups[0].restarts == {}

        def caught_up() -> bool:
            """Both ranks have loaded some versions in their second life."""
            return all(len(second_life(out, rank)) >= 3 for rank in range(2))

        eventually(caught_up, "versions in the second generation", timeout_s=30)
        (out / "stop").touch()
        eventually(lambda: run.status().groups[0].replicas[0].state == "finished", "the trainer's end", timeout_s=30)
        latest = run.status().channels[0].committed_version
        eventually(lambda: all(second_life(out, rank)[-1] == latest for rank in range(2)), "the newest on both ranks")
        first, second = second_life(out, 0), second_life(out, 1)
        assert first == second
        assert first[0] > failed["version"] - 1
        assert run.status().groups[1].replicas[0].versions == {"policy": latest}
        assert not [line for line in lines(out / "trainer-0.jsonl") if "error" in line]
        run.end()


def second_life(out: Path, rank: int) -> list[int]:
    """Versions that the rank loaded in its second generation."""
    return [line["version"] for line in lines(out / f"rollout-{rank}.jsonl") if line["generation"] == 2]

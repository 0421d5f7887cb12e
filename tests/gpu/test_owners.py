"""A GPU has one owner at a time, whatever is killed or frozen of a node: its agent, its
replicas, or both. The last owner gives all back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.card import REAL, given_back, used_nbytes
from tests.support.nodes import Agent, replicas_of
from tests.support.programs import group
from tests.support.runs import alive, running
from tests.support.waits import eventually

pytestmark = pytest.mark.timeout(240)

MIB = 1 << 20
HELD_NBYTES = 4096 * MIB
CONTEXT_NBYTES = 1024 * MIB
"""More than a program takes of the GPU before it holds anything."""

HOLDS = f"""
import fcntl, json, os, time
from tests.gpu import card

folder = os.environ["OUT"]
owner = open(folder + "/owner", "a")
fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another process lives that has it
used_nbytes = card.used_nbytes()
held = card.card().allocate({HELD_NBYTES}, card.uuid())
told = {{"pid": os.getpid(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "used_nbytes": used_nbytes}}
with open(folder + "/owners.jsonl", "a") as log:
    log.write(json.dumps(told) + "\\n")
while True:
    held.tensor.fill_(1)  # the GPU is at work when a fault comes
    card.card().synchronize(card.uuid())
    time.sleep(0.01)
"""


def test_a_gpu_has_one_owner_whatever_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas and one GPU: one of them waits, also while the other is down."""
    monkeypatch.setenv("OUT", str(tmp_path))
    if not REAL:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    before = used_nbytes()
    text = group("a", HOLDS, "replicas = 2\nresources = { gpus = 1 }\n[groups.a.restart]\ninitial_delay = 0\n")
    head = '[cluster]\nlocal = false\nlease = "8s"\n'

    def owners() -> list[dict[str, Any]]:
        log = tmp_path / "owners.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    with running(tmp_path, text, head=head) as run:
        run.wait_line("control at", timeout_s=60)
        agent = Agent(run, "n1")

        def program() -> None:
            os.kill(owners()[-1]["pid"], signal.SIGKILL)

        def the_agent() -> None:
            agent.kill()

        def agent_and_frozen_program() -> None:
            os.kill(owners()[-1]["pid"], signal.SIGSTOP)
            agent.kill()

        def node() -> None:
            agent.kill_all()

        try:
            faults: list[Callable[[], None]] = [program, the_agent, agent_and_frozen_program, node]
            for number, fault in enumerate([lambda: None, *faults]):
                fault()
                if agent.popen.poll() is not None:
                    agent = Agent(run, "n1")
                eventually(lambda number=number: len(owners()) > number, f"owner {number + 1}", timeout_s=60)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                last = owners()[-1]
                assert last["gpus"] in ("0", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
                assert last["used_nbytes"] < before + CONTEXT_NBYTES, "what the one before held is given back"
                assert [one["pid"] for one in owners() if alive(one["pid"])] == [last["pid"]]
                replicas = replicas_of(run.status(), "a")
                (waits,) = [one.reason for one in run.status().groups[0].replicas if one.state == "pending"]
                assert waits == "waits for 1 GPU (0 free)"
                assert sum(generation for _, generation, *_ in replicas.values()) == number + 1, "none failed by itself"
            run.signal(signal.SIGTERM)
            assert run.wait(timeout_s=60) == 0
            assert agent.wait() == 0
            run.assert_nothing_left()
        finally:
            agent.kill()
    given_back(before + 16 * MIB, "after the run")

"""A rank of the supervisor's own replicas shows by the mark of its shim that it is the
one: nobody takes its place with the run's token alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import replicas
from replicas import messages as wire
from replicas.coordinator import Coordinator
from replicas.errors import Fenced
from replicas.messages.identity import proof_of
from tests.support.channel.members import Client
from tests.support.programs import group
from tests.support.runs import Run, running
from tests.support.waits import eventually

JOINS = """
import time, replicas
channel = replicas.join("policy")
print("joined", channel.member.incarnation, flush=True)
time.sleep(600)
"""
TEXT = (
    group("trainer", JOINS)
    + '[groups.rollout]\nlauncher = "external"\n[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\n'
)
HEAD = '[control]\nlisten = "127.0.0.1:0"\n'


def address(run: Run) -> dict[str, Any]:
    return {"endpoint": run.endpoint(), "token": (run.state_dir / "token").read_text()}


def incarnation_of(run: Run) -> str:
    """All members know it."""
    return str(eventually(lambda: run.log("trainer/0").read_text().split()[1:], "its line")[0])


async def answers(run: Run, **hello: Any) -> wire.FromCoordinator:
    """To a Hello by hand."""
    where = cast("Coordinator", SimpleNamespace(**address(run)))
    client = Client(where, **{"run": "", "group": "trainer", **hello})
    try:
        return await client.join()
    finally:
        await client.socket.close()


def refuses_others(run: Run) -> None:
    known = incarnation_of(run)
    with pytest.raises(Fenced, match=r"trainer/0/0"):
        replicas.join("policy", group="trainer", **address(run))
    odd: list[dict[str, Any]] = [
        {"proof": proof_of("0" * 32, "one")},
        {"replica": 1},
        {"incarnation": known},
        {"incarnation": known, "resume_term": 1},
        {"incarnation": known, "observe": True},
        {"incarnation": known, "observe": True, "resume_term": 1},
    ]
    for hello in odd:
        answer = asyncio.run(answers(run, **hello))
        assert isinstance(answer, wire.Refused), hello
        assert answer.error.kind == "Fenced", hello


def marks(run: Run) -> list[str]:
    return [one["nonce"] for one in json.loads((run.state_dir / "state.json").read_text())["shims"]]


def test_nobody_takes_the_place_of_a_rank_by_the_token_alone(tmp_path: Path) -> None:
    with running(tmp_path, TEXT, stop_when='["trainer"]\nadopt = "60s"', head=HEAD) as run:
        run.wait_line("trainer/0: ready after", timeout_s=60)
        refuses_others(run)
        with (
            replicas.join("policy", group="rollout", replica=0, **address(run)) as first,
            replicas.join("policy", group="rollout", replica=0, **address(run)) as second,
        ):
            eventually(lambda: second.member in second.members, "the newest of those that others start")
            assert first.member not in second.members
        (mark,) = marks(run)
        pid = run.status().groups[0].replicas[0].pid
        run.kill()
        run.start()
        run.wait_line("control at", timeout_s=60)
        eventually(lambda: (run.state_dir / "endpoint.json").exists(), "the next supervisor")
        eventually(lambda: run.status().groups[0].replicas[0].state == "ready", "the rank comes back", timeout_s=60)
        refuses_others(run)
        status = run.status()
        assert status.groups[0].replicas[0].pid == pid
        assert not any(status.groups[0].restarts.values())
        assert marks(run) == [mark]
        shown = [
            repr(status),
            (run.state_dir / "events.jsonl").read_text(),
            *run.said(),
            run.log("trainer/0").read_text(),
        ]
        assert not any(mark in text for text in shown)
        run.end()

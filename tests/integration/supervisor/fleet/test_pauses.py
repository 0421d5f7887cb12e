"""The machine stops for longer than every lease (here: SIGSTOP of the supervisor), and
nobody is evicted for it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replicas.status import RunStatus
from tests.support.programs import PUBLISHES, RECEIVES, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

PAUSE_S = float(os.environ.get("PAUSE_S", "6"))
"""Longer than the leases and timeouts below; by hand: PAUSE_S=60."""

SHORT = 'health = { heartbeat_timeout = "2s", progress_timeout = "4s", load_deadline = "3s" }'


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        try:
            yield
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    finally:
        os.close(pidfd)


def told(out: Path, name: str) -> list[dict[str, Any]]:
    path = out / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def committed(out: Path) -> int:
    return max((line.get("version", 0) for line in told(out, "trainer-0")), default=0)


def pids(status: RunStatus) -> dict[str, int | None]:
    return {replica.name: replica.pid for group in status.groups for replica in group.replicas}


@pytest.mark.timeout(60 + 3 * PAUSE_S)
def test_a_stopped_supervisor_evicts_nobody_and_kills_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    more = f'env = {{ OUT = "{out}" }}\n{SHORT}'
    text = group("trainer", PUBLISHES, more) + group("rollout", RECEIVES, f"replicas = 2\n{more}")
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\ndeadline = "4s"\n'
    with running(tmp_path, text) as run:
        eventually(lambda: run.status().ready and committed(out) > 2, "a run that publishes", timeout_s=60)
        before = settled(run)
        with stopped(run.pid):
            time.sleep(PAUSE_S)  # nothing tells of the end of a pause but its end
        seen = committed(out)
        eventually(lambda: committed(out) > seen + 2, "syncs that go on", timeout_s=30)
        eventually(lambda: run.status().ready, "a run that is ready", timeout_s=10)
        after = run.status()
        assert pids(after) == pids(before)
        assert [group.restarts for group in after.groups] == [{}, {}]
        assert after.store == before.store.__class__(**{**fields(before.store), "keys": after.store.keys})
        assert after.channels[0].epoch == before.channels[0].epoch, "somebody was evicted"
        (tmp_path / "out" / "stop").touch()
        eventually(lambda: run.status().groups[0].replicas[0].state == "finished", "the trainer's end", timeout_s=30)
        errors = {line["error"] for line in told(out, "trainer-0") if "error" in line}
        assert errors <= {"DeadlineExceeded", "OutcomeUnknown", "Disconnected"}
        for name in ("rollout-0", "rollout-1"):
            versions = [line["version"] for line in told(out, name)]
            assert versions == sorted(set(versions))
        run.end()


def fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__struct_fields__}


def settled(run: Run) -> RunStatus:
    """The status with everybody in the epoch."""

    def look() -> RunStatus | None:
        status = run.status()
        live = [member for member in status.channels[0].members if member.state == "live"]
        return status if len(live) == 3 else None

    found = eventually(look, "everybody in the epoch")
    assert isinstance(found, RunStatus)
    return found

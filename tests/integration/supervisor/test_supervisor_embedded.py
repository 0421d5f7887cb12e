"""``async with replicas.Supervisor(config)`` in a program of one's own.

Covers: supervisor/in_thread.py, supervisor/reporting.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import replicas
from replicas import errors
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.linux import private
from replicas.supervisor import Supervisor
from replicas.supervisor.reporting import Reporting
from replicas.supervisor.state.run_state import AgentRecord, Saved, SavedGroup
from replicas.supervisor.state.state import AlreadySupervised
from tests.support.runs import alive
from tests.support.waits import wait_until

pytestmark = pytest.mark.anyio

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def config(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "run": {"name": "embedded", "state_dir": str(folder / "state")},
        "control": {"listen": "127.0.0.1:0"},
        "groups": {name: {"launcher": "exec", "command": SLEEPS, **group} for name, group in groups.items()},
    }


def environment_of(pid: int | None) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@asynccontextmanager
async def watched(supervisor: Supervisor) -> AsyncIterator[list[str]]:
    """The steps that ``supervisor.events()`` tells while the block runs."""
    steps: list[str] = []

    async def watch() -> None:
        async for record in supervisor.events():
            event = record.event
            if isinstance(event, Transition):
                steps.append(f"{event.group}/{event.replica} {event.event.value} {event.generation}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await asyncio.sleep(0)
        yield steps
        tasks.cancel_scope.cancel()


async def test_scale_restart_and_drain(tmp_path: Path) -> None:
    async with (
        replicas.Supervisor(config(tmp_path, a={"replicas": 1}, b={})) as supervisor,
        watched(supervisor) as steps,
    ):
        await supervisor.wait_ready("a", timeout=20)
        await supervisor.wait_ready(timeout=20)
        pids = {one.name: one.pid for group in supervisor.status().groups for one in group.replicas}

        await supervisor.scale("a", 3)
        await supervisor.wait_ready("a", timeout=20)
        assert [one.name for one in supervisor.status().groups[0].replicas] == ["a/0", "a/1", "a/2"]
        environment = environment_of(supervisor.status().groups[0].replicas[2].pid)
        assert b"REPLICA_NUM=3" in environment
        assert b"REPLICA_ID=2" in environment

        await supervisor.restart("a/1")
        await supervisor.wait_ready("a", timeout=20)
        await supervisor.scale("a", 1)
        group = supervisor.status().groups[0]
        assert [one.name for one in group.replicas] == ["a/0"]
        assert group.restarts == {"requested": 1}
        assert group.restart_budget_remaining_ratio == 1.0

        await supervisor.scale("a", 2)  # the index comes back, its generations do not
        await supervisor.wait_ready("a", timeout=20)
        assert supervisor.status().groups[0].replicas[1].generation == 3
        assert supervisor.status().groups[0].restarts == {"requested": 1}
        now = {one.name: one.pid for group in supervisor.status().groups for one in group.replicas}
        assert pids.items() <= now.items()

        def get(page: str) -> str:
            with urllib.request.urlopen(f"http://{supervisor.endpoint}{page}", timeout=5) as answer:
                return str(answer.read().decode())

        await wait_until(lambda: supervisor.status().store.up, "the store, which may come after trivial replicas")
        assert await anyio.to_thread.run_sync(get, "/readyz") == "ok\n"
        metrics = await anyio.to_thread.run_sync(get, "/metrics")
        run = f'run="{supervisor.config.run.name}"'
        assert f'replicas_restarts_total{{group="a",reason="requested",{run}}} 1.0' in metrics
        assert f'replicas_group_replicas{{group="a",{run},state="ready"}} 2.0' in metrics
        assert f'replicas_start_duration_seconds_count{{group="a",{run}}} 5.0' in metrics

        for bad in ("a/7", "a/x", "c/0"):
            with pytest.raises(errors.UsageError, match=f'no (replica|group) "{bad.partition("/")[0]}'):
                await supervisor.restart(bad)
        await supervisor.drain()
        assert all(one.state == "drained" for group in supervisor.status().groups for one in group.replicas)
        assert await supervisor.run_until_done() == 0
        await supervisor.preempt()  # too late: it is over
        assert supervisor.exit_code == 0
        assert steps.count(f"a/1 {ReplicaEvent.RETRY.value} 1") == 1
        assert f"b/0 {ReplicaEvent.STOPPED.value} 1" in steps


async def test_the_events_end_with_the_run_while_the_block_is_still_open(tmp_path: Path) -> None:
    done = {"command": [sys.executable, "-c", ""]}
    async with Supervisor(config(tmp_path, a=done)) as supervisor:
        async with asyncio.timeout(20):  # nothing else waits for the run
            seen = [type(record.event).__name__ async for record in supervisor.events()]
        assert seen[-1] == "RunEnded"
        assert await supervisor.run_until_done() == 0
    written = (tmp_path / "state" / "events.jsonl").read_text()
    assert written.count('"RunEnded"') == 1


async def test_wait_ready_tells_of_a_failure(tmp_path: Path) -> None:
    bad = {"command": [sys.executable, "-c", "raise SystemExit('no')"], "restart": {"policy": "never"}}
    async with Supervisor(config(tmp_path, a={}, bad={**bad, "depends_on": ["a"]})) as supervisor:
        with pytest.raises(TimeoutError):
            await supervisor.wait_ready("bad", timeout=0.01)
        await supervisor.run_until_done()
        with pytest.raises(errors.WorldError, match="bad/0 failed: rank 0 exited with code 1: no"):
            await supervisor.wait_ready("bad", timeout=20)
        assert await supervisor.run_until_done() == 1


async def test_an_error_in_the_block_still_ends_everything(tmp_path: Path) -> None:
    pids: list[int | None] = []
    supervisor = Supervisor(config(tmp_path, a={}))

    async def use() -> None:
        async with supervisor:
            await supervisor.wait_ready(timeout=20)
            pids.append(supervisor.status().groups[0].replicas[0].pid)
            with pytest.raises(AlreadySupervised):
                async with Supervisor(config(tmp_path, a={})):
                    pass
            raise KeyError("the program's own")

    with pytest.raises(KeyError):
        await use()
    assert pids[0] is not None
    assert not alive(pids[0])
    assert not supervisor.state.token_file.exists()
    with pytest.raises(errors.UsageError, match="the supervisor is not running"):
        Supervisor(config(tmp_path, a={})).status()


async def test_a_cancelled_program_still_ends_everything(tmp_path: Path) -> None:
    supervisor = Supervisor(config(tmp_path, a={}))
    ready = asyncio.Event()

    async def use() -> None:
        async with supervisor:
            await supervisor.wait_ready(timeout=20)
            ready.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await asyncio.wait_for(ready.wait(), 20)
    pid = supervisor.status().groups[0].replicas[0].pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pid is not None
    assert not alive(pid)


async def test_after_a_preemption_the_next_supervisor_goes_on(tmp_path: Path) -> None:
    async with Supervisor(config(tmp_path, a={})) as first:
        await first.scale("a", 2)
        await first.wait_ready(timeout=30)
        await first.preempt()
        assert await first.run_until_done() == 75
    async with Supervisor(config(tmp_path, a={})) as second:
        await second.wait_ready(timeout=30)
        (group,) = second.status().groups
        assert [(one.name, one.generation) for one in group.replicas] == [("a/0", 2), ("a/1", 2)]
        assert group.restarts == {}, "it spends nothing"
    async with Supervisor(config(tmp_path, a={})) as third:
        await third.wait_ready(timeout=30)
        assert [one.name for one in third.status().groups[0].replicas] == ["a/0"], "one that ended in order is over"


@pytest.mark.parametrize("adopt", ["0s", "60s"])
async def test_a_preemption_that_a_kill_has_cut_short_does_not_go_on_elsewhere(tmp_path: Path, adopt: str) -> None:
    """A job that was killed as it drained runs again on other machines."""
    given = config(tmp_path, a={})
    given["run"]["adopt"] = adopt
    saved = Saved(
        run="embedded",
        machine="another boot/1",
        agents=(AgentRecord(node="n1", incarnation="1"),),
        groups={"a": SavedGroup(size=1, configured=1)},
        draining="preempted",
    )
    (tmp_path / "state").mkdir(mode=0o700)
    private.replace(tmp_path / "state" / "state.json", msgspec.json.encode(saved))
    async with Supervisor(given) as supervisor:
        await supervisor.wait_ready(timeout=30)
        assert not supervisor.status().draining


async def test_a_prometheus_that_comes_regularly_sees_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = asyncio.Event(), Reporting.last_scrape

    async def noted(reporting: Reporting) -> None:
        waits.set()
        await wait(reporting)

    monkeypatch.setattr(Reporting, "last_scrape", noted)

    async def look(endpoint: str) -> str:
        def get() -> str:
            with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as answer:
                return str(answer.read().decode())

        await waits.wait()
        return await anyio.to_thread.run_sync(get)

    fails = {"command": [sys.executable, "-c", "raise SystemExit(7)"], "restart": {"max_restarts": 0}}
    async with Supervisor(config(tmp_path, a=fails)) as supervisor:
        for ago_s in (600.0, 0.0):
            supervisor._reporting._scrapes.note_scrape("127.0.0.1", time.monotonic() - ago_s)
        looking = asyncio.create_task(look(supervisor.endpoint))
        assert await supervisor.run_until_done() == 1
        status = supervisor.status()
        assert (status.exit_code, status.ended_by.partition(":")[0]) == (1, "group a failed with replica a/0")
    found = await looking
    assert 'replicas_run_over{run="embedded"} 1.0' in found
    assert 'replicas_run_exit_code{run="embedded"} 1.0' in found

"""A supervisor that leaves its run to the next one: nothing of it ends, nothing is
lost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from replicas import errors
from replicas.linux import private
from replicas.supervisor import Supervisor
from replicas.supervisor.fleet.local_agent import AGENT
from replicas.supervisor.state.state import StateDir
from tests.integration.supervisor.agent.test_agents import again, publishing, told, versions
from tests.integration.supervisor.test_supervisor_embedded import config
from tests.support.nodes import ready
from tests.support.runs import ROOT, Run, alive
from tests.support.waits import eventually

DETACH = (sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())", "detach")


def detach(run: Run) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*DETACH, str(run.config)], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_nothing_is_lost_between_two_supervisors(tmp_path: Path) -> None:
    """Under publishes, here and on another node: the same processes and generations,
    and no version number without a version."""
    with publishing(tmp_path, 60.0) as (run, agents):
        before = {name: ready(run, name) for name in ("trainer", "rollout")}
        agent = run.find(AGENT)
        for _ in range(2):
            done = detach(run)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == "the replicas run on; start the next supervisor with: replicas run CONFIG\n"
            assert run.left() == 0
            assert not (run.state_dir / "endpoint.json").exists()
            reached = versions(run)[-1]
            again(run)
            eventually(lambda reached=reached: versions(run)[-1] > reached + 2, "versions that go on", timeout_s=30)  # type: ignore[misc]  # mypy cannot infer a lambda with a default
            assert {name: ready(run, name) for name in ("trainer", "rollout")} == before
        assert run.find(AGENT) == agent
        assert [line for line in told(run) if "error" in line] == []
        found = versions(run)
        assert found == list(range(found[0], found[0] + len(found)))
        assert all(group.restarts == {} for group in run.status().groups)
        assert agents["n1"].popen.poll() is None
        (tmp_path / "out" / "stop").touch()
        assert run.wait(timeout_s=60) == 0
        assert agents["n1"].wait() == 0
        run.assert_nothing_left()


def test_when_nobody_follows_nothing_is_left(tmp_path: Path) -> None:
    with publishing(tmp_path, 5.0) as (run, agents):
        assert detach(run).returncode == 0
        assert run.left() == 0
        assert agents["n1"].wait() == 1
        run.assert_nothing_left(timeout_s=30)


@pytest.mark.anyio
async def test_it_is_refused_where_everything_would_end(tmp_path: Path) -> None:
    async with Supervisor(config(tmp_path, a={})) as supervisor:
        with pytest.raises(errors.UsageError, match=r"run\.adopt") as caught:
            await supervisor.detach()
        assert 'run.adopt = "2m"' in caught.value.hint
        await supervisor.wait_ready(timeout=30)
        await supervisor.drain(hurry=True)


@pytest.mark.anyio
async def test_a_program_leaves_its_run_to_the_next_supervisor(tmp_path: Path) -> None:
    given = config(tmp_path, a={})
    given["run"]["adopt"] = "60s"
    async with Supervisor(given) as first:
        await first.wait_ready(timeout=30)
        before = [(one.pid, one.generation) for one in first.status().groups[0].replicas]
        await first.detach()
        assert await first.run_until_done() == 0
        with pytest.raises(errors.UsageError, match="has left the run"):
            await first.drain()
    assert all(pid is not None and alive(pid) for pid, _ in before)
    async with Supervisor(given) as second:
        await second.wait_ready(timeout=30)
        assert [(one.pid, one.generation) for one in second.status().groups[0].replicas] == before
        await second.drain()
        with pytest.raises(errors.UsageError, match="being drained"):
            await second.detach()
    assert not any(pid is not None and alive(pid) for pid, _ in before)


@pytest.mark.anyio
async def test_a_start_that_fails_ends_nothing_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder takes no file any more, once everything else is open."""
    given = config(tmp_path, a={})
    given["run"]["adopt"] = "60s"
    async with Supervisor(given) as first:
        await first.wait_ready(timeout=30)
        before = [(one.pid, one.generation) for one in first.status().groups[0].replicas]
        await first.detach()
    (decided,) = tmp_path.rglob("decisions.jsonl")  # noqa: ASYNC240  # a folder of this test

    def full(*_: object, **__: object) -> None:
        raise errors.WorldError("cannot write to the state folder: No space left on device")

    with monkeypatch.context() as patch, pytest.raises(errors.WorldError, match="No space left"):
        patch.setattr(StateDir, "write", full)
        async with Supervisor(given):
            pytest.fail("it must not start")
    assert all(pid is not None and alive(pid) for pid, _ in before)
    assert decided.exists(), "version numbers would be used again"
    async with Supervisor(given) as third:
        await third.wait_ready(timeout=30)
        assert [(one.pid, one.generation) for one in third.status().groups[0].replicas] == before
        await third.drain()
    assert not any(pid is not None and alive(pid) for pid, _ in before)


async def crashed(given: dict[str, Any]) -> int | None:
    """Pid of the replica of a supervisor that has ended by an error of its own."""
    pid = None

    async def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
        async with Supervisor(given) as first:
            await first.wait_ready(timeout=30)
            pid = first.status().groups[0].replicas[0].pid
            first.spawn(fail)
            await first.run_until_done()
    return pid


@pytest.mark.anyio
async def test_an_error_in_the_supervisor_is_as_a_kill_of_it(tmp_path: Path) -> None:
    given = config(tmp_path, a={})
    given["run"]["adopt"] = "60s"
    pid = await crashed(given)
    assert pid is not None
    assert alive(pid)
    async with Supervisor(given) as second:
        await second.wait_ready(timeout=30)
        (replica,) = second.status().groups[0].replicas
        assert (replica.pid, replica.generation) == (pid, 1)


@pytest.mark.anyio
async def test_an_error_in_the_supervisor_without_adopt_ends_the_processes_and_not_the_run(tmp_path: Path) -> None:
    given = config(tmp_path, a={})
    pid = await crashed(given)
    assert pid is not None
    assert not alive(pid)
    events = [json.loads(line) for line in (tmp_path / "state" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == {"type": "RunEnded", "exit_code": 70, "reason": "an error in the supervisor"}
    async with Supervisor(given) as second:
        await second.wait_ready(timeout=30)
        assert second.status().groups[0].replicas[0].generation == 2, "its state goes on"


@pytest.mark.anyio
async def test_replicas_leave_a_machine_that_has_lost_their_label_meanwhile(tmp_path: Path) -> None:
    given = config(tmp_path, a={"placement": {"labels": {"pool": "x"}}}, b={})
    given["run"]["adopt"] = "60s"
    async with Supervisor({**given, "cluster": {"labels": {"pool": "x"}}}) as first:
        await first.wait_ready(timeout=30)
        pid = first.status().groups[0].replicas[0].pid
        assert pid is not None
        await first.detach()
    async with Supervisor({**given, "cluster": {"labels": {"pool": "y"}}}) as second:
        await second.wait_ready("b", timeout=30)
        group = second.fleet.groups["a"]
        with anyio.fail_after(30):
            await second.fleet.until(lambda: "waits for a node" in group.status(0.0).replicas[0].reason)
        assert group.status(0.0).replicas[0].reason == "its config has changed; waits for a node with pool=x"
        assert not alive(pid)
        await second.drain()


ORDERS: dict[str, Callable[[Supervisor], Awaitable[object]]] = {
    "detach": lambda one: one.detach(),
    "scale": lambda one: one.scale("a", 2),
    "restart": lambda one: one.restart("a/0"),
    "restart, rolling": lambda one: one.restart("a", rolling=True),
    "drain a replica": lambda one: one.drain("a/0"),
    "drain a node": lambda one: one.drain_node(one.status().nodes[0].name),
    "reset": lambda one: one.reset_failed(),
    "reload": lambda one: one.reload(one.config),
    "rotate": lambda one: one.tokens("member", rotate=True),
}


@pytest.mark.anyio
async def test_orders_that_the_disk_does_not_take_are_refused_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(tmp_path, a={})
    given["run"]["adopt"] = "60s"
    replace = private.replace

    def full(path: Path, data: bytes, **options: bool) -> None:
        if path.name in ("state.json", "tokens.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, data, **options)

    async with Supervisor(given) as supervisor:
        await supervisor.wait_ready(timeout=60)
        before, tokens = supervisor.status().groups, await supervisor.tokens()
        with monkeypatch.context() as patched:
            patched.setattr(private, "replace", full)
            for name, order in ORDERS.items():
                with pytest.raises(errors.WorldError, match="No space left on device") as caught:
                    await asyncio.wait_for(order(supervisor), 30)
                assert str(tmp_path / "state") in str(caught.value), name
        await asyncio.sleep(0.3)  # what an order had begun would show
        (now,) = supervisor.status().groups
        assert (now.size, [(one.pid, one.generation, one.state) for one in now.replicas]) == (
            before[0].size,
            [(one.pid, one.generation, "ready") for one in before[0].replicas],
        )
        assert await supervisor.tokens() == tokens
        assert not supervisor.detached
        assert [node.state for node in supervisor.status().nodes] == ["up"]
        await supervisor.drain()


def lose(state: Path, old: bytes) -> None:
    state.unlink()


def change_schema(state: Path, old: bytes) -> None:
    state.write_bytes(state.read_bytes().replace(b'"schema":1', b'"schema":99'))


def put_old(state: Path, old: bytes) -> None:
    state.write_bytes(old)


@pytest.mark.anyio
@pytest.mark.parametrize("spoil", [lose, change_schema, put_old])
async def test_what_no_state_names_ends_before_anything_starts(
    spoil: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    """The agent of this machine lives, and says what it runs: that ends first, and no
    number of a generation is used twice."""
    given = config(tmp_path, a={})
    given["run"]["adopt"] = "60s"
    state = tmp_path / "state" / "state.json"
    async with Supervisor(given) as first:
        await first.wait_ready(timeout=60)
        old = state.read_bytes()
        await first.restart("a/0")
        await first.wait_ready(timeout=60)
        (before,) = first.status().groups[0].replicas
        assert before.generation == 2
        await first.detach()
        await first.run_until_done()
    spoil(state, old)
    assert before.pid is not None
    assert alive(before.pid)
    async with Supervisor(given) as second:
        await second.wait_ready(timeout=60)
        (after,) = second.status().groups[0].replicas
        assert after.generation > before.generation
        assert not alive(before.pid)
        told = [json.loads(line)["event"] for line in (tmp_path / "state" / "events.jsonl").read_text().splitlines()]
        assert [event["seconds"] for event in told if event["type"] == "LeasesAwaited"] == [68.0]
        numbers = [event["generation"] for event in told if event.get("event") in ("start", "backoff_elapsed")]
        assert len(numbers) == len({*numbers})
        await second.drain()
    assert after.pid is not None
    assert not alive(after.pid)
    assert not (tmp_path / "state" / "leases").exists()

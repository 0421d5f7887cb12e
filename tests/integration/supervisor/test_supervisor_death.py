"""kill -9 of the supervisor: what the next one knows, what it sweeps, and that its
counters are those of the events."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replicas import environ
from replicas.linux.processes import MARK, start_time
from replicas.supervisor.state import leftovers, locked_folder
from replicas.supervisor.state.run_state import ProcessRecord, Saved, ShimRecord, machine, this_process
from replicas.supervisor.state.state import AlreadySupervised, StateDir
from replicas.telemetry.events import ConnectionsRefused, RunStarted, StateSetAside
from tests.support.processes import kill
from tests.support.programs import PUBLISHES, RECEIVES, group
from tests.support.runs import Run, alive, running
from tests.support.waits import eventually

FAILS_TWICE = """
import os, sys, time
generation = int(os.environ["REPLICAS_GENERATION"])
print("generation", generation, flush=True)
if generation < 3:
    sys.exit(3)
time.sleep(600)
"""
FAILS = """
import os, sys
open(os.environ["OUT"] + "/generations", "a").write(os.environ["REPLICAS_GENERATION"] + "\\n")
sys.exit(3)
"""


def lines(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.state_dir / "events.jsonl").read_text().splitlines()]


def kinds(run: Run, kind: str) -> list[dict[str, Any]]:
    return [record["event"] for record in lines(run) if record["event"]["type"] == kind]


def counters(run: Run) -> dict[tuple[str, ...], float]:
    """Every counter and the size of every histogram by name and values of its labels,
    as far as it is not 0."""
    with urllib.request.urlopen(f"http://{run.endpoint()}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        (
            sample.name.removeprefix("replicas_"),
            *(one for name, one in sample.labels.items() if name != "run"),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram") and sample.value and not sample.name.endswith(("_bucket", "_sum"))
    }


def counted(run: Run) -> dict[tuple[str, ...], float]:
    """The same from the file of events, by means of its own."""
    found: Counter[tuple[str, ...]] = Counter()
    for record in lines(run):
        event = record["event"]
        match event["type"]:
            case "Transition":
                for key, name in (("start_s", "start_duration"), ("recovery_s", "recovery_duration")):
                    found[f"{name}_seconds_count", event["group"]] += event[key] is not None
                again = bool(event["restart_reason"])
                found["restarts_total", event["group"], str(event["restart_reason"])] += again
                found["replica_restarts_total", event["group"], str(event["replica"])] += again
            case "SyncEnded":
                sync, channel = event["record"], event["channel"]
                found["sync_total", channel, sync["outcome"]] += 1
                if sync["outcome"] == "committed":
                    found["sync_bytes_total", channel] += sync["moved_nbytes"]
                    found["sync_duration_seconds_count", channel] += 1
                    for replica, nbytes in sync["moved_to"].items():
                        found["received_bytes_total", channel, *replica.split("/")] += nbytes
                    for phase in (*sync["phases"], "total"):
                        found["sync_phase_seconds_count", channel, phase] += 1
            case "CaughtUp":
                found["sync_bytes_total", event["channel"]] += event["moved_nbytes"]
                for replica, nbytes in event["moved_to"].items():
                    found["received_bytes_total", event["channel"], *replica.split("/")] += nbytes
            case "ReplicaLoaded":
                found["load_duration_seconds_count", event["channel"], event["group"]] += bool(event["load_s"])
            case "OperationEnded":
                found["operations_total", event["channel"], event["kind"], event["outcome"]] += 1
                found["operation_duration_seconds_count", event["channel"], event["kind"]] += 1
            case "Retried":
                found["sync_retries_total", event["channel"], event["reason"]] += 1
            case "SidecarReplaced":
                found["sidecar_replacements_total", event["reason"]] += event["count"]
            case "ConnectionsRefused":
                found["refused_total", event["reason"]] += event["count"]
    return {key: float(count) for key, count in found.items() if count}


def test_the_next_supervisor_goes_on_where_the_killed_one_stopped(tmp_path: Path) -> None:
    rules = 'restart = { initial_delay = "50ms", max_restarts = 4 }'
    with running(tmp_path, group("a", FAILS_TWICE, rules)) as first:
        first.wait_line("starting (generation 3)")
        eventually(lambda: first.status().groups[0].replicas[0].state == "ready", "a/0")
        kill(first.pid)
        first.assert_nothing_left()
        first.wait()
        with running(tmp_path, group("a", FAILS_TWICE, rules)) as second:
            second.wait_line("starting (generation 4)")
            status = second.status().groups[0]
            assert status.restarts == {"exit": 2}
            assert status.restart_budget_remaining_ratio == 0.5
            assert status.replicas[0].generation == 4
            assert counters(second)["restarts_total", "a", "exit"] == 2
            assert [event["resumed"] for event in kinds(second, "RunStarted")] == [False, True]
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert not (second.state_dir / "state.json").exists()  # it ended in order: the next one begins afresh
        assert [record["seq"] for record in lines(second)] == [*range(1, len(lines(second)) + 1)]
        assert [event["exit_code"] for event in kinds(second, "RunEnded")] == [0]


def test_a_budget_holds_over_the_death_of_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    rules = 'restart = { initial_delay = "1ms", max_delay = "2ms", max_restarts = 4 }'
    with running(tmp_path, group("a", FAILS, rules)) as run:
        run.wait_line("starting again")
        run.wait_line("starting again")
        kill(run.pid)
        run.assert_nothing_left()
        run.wait()
    with running(tmp_path, group("a", FAILS, rules)) as run:
        assert run.wait() == 1
    steps = [event["event"] for event in kinds(run, "Transition")]
    assert 2 <= steps.count("retry") <= 4
    ran = [int(line) for line in (tmp_path / "generations").read_text().split()]
    assert ran == sorted(set(ran))  # none twice
    assert len(ran) <= 1 + 4 + 1  # the first, the budget, and the one that the death of the supervisor took


@pytest.mark.parametrize("content", [b"", b'{"schema":99}'])
def test_a_state_that_is_not_understood_is_set_aside_and_counters_go_on(tmp_path: Path, content: bytes) -> None:
    folder = StateDir(tmp_path, "r")
    folder.acquire()
    assert not folder.resumed
    folder.open_events(1 << 20).emit(ConnectionsRefused(reason="token", count=3))
    folder.run_state.path.write_bytes(content)
    folder.release()  # without a word of an end: as if it had been killed
    again = StateDir(tmp_path, "r")
    again.acquire()
    assert again.resumed
    assert again.saved is None
    events = again.open_events(1 << 20)
    assert events.tally.refused == {"token": 3}
    assert [type(record.event) for record in events.after(2)] == [RunStarted, StateSetAside]
    assert (tmp_path / "state.json.bad").read_bytes() == content
    again.release(ended=True)


def is_up(run: Run, version: int) -> bool:
    status = run.status()
    return status.ready and status.channels[0].committed_version >= version


def test_events_and_metrics_of_a_busy_run_agree_over_the_death_of_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    more = 'restart = { initial_delay = "100ms" }'
    text = group("trainer", PUBLISHES, more) + group("rollout", RECEIVES, more)
    text += '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\ndeadline = "20s"\n'
    first = busy_round(tmp_path, text, Progress(0, 0))
    second = busy_round(tmp_path, text, first)
    assert second.counters["restarts_total", "rollout", "signal"] == 2
    assert second.counters["refused_total", "token"] == 2


class Progress(NamedTuple):
    epoch: int
    version: int
    counters: dict[tuple[str, ...], float] = {}


def busy_round(folder: Path, text: str, before: Progress) -> Progress:
    """A supervisor's life: versions, a lost rollout, a refused order; then nothing
    moves, is compared, and it is killed."""
    with running(folder, text) as run:
        run.wait_line("control at")
        eventually(lambda: is_up(run, before.version + 2), "a run that publishes", timeout_s=60)
        assert run.status().channels[0].epoch > before.epoch
        order = urllib.request.Request(f"http://{run.endpoint()}/drain", b"{}", {"Authorization": "Bearer wrong"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(order, timeout=10)
        trainer, rollout = (group.replicas[0].pid for group in run.status().groups)
        assert trainer is not None
        assert rollout is not None
        kill(rollout)
        run.wait_line("rollout/0: rank 0 was killed by SIGKILL")
        run.wait_line("rollout/0: ready after", timeout_s=60)
        kill(trainer, signal.SIGSTOP)  # no sync ends any more while we compare
        eventually(lambda: counters(run) == counted(run), "the same numbers")
        channel = run.status().channels[0]
        after = Progress(channel.epoch, channel.committed_version, counters(run))
        assert after.counters["sync_total", "policy", "committed"] >= 2
        kill(run.pid)
        run.assert_nothing_left()
        run.wait()
    return after


# ------------------------------------------------------------ leftovers


@contextmanager
def sleeper(variables: Mapping[str, str] | None = None, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process with these environment variables."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **(variables or {})}, pass_fds=fds) as process:
        try:
            yield process
        finally:
            process.kill()


def shim(nonce: str, process: ProcessRecord | None = None) -> ShimRecord:
    return ShimRecord(nonce=nonce, group="a", replica=1, generation=2, process=process)


def record(pid: int, *, later: int = 0) -> ProcessRecord:
    started = start_time(pid)
    assert started is not None
    return ProcessRecord(pid, started + later)


def test_leftovers_are_found_by_record_mark_and_identity_and_nothing_else_is_touched() -> None:
    identity = "1" * 32
    ours, other = secrets.token_hex(8), secrets.token_hex(8)
    with (
        sleeper() as recorded,
        sleeper({MARK: ours}) as marked,
        sleeper({MARK: other, environ.STATE_ID: identity}) as unrecorded,
        sleeper() as reused,
        sleeper({MARK: other}) as stranger,
        sleeper({environ.STATE_ID: identity}) as observer,
    ):
        shims = (shim(ours), shim("x", record(recorded.pid)), shim("y", record(reused.pid, later=-1)))
        dead = ProcessRecord(os.getpid(), this_process().start_time - 1)
        saved = Saved(run="r", machine=machine(), supervisor=dead, shims=shims)
        found = {one.pid: one for one in leftovers.find(saved, identity)}
        assert {pid: one.how for pid, one in found.items()} == {
            recorded.pid: "record",
            marked.pid: "mark",
            unrecorded.pid: "identity",
        }
        assert (found[marked.pid].group, found[marked.pid].replica, found[marked.pid].generation) == ("a", 1, 2)
        assert found[marked.pid].command == "sleep 600"
        elsewhere = Saved(run="r", machine="another", supervisor=this_process(), shims=shims[1:])
        assert [one.pid for one in leftovers.find(elsewhere, identity)] == [unrecorded.pid]
        living = Saved(run="r", machine=machine(), supervisor=this_process(), shims=shims)
        assert [one.pid for one in leftovers.find(living, identity)] == [unrecorded.pid]
        swept = leftovers.sweep(saved, identity)
        assert {one.pid for one in swept} == set(found)
        assert all(one.swept for one in swept)
        assert all(alive(process.pid) for process in (reused, stranger, observer))
        assert leftovers.sweep(saved, identity) == []


def test_a_dead_supervisors_process_that_keeps_the_lock_is_swept_only_if_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_folder, "SETTLE_S", 0.2)
    monkeypatch.setattr(StateDir, "patience_s", 0.5)
    folder = StateDir(tmp_path, "r")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, f"{os.getpid()} 1".encode())  # a process of this pid that has ended long ago
    with sleeper(fds=(lock,)) as holder:
        os.close(lock)
        with pytest.raises(AlreadySupervised, match=f"still alive: {holder.pid} "):
            folder.acquire()
        dead = ProcessRecord(os.getpid(), 1)
        frozen = shim("x", record(holder.pid))
        folder.run_state.save(Saved(run="r", machine=machine(), supervisor=this_process(), shims=(frozen,)))
        with pytest.raises(AlreadySupervised):  # the state is that of a living one
            folder.acquire()
        assert alive(holder.pid)
        folder.run_state.save(Saved(run="r", machine=machine(), supervisor=dead, shims=(frozen,)))
        folder.acquire()
        assert [(one.pid, one.swept) for one in folder.leftovers] == [(holder.pid, True)]
        assert folder.resumed
        with pytest.raises(AlreadySupervised, match=f"already supervised by process {os.getpid()}"):
            StateDir(tmp_path, "r").acquire()
        folder.release()
    assert folder.run_state.path.exists()

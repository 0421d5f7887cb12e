"""The state file: whole or not there, read back as it was, and never fatal.

Covers: supervisor/state/run_state.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from replicas.supervisor.state.run_state import (
    SCHEMA,
    ProcessRecord,
    RunState,
    Saved,
    SavedGroup,
    SavedReplica,
    SavedRestart,
    ShimRecord,
    machine,
    this_process,
)
from replicas.telemetry.tally import Histogram, Tally
from tests.support.machine.full_disk import file_size_limit

STATE = Saved(
    run="r",
    machine=machine(),
    supervisor=this_process(),
    at=1.0,
    seq=7,
    tally=Tally(restarts={"a": {"exit": 2}}, starts={"a": Histogram([1, 2], 3.0)}, epochs={"p": 4}),
    groups={
        "a": SavedGroup(
            size=3,
            configured=2,
            replicas={0: SavedReplica(generation=3, restarts={"exit": 2}, cycles=1, last_exit="rank 0 died")},
            spent=(SavedRestart(1.0, 0), SavedRestart(2.0, 0)),
        )
    },
    shims=(
        ShimRecord(nonce="x", group="a", replica=0, generation=3),
        ShimRecord(nonce="y", group="a", replica=1, generation=1, process=ProcessRecord(5, 6), cgroup="/sys/x"),
    ),
)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = RunState(tmp_path / "state.json")
    assert state.load() is None
    assert state.save(STATE)
    assert state.load() == STATE == state.peek()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert state.path.stat().st_mode & 0o777 == 0o600
    state.remove()
    state.remove()
    assert state.load() is None


def test_whose_records_they_are() -> None:
    assert STATE.of_this_machine()
    assert STATE.supervisor is not None
    assert STATE.supervisor.alive()
    assert not ProcessRecord(STATE.supervisor.pid, STATE.supervisor.start_time - 1).alive()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "torn"),
        (b'{"schema":1,"run":"r","gro', "torn"),
        (b'{"schema":%d,"run":"r"}' % (SCHEMA + 1), f"schema is {SCHEMA + 1}, this version knows {SCHEMA}"),
        (b'{"schema":1,"run":5}', "damaged"),
        (b"[1]", "not a state"),
    ],
)
def test_what_is_not_understood_is_set_aside(tmp_path: Path, content: bytes, reason: str) -> None:
    state = RunState(tmp_path / "state.json")
    for _ in range(2):  # an older one makes place
        state.path.write_bytes(content)
        assert state.peek() is None
        assert state.path.exists()
        assert state.load() is None
        assert state.set_aside is not None
        bad, said = state.set_aside
        assert reason in said
        assert bad.read_bytes() == content
        assert not state.path.exists()


def test_a_full_disk_leaves_the_state_before_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = RunState(tmp_path / "state.json")
    assert state.save(Saved(run="before"))
    with file_size_limit(100):
        assert not state.save(STATE)
        assert not state.save(STATE)
    assert len(caplog.records) == 1
    left = state.peek()
    assert left is not None
    assert left.run == "before"
    assert state.save(STATE)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]

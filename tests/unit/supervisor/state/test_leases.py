"""What a supervisor takes over, and what it must wait for, by what it finds on disk.

Covers: supervisor/state/predecessor.py, supervisor/state/leases.py,
supervisor/state/state.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from replicas.linux.processes import boot_id
from replicas.supervisor.fleet.context import FleetContext
from replicas.supervisor.fleet.generation import save_start
from replicas.supervisor.state.leases import Lease, Leases
from replicas.supervisor.state.predecessor import Predecessor, find_predecessor
from replicas.supervisor.state.run_state import (
    AgentRecord,
    ProcessRecord,
    Saved,
    SavedGroup,
    SavedReplica,
    machine,
    this_process,
)
from replicas.supervisor.state.state import StateDir
from tests.support.machine.full_disk import file_size_limit

FAR = Lease(node="b", incarnation="i", scope="elsewhere", lease_s=20.0)
HERE = Lease(node="a", incarnation="j", local=True, scope=machine(), lease_s=23.0, process=this_process())
DEAD = msgspec.structs.replace(HERE, process=ProcessRecord(this_process().pid, 1))
ANOTHER_SPACE = msgspec.structs.replace(HERE, scope=f"{boot_id()}/1")
ANOTHER_MACHINE = msgspec.structs.replace(HERE, scope="another/1")
LONGEST_S = 50.0


def leases_of(folder: Path, *records: Lease, starts: int = 3) -> Leases:
    """As the next supervisor finds them."""
    made = Leases(folder / "leases")
    made.load()
    made.starts = starts
    made.write(records)
    made.write_starts()
    return found_in(folder)


def found_in(folder: Path) -> Leases:
    found = Leases(folder / "leases")
    found.load()
    return found


def state(**changes: Any) -> Saved:
    return msgspec.structs.replace(Saved(run="r", machine=machine(), starts=3), **changes)


def taken(saved: Saved | None, leases: Leases, *, crashed: bool = True) -> Predecessor:
    return find_predecessor(saved, leases, crashed=crashed, longest_s=LONGEST_S)


def test_the_file_keeps_numbers_and_leases(tmp_path: Path) -> None:
    leases = leases_of(tmp_path, FAR, HERE, starts=12)
    assert leases.found
    assert leases.records == (FAR, HERE)
    assert (leases.starts, leases.floor) == (12, 0)
    leases.reserve_generation(3)
    leases.starts = 13
    leases.write_starts()
    leases.raise_floor(leases.records)
    found = found_in(tmp_path)
    assert (found.starts, found.floor, found.records) == (13, 18, (FAR, HERE))
    assert leases.path.stat().st_mode & 0o777 == 0o600


def test_what_another_release_has_written_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "leases").write_bytes(
        b'{"starts":7,"generations":16,"epoch":4}\n'
        b'{"node":"b","incarnation":"i","scope":"elsewhere","lease_s":20.0,"rack":{"row":3}}\n'
        b'{"node":7}\n'
    )
    found = found_in(tmp_path)
    assert (found.starts, found.records) == (7, (FAR, Lease(unseen=True)))
    left = taken(state(starts=7), found)
    assert left.is_newest
    assert [(one.node, one.lease_s) for one in left.unseen] == [("", LONGEST_S)], "what is not understood counts"


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b'{"starts":"x"}\n', b"[]\n"])
def test_a_damaged_file_makes_everything_wait_for_the_longest_lease(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "leases").write_bytes(content)
    left = taken(state(), found_in(tmp_path))
    assert [(one.node, one.lease_s) for one in left.unseen] == [("", LONGEST_S)]
    assert not left.is_newest


@pytest.mark.parametrize("content", [b"", None])
def test_a_file_that_tells_nothing_stays_until_the_wait_is_on_disk(content: bytes | None, tmp_path: Path) -> None:
    """A supervisor that is killed in between leaves the wait to the next one."""
    path = tmp_path / "leases"
    first = StateDir(tmp_path, "r", longest_lease_s=LONGEST_S)
    first.acquire()
    used = {"a": SavedGroup(size=1, replicas={0: SavedReplica(generation=20)})}
    first.run_state.save(state(groups=used))
    os.close(first.lock)
    path.unlink() if content is None else path.write_bytes(content)
    found_in(tmp_path)
    assert (path.read_bytes() if path.exists() else None) == content
    for _ in range(2):
        killed = supervised(tmp_path)
        assert [(one.node, one.lease_s) for one in killed.heritage.unseen] == [("", LONGEST_S)]
        assert killed.leases.floor == 36, "as many as may be reserved at a time lie behind the number in the state"
        os.close(killed.lock)


def test_a_damaged_file_counts_after_a_run_that_ended_in_order(tmp_path: Path) -> None:
    """It stays only where something is left."""
    (tmp_path / "leases").write_bytes(b"")
    left = taken(None, found_in(tmp_path), crashed=False)
    assert [(one.node, one.lease_s) for one in left.unseen] == [("", LONGEST_S)]


def test_a_lease_that_the_disk_does_not_take_is_not_there(tmp_path: Path) -> None:
    leases = leases_of(tmp_path)
    with file_size_limit(60), pytest.raises(OSError, match=r"File too large|No space"):
        leases.write((FAR,))
    assert leases.records == found_in(tmp_path).records == ()
    with file_size_limit(60):
        leases.starts = 4
        leases.write_starts()  # it takes no room
    assert found_in(tmp_path).starts == 4


def test_a_file_that_is_purged_while_the_run_lives_is_made_again(tmp_path: Path) -> None:
    leases = leases_of(tmp_path, FAR)
    leases.path.unlink()
    leases.starts = 4
    leases.write_starts()
    found = found_in(tmp_path)
    assert (found.starts, found.records) == (4, (FAR,))


def test_a_start_that_the_state_does_not_name_is_not_counted(tmp_path: Path) -> None:
    """Else a later write of the leases would make the state on disk an old one."""
    run, saves = supervised(tmp_path), [False, False, True]
    spec: Any = SimpleNamespace()
    context = FleetContext(
        config=spec,
        state=run,
        resources=spec,
        emit=spec,
        say=spec,
        save=lambda *, order=False: saves.pop(0),
        spawn=spec,
        start_shim=spec,
    )
    run.run_state.save(state(starts=0))
    with file_size_limit(10):
        assert not run.run_state.save(state(starts=1))
    assert [bool(save_start(context, 1)) for _ in range(2)] == [True, True]
    run.leases.write((FAR,))
    assert taken(state(starts=0), found_in(tmp_path)).is_newest
    assert not save_start(context, 1)
    assert found_in(tmp_path).starts == 1
    run.release(ended=True, left=())


def test_leases_are_synced_with_their_folder_before_they_are_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases, synced = leases_of(tmp_path), list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    leases.write((FAR,))
    assert synced == ["leases.new", tmp_path.name]
    leases.write((FAR,))
    assert len(synced) == 2, "what is there already costs nothing"


def test_nothing_is_waited_for_at_a_first_start(tmp_path: Path) -> None:
    assert taken(None, found_in(tmp_path), crashed=False) == Predecessor()


def test_the_newest_state_tells_what_runs(tmp_path: Path) -> None:
    agents = (AgentRecord(node="b", incarnation="i", scope="elsewhere", lease_s=20.0),)
    left = taken(state(agents=agents), leases_of(tmp_path, FAR))
    assert (left.agents, left.leases, left.unseen, left.is_newest) == (agents, (FAR,), (), True)


@pytest.mark.parametrize("starts", [0, 2])
def test_under_a_state_that_is_old_anything_may_run(starts: int, tmp_path: Path) -> None:
    left = taken(state(starts=starts), leases_of(tmp_path, FAR, HERE))
    assert (left.unseen, left.is_newest, left.known) == ((FAR, HERE), False, this_process())


def test_after_another_boot_no_state_is_known_to_be_the_newest(tmp_path: Path) -> None:
    left = taken(state(machine="another/1"), leases_of(tmp_path, FAR, ANOTHER_MACHINE))
    assert (left.unseen, left.is_newest) == ((FAR, ANOTHER_MACHINE), False)


def test_under_a_lost_state_anything_may_run(tmp_path: Path) -> None:
    left = taken(None, leases_of(tmp_path, FAR, HERE, DEAD))
    assert left.unseen == (FAR, HERE), "what a dead agent of this machine has left is swept"
    assert not left.is_newest


def test_what_nobody_knew_of_is_waited_for_under_the_next_state_too(tmp_path: Path) -> None:
    unseen = msgspec.structs.replace(FAR, unseen=True)
    left = taken(state(), leases_of(tmp_path, unseen))
    assert (left.unseen, left.is_newest) == ((unseen,), True)


@pytest.mark.parametrize(("saved", "crashed"), [(None, True), (state(), True)])
def test_without_the_file_of_leases_the_longest_is_waited_for(
    saved: Saved | None, crashed: bool, tmp_path: Path
) -> None:
    left = taken(saved, found_in(tmp_path), crashed=crashed)
    assert [(one.node, one.lease_s) for one in left.unseen] == [("", LONGEST_S)]


def test_the_state_of_a_release_that_kept_no_leases_is_taken_over(tmp_path: Path) -> None:
    agents = (AgentRecord(node="b", incarnation="i", scope="elsewhere", lease_s=20.0),)
    left = taken(state(starts=0, agents=agents), found_in(tmp_path))
    assert (left.agents, left.unseen, left.is_newest) == (agents, (), True)


def test_a_run_that_grants_no_leases_waits_for_none(tmp_path: Path) -> None:
    left = find_predecessor(None, found_in(tmp_path), crashed=True, longest_s=0.0)
    assert (left.unseen, left.is_newest) == ((), False)


@pytest.mark.parametrize(
    ("lease", "kept", "known"), [(HERE, True, True), (DEAD, False, False), (ANOTHER_SPACE, True, False)]
)
def test_an_agent_of_this_machine_is_taken_over_from_the_same_namespace_only(
    lease: Lease, kept: bool, known: bool, tmp_path: Path
) -> None:
    """Elsewhere nobody can say whether it lives: its lease counts."""
    agent = AgentRecord(node="a", incarnation="j", local=True, scope=lease.scope, process=lease.process, lease_s=23.0)
    left = taken(state(agents=(agent,)), leases_of(tmp_path, lease))
    assert [one.node for one in left.agents] == (["a"] if kept else [])
    assert left.known == (this_process() if known else None)
    assert left.unseen == ()


def test_without_adopt_nothing_of_another_namespace_is_left_when_the_lock_is_free(tmp_path: Path) -> None:
    agent = AgentRecord(node="a", incarnation="j", local=True, scope=ANOTHER_SPACE.scope, process=this_process())
    assert taken(state(agents=(agent,)), leases_of(tmp_path)).agents == ()


def supervised(folder: Path) -> StateDir:
    made = StateDir(folder, "r", longest_lease_s=LONGEST_S)
    made.acquire()
    return made


def test_a_killed_supervisor_leaves_its_leases_and_one_that_ends_none(tmp_path: Path) -> None:
    killed = supervised(tmp_path)
    assert killed.heritage == Predecessor()
    killed.leases.write((FAR,))
    killed.leases.reserve_generation(1)
    os.close(killed.lock)
    second = supervised(tmp_path)
    assert second.heritage.unseen == (FAR,), "its state is lost"
    assert second.leases.floor == 16
    assert second.resumed
    assert [one.unseen for one in found_in(tmp_path).records] == [True], "whatever state is saved from now on"
    second.release(ended=True, left=())
    assert not second.leases.path.exists()
    third = supervised(tmp_path)
    assert (third.heritage, third.leases.floor) == (Predecessor(), 0)
    third.release(ended=True, left=())


def test_a_run_that_ends_without_a_node_leaves_the_lease_of_that(tmp_path: Path) -> None:
    first = supervised(tmp_path)
    first.leases.write((FAR, HERE))
    first.leases.reserve_generation(4)
    left = msgspec.structs.replace(FAR, unseen=True)
    first.release(ended=True, left=(left,))
    second = supervised(tmp_path)
    assert second.heritage.unseen == (left,)
    assert second.leases.floor == 19
    assert not second.resumed, "its versions begin anew, and so do the counters"
    second.release(ended=True, left=())


def test_a_run_whose_state_is_lost_goes_on_after_starts_that_fail(tmp_path: Path) -> None:
    killed = supervised(tmp_path)
    killed.leases.write((FAR,))
    killed.decisions_file.touch()
    os.close(killed.lock)
    for _ in range(3):
        failed = supervised(tmp_path)
        assert failed.resumed
        failed.release()

"""Events: on disk and back, counted once, and told to whoever follows; the disk may
fail, the run goes on.

Covers: telemetry/event_log.py, telemetry/events.py.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.core.base.effects import (
    CaughtUp,
    EpochStarted,
    LoadFailed,
    MemberJoined,
    MemberLost,
    OperationEnded,
    ReplicaIdle,
    ReplicaLoaded,
    Retried,
    SidecarReplaced,
    StepFell,
    StoreChanged,
    SyncEnded,
    VersionDecided,
    WrongBytes,
)
from replicas.core.lives.lifecycle import Lifecycle
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.linux import private
from replicas.messages.identity import Member
from replicas.status import ChannelStatus, GroupStatus, RunStatus, StoreStatus, SyncRecord
from replicas.telemetry.event_log import EventLog, read
from replicas.telemetry.events import (
    ConnectionsRefused,
    Drained,
    Draining,
    Event,
    EventsLost,
    FailedReset,
    HeldUp,
    LeasesAwaited,
    LeftoverFound,
    LogLinesDropped,
    NodeChanged,
    RankEnd,
    Record,
    Reloaded,
    ReloadRefused,
    ReplicaExited,
    RestartAsked,
    RunEnded,
    RunStarted,
    Scaled,
    StacksSaved,
    StateSetAside,
    TokenChanged,
    decode,
    encode,
)
from replicas.telemetry.tally import CounterDeltas, Tally
from tests.support.machine.full_disk import file_size_limit

RANK = Member("a", 0, 1, "n")
SYNC = SyncRecord(version=3, outcome="committed", seconds=0.2, nbytes=10, moved_nbytes=20, phases={"pack": 0.1})


def life() -> list[Event]:
    """The steps of a replica that dies once."""
    one = Lifecycle("a", 0, now=0.0)
    steps = (Step.START, Step.READY, Step.RETRY, Step.BACKOFF_ELAPSED, Step.READY)
    return [one.apply(step, now=float(now), restart_reason="signal") for now, step in enumerate(steps)]


EVERYTHING: list[Event] = [
    RunStarted(run="r", pid=1, version="0"),
    *life(),
    MemberJoined("p", RANK),
    MemberLost("p", RANK, "exited"),
    EpochStarted("p", 4, (RANK,)),
    SyncEnded("p", SYNC),
    SyncEnded("p", SyncRecord(version=0, outcome="busy", seconds=1.0, nbytes=0)),
    StepFell("p", 3, 0, 812),
    CaughtUp("p", 3, (RANK,), 10),
    WrongBytes("p", 3, RANK, "b/0/0", "block 1"),
    VersionDecided("p", 3, "scored", "reward", 0.5, "by hand"),
    Retried("p", "lost"),
    LoadFailed("p", "g", 0, 3, "boom", kept=True),
    SidecarReplaced("p", "lost", 2),
    ReplicaLoaded("p", "a", 0, 3),
    ReplicaIdle("p", "a", 0, 1),
    OperationEnded("p", "all_reduce", "SyncError", 0.1, "no byte has moved"),
    StoreChanged("p", True),
    Scaled(group="a", before=1, after=2),
    RestartAsked(target="a/0"),
    FailedReset(replicas=("a/0",)),
    Reloaded(changed=("a",)),
    ReloadRefused(problems=("no",)),
    ReplicaExited(
        group="a", replica=0, generation=1, outcome="failed", ranks=(RankEnd(rank=0, code=-9, pid=5, text="x"),)
    ),
    HeldUp(group="a", replica=0, generation=1, what="port 1", holder="2"),
    StacksSaved(group="a", replica=0, generation=1, reason="stuck"),
    LogLinesDropped(group="a", replica=0, generation=1, count=7),
    LeftoverFound(pid=3, start_time=4, command="x", how="mark"),
    NodeChanged(node="n1", before="up", after="away"),
    TokenChanged(role="member", change="rotated"),
    StateSetAside(path="/x", reason="torn"),
    LeasesAwaited(nodes=("n1", ""), seconds=34.0),
    ConnectionsRefused(reason="token", count=3),
    EventsLost(count=5, reason="full"),
    Draining(target=""),
    Drained(target="", seconds=1.0),
    RunEnded(exit_code=0),
]


def refusals(log: EventLog, count: int) -> None:
    for _ in range(count):
        log.emit(ConnectionsRefused(reason="token", count=1))


async def followed(log: EventLog, after: int | None, count: int) -> list[int]:
    records = log.follow(after)
    return [(await anext(records)).seq for _ in range(count)]


def test_every_kind_of_event_comes_back_from_its_line_as_it_was() -> None:
    assert {type(event) for event in EVERYTHING} == set(get_args(Event))
    for seq, event in enumerate(EVERYTHING, 1):
        record = Record(seq, 1.5, event)
        line = encode(record)
        assert b"\n" not in line
        assert decode(line) == record


def test_the_counters_are_the_fold_of_the_events() -> None:
    tally = Tally()
    for event in EVERYTHING:
        tally.count(event)
    assert tally.restarts == {"a": {"signal": 1}}
    assert tally.starts["a"].cumulative()[-1] == 2
    assert tally.recoveries["a"].total_s == 2.0
    assert tally.syncs == {"p": {"committed": 1, "busy": 1}}
    assert tally.sync_nbytes == {"p": 30}
    assert {phase: spread.total_s for phase, spread in tally.sync_phases["p"].items()} == {"pack": 0.1, "total": 0.2}
    assert tally.retries == {"p": {"lost": 1}}
    assert tally.sidecars == {"lost": 2}
    assert tally.refused == {"token": 3}
    tally.count(LogLinesDropped(group="a", replica=0, generation=1, count=9, where="tee"))  # the log has them
    assert tally.log_lines_dropped == {"a": 7}
    assert tally.events_lost == 5
    assert tally.epochs == {"p": 4}
    assert tally.members == {"p": set()}
    tally.count(MemberJoined("p", RANK))
    assert tally.members == {"p": {RANK}}
    assert not tally.reload_ok
    assert msgspec.json.decode(msgspec.json.encode(tally), type=Tally) == tally
    tally.count(RunStarted(run="r", pid=2, version="0", resumed=True))
    assert tally.restarts
    tally.count(RunStarted(run="r", pid=3, version="0"))
    assert tally == Tally()


def test_a_status_shows_the_counters_of_the_events() -> None:
    tally = Tally()
    for event in EVERYTHING:
        tally.count(event)
    status = RunStatus(
        run="r",
        version="0",
        endpoint="",
        pid=1,
        uptime_s=0.0,
        ready=True,
        store=StoreStatus(up=True, host="", port=0),
        groups=(GroupStatus(name="a", launcher="exec", world_size=1, replicas=(), restarts={"exit": 9}),),
        channels=(ChannelStatus(name="p", epoch=4, committed_version=3, digest="", members=(), syncs={"busy": 9}),),
        refused={"origin": 0, "token": 9},
    )
    shown = tally.shown_in(status)
    assert shown.groups[0].restarts == {"signal": 1}
    assert shown.channels[0].syncs == {"committed": 1, "busy": 1}
    assert shown.channels[0].bytes_total == 30
    assert shown.refused == {"origin": 0, "token": 3}
    assert shown.sidecar_replacements == {"lost": 2}


def test_growth_is_told_once() -> None:
    growth = CounterDeltas()
    assert growth.since({"a": 2, "b": 0}) == [("a", 2)]
    assert growth.since({"a": 2, "b": 0}) == []
    assert growth.since({"a": 5, "b": 1}) == [("a", 3), ("b", 1)]
    seldom = CounterDeltas(10.0)
    assert seldom.since({"a": 1}, 100.0) == [("a", 1)]
    assert seldom.since({"a": 2}, 109.0) == []
    assert seldom.since({"a": 3}, 110.0) == [("a", 2)]
    assert seldom.since({"a": 4}, 111.0) == []
    assert seldom.since({"a": 4}) == [("a", 1)]


def test_numbers_and_counters_go_on_after_the_death_of_a_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first.emit(RunStarted(run="r", pid=1, version="0"))
    refusals(first, 5)
    saved_tally = msgspec.json.decode(msgspec.json.encode(first.tally), type=Tally)
    saved_seq = first.seq
    refusals(first, 3)  # written, but not in the state any more: it is killed here
    with path.open("ab") as file:
        file.write(b'{"seq":10,"at":1.0,"ev')  # and its machine died
    second = EventLog(path, tally=saved_tally, seq=saved_seq)
    assert (second.seq, second.tally.refused) == (9, {"token": 8})
    second.emit(RunStarted(run="r", pid=2, version="0", resumed=True))
    assert [record.seq for record in read(path)] == list(range(1, 11))
    third = EventLog(path)  # a new run in the same folder: numbers go on, counters begin anew
    assert (third.seq, third.tally) == (10, Tally())
    whole = EventLog(path, seq=0)  # the state was lost: all is counted again
    assert whole.tally.refused == {"token": 8}


@given(st.lists(st.sampled_from(["emit", "emit", "emit", "save", "kill", "torn"]), max_size=40))
def test_whenever_it_is_killed_each_event_is_counted_once(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        log = EventLog(path, max_nbytes=700)  # about eight events
        saved = b""
        count = 0

        def save() -> None:
            nonlocal saved
            saved = msgspec.json.encode((log.tally, log.seq))

        for step in steps:
            log.on_rotate = save
            if step == "emit":
                refusals(log, 1)
                count += 1
            elif step == "save":
                save()
            else:
                log.close()
                if step == "torn":
                    with path.open("ab") as file:
                        file.write(encode(Record(log.seq + 1, 1.0, Draining(target="")))[:-1])
                tally, seq = msgspec.json.decode(saved, type=tuple[Tally, int]) if saved else (None, 0)
                log = EventLog(path, max_nbytes=700, tally=tally, seq=seq)
            assert (log.seq, log.tally.refused.get("token", 0)) == (count, count)
        log.close()
        numbers = [record.seq for record in read(path)]
        assert numbers == list(range(count - len(numbers) + 1, count + 1))


def test_what_another_version_wrote_is_left_out_and_disturbs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    refusals(log, 2)
    with path.open("ab") as file:
        file.write(b'{"seq":3,"at":1.0,"event":{"type":"FromTheFuture"}}\nnoise\n')
    again = EventLog(path)
    assert again.seq == 3
    refusals(again, 1)
    assert [record.seq for record in read(path)] == [1, 2, 4]


def test_a_full_file_becomes_the_older_one_and_readers_find_any_number(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_nbytes=120_000)
    refusals(log, 3000)
    older = path.with_name("events.jsonl.1")
    assert max(path.stat().st_size, older.stat().st_size) <= 120_000
    kept = [record.seq for record in read(path)]
    assert kept == list(range(kept[0], 3001))
    for after in (kept[0], kept[0] + 1, 2100, 2999):
        assert next(read(path, after)).seq == after + 1
    assert list(read(path, 3000)) == []
    assert asyncio.run(followed(log, 0, len(kept))) == kept
    assert log.after(0)[0].seq == kept[0]


def test_those_who_follow_get_old_and_new_records_once_and_an_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path / "events.jsonl")
        refusals(log, 3)
        from_now, from_first, from_ahead = log.follow(), log.follow(0), log.follow(99)
        waiting = asyncio.ensure_future(anext(from_now))
        await asyncio.sleep(0)
        refusals(log, 1)
        assert (await waiting).seq == 4
        log.close()
        assert [record.seq async for record in from_first] == [1, 2, 3, 4]
        assert [record.seq async for record in from_now] == []
        assert [record.seq async for record in from_ahead] == [4]

    asyncio.run(scenario())


def test_one_who_is_behind_the_memory_reads_the_file(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    refusals(log, 1200)
    assert asyncio.run(followed(log, 0, 1200)) == list(range(1, 1201))
    nothing_on_disk = EventLog(None)
    refusals(nothing_on_disk, 1200)
    assert asyncio.run(followed(nothing_on_disk, 0, 1000)) == list(range(201, 1201))


def test_a_full_disk_costs_lines_that_are_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    refusals(log, 2)
    with file_size_limit(path.stat().st_size + 10):  # in the middle of the next line
        refusals(log, 4)
        assert log.tally.events_lost == 4
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    refusals(log, 1)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert log.tally.refused == {"token": 7}
    records = list(read(path))
    assert [record.seq for record in records] == [1, 2, 7, 8]
    assert isinstance(records[2].event, EventsLost)
    assert (records[2].event.count, log.tally.events_lost) == (4, 4)
    assert asyncio.run(followed(log, 0, 8)) == list(range(1, 9))  # memory has them all


def test_events_that_were_lost_are_told_and_counted_once_over_a_death(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    refusals(first, 1)
    with file_size_limit(path.stat().st_size):
        refusals(first, 4)
    saved = msgspec.json.encode(first.tally)
    told, untold = EventLog(path, tally=msgspec.json.decode(saved, type=Tally), seq=first.seq), first
    refusals(untold, 1)  # the first supervisor tells of them, and is killed before it saves
    resumed = EventLog(path, tally=msgspec.json.decode(saved, type=Tally), seq=5)
    refusals(resumed, 1)
    assert (untold.tally.events_lost, resumed.tally.events_lost) == (4, 4)
    refusals(told, 1)  # it was killed before it could tell: the next one does
    assert told.tally.events_lost == 4
    kinds = [record.event for record in read(path)]
    assert sum(isinstance(event, EventsLost) and event.count == 4 for event in kinds) == 2


def test_the_counters_that_a_rotation_saves_are_of_events_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_nbytes=300)
    saved: list[tuple[int, int]] = []
    log.on_rotate = lambda: saved.append((log.seq, log.tally.refused["token"]))
    refusals(log, 10)
    assert saved
    written = {record.seq for record in read(path, saved[-1][0] - 1)}
    assert all(seq == count for seq, count in saved)
    assert saved[-1][0] in written


def test_a_rotation_that_fails_or_finds_no_file_ends_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, max_nbytes=1000)
    rename = private.rename

    def fails(path: Path, name: str) -> None:
        if path.name.endswith(".new"):
            raise OSError(5, "Input/output error")
        rename(path, name)

    with monkeypatch.context() as patch:
        patch.setattr(private, "rename", fails)
        refusals(log, 20)
        assert path.stat().st_size > 1000
        assert not path.with_name("events.jsonl.1").exists()
    refusals(log, 1)
    assert path.stat().st_size < 1000 < path.with_name("events.jsonl.1").stat().st_size
    path.unlink()
    refusals(log, 40)
    assert path.stat().st_size <= 1000
    assert [record.seq for record in read(path)][-1] == log.seq == 61


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "absent" / "events.jsonl")
    refusals(log, 2)
    assert log.tally.events_lost == 2
    assert [record.seq for record in log.after(0)] == [1, 2]
    log.close()

"""What the viewers of a page get, and that nobody pays for it when there are none.

Covers: page/live.py, page/history.py.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from replicas import errors
from replicas.core.base.effects import ReplicaLoaded, SyncEnded
from replicas.page import history as past
from replicas.page import live as module
from replicas.page.document import merge
from replicas.page.history import History, key
from replicas.page.live import BEAT_S, INTERVAL_S, LINGER_S, VIEWERS, Live, Places
from replicas.page.past import Past
from replicas.status import RunStatus, SyncRecord
from replicas.telemetry.event_log import EventLog
from replicas.telemetry.events import Event, Record, RunEnded, RunStarted, Scaled
from tests.support.virtual import history as virtual

COST_S = {0: 0.0}
"""What a piece of work seems to take, of the processor."""


class Run:
    """Counts how often it is looked at."""

    def __init__(self) -> None:
        self.log = EventLog(None, now=lambda: 1000.0)
        self.past = Past()
        self.looks = 0
        self.starting = False
        self.tell(RunStarted(run="grpo", pid=1, version="1"))

    def tell(self, event: Event) -> None:
        self.past.feed(self.log.emit(event))

    def commit(self, version: int) -> None:
        record = SyncRecord(version=version, outcome="committed", seconds=0.1, nbytes=5, publisher="t/0")
        self.tell(SyncEnded("policy", record))

    def status(self) -> RunStatus:
        self.looks += 1
        if self.starting:
            raise errors.UsageError("the supervisor is not running")
        return self.past.status(1000.0)

    def events(self, after: int | None = None) -> AsyncIterator[Record]:
        return self.log.follow(after)

    @property
    def last_event(self) -> int:
        return self.log.seq


@pytest.fixture(autouse=True)
def _threads_are_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time stands still while a thread works; and work costs what is said."""

    async def at_once(function: Any, *given: Any) -> Any:
        return function(*given)

    clock = [0.0]

    def passes() -> float:
        clock[0] += COST_S[0]
        return clock[0]

    monkeypatch.setattr("replicas.page.live.asyncio.to_thread", at_once)
    monkeypatch.setattr("replicas.page.live.time.thread_time", passes)
    monkeypatch.setitem(COST_S, 0, 0.0)
    monkeypatch.setattr(module, "KEPT", module.KEPT)  # and is what it was afterwards


async def whole(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(gzip.decompress(await live.whole()))
    return found


async def message(stream: AsyncIterator[bytes]) -> tuple[str, Any]:
    """The kind and the data of the next event of a stream that is no comment."""
    while True:
        lines = dict(line.split(": ", 1) for line in (await anext(stream)).decode().split("\n") if ": " in line)
        if "data" in lines:
            return lines.get("event", "message"), msgspec.json.decode(lines["data"])


async def closed(stream: Any) -> None:
    await stream.aclose()


@asynccontextmanager
async def viewed() -> AsyncIterator[tuple[Run, AsyncIterator[bytes], dict[str, Any]]]:
    """A run with one viewer, which has the document, and whose stream has begun."""
    run = Run()
    live = Live(run)
    mine = await whole(live)
    stream = live.changes(mine["number"])
    await anext(stream)
    yield run, stream, mine
    await closed(stream)


@virtual
async def test_a_viewer_that_applies_each_change_has_the_document() -> None:
    run = Run()
    live = Live(run, now=lambda: 1000.0)
    mine = await whole(live)
    stream = live.changes(mine["number"])
    await anext(stream)
    for version in range(1, 4):
        run.commit(version)
        run.tell(ReplicaLoaded("policy", "rollout", 0, version))
        kind, patch = await message(stream)
        assert kind == "message"
        merge(mine, patch)
    again = await whole(live)
    for document in (mine, again):
        document.pop("number")
    assert mine == again
    assert [one["version"] for one in again["spans"].values() if one["kind"] == "sync"] == [1, 2, 3]
    await closed(stream)


@virtual
async def test_all_viewers_share_one_look_and_one_encoding() -> None:
    run = Run()
    live = Live(run)
    number = (await whole(live))["number"]
    streams = [live.changes(number) for _ in range(5)]
    for stream in streams:
        await anext(stream)
    looks = run.looks
    run.commit(1)
    texts = await asyncio.gather(*(anext(stream) for stream in streams))
    assert len(set(texts)) == 1
    assert run.looks - looks <= 2
    for stream in streams:
        await closed(stream)


@virtual
async def test_nothing_is_done_without_a_viewer_and_memory_goes() -> None:
    run = Run()
    live = Live(run)
    number = (await whole(live))["number"]
    stream = live.changes(number)
    await anext(stream)
    await closed(stream)
    looks = run.looks
    assert live.viewers == 0
    await asyncio.sleep(LINGER_S + 1)
    run.commit(1)
    await asyncio.sleep(60)
    assert run.looks == looks
    assert live._history is None
    assert [task for task in asyncio.all_tasks() if task.get_name() == "page"] == []
    assert (await whole(live))["channels"]["policy"]["committed_version"] == 1


@virtual
async def test_an_idle_stream_beats_and_costs_one_look_an_interval() -> None:
    async with viewed() as (run, stream, _):
        looks = run.looks
        assert (await message(stream))[0] == "beat"
        assert run.looks - looks == pytest.approx(BEAT_S / INTERVAL_S, abs=2)


@virtual
async def test_an_expensive_look_is_rare() -> None:
    run = Run()
    live = Live(run)
    stream = live.changes((await whole(live))["number"])
    COST_S[0] = 0.02
    await anext(stream)
    await asyncio.sleep(10)
    looks = run.looks
    await asyncio.sleep(10)
    assert run.looks - looks <= 10 * module.SHARE / 0.02 + 1
    await closed(stream)


@virtual
async def test_who_has_seen_another_supervisor_or_is_far_behind_begins_anew() -> None:
    run = Run()
    live = Live(run)
    number = (await whole(live))["number"]
    watcher = live.changes(number)
    await anext(watcher)
    for strange in ("", "abc.1", "nonsense", f"{number.partition('.')[0]}.99999", f"{number}x"):
        stream = live.changes(strange)
        assert (await message(stream))[0] == "anew"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    slow = live.changes(number)
    await anext(slow)
    module.KEPT = 5
    for version in range(1, 8):
        run.commit(version)
        await message(watcher)
    assert (await message(slow))[0] == "anew"
    resumed = live.changes(f"{number.partition('.')[0]}.{live._number}")
    run.commit(1000)
    assert (await message(resumed))[0] == "message"
    for stream in (watcher, resumed):
        await closed(stream)


@virtual
async def test_a_run_that_starts_says_so() -> None:
    run = Run()
    run.starting = True
    live = Live(run)
    mine = await whole(live)
    assert mine["run"] == {"starting": "the supervisor is not running"}
    stream = live.changes(mine["number"])
    await anext(stream)
    run.starting = False
    merge(mine, (await message(stream))[1])
    assert mine["run"]["run"] == "grpo"
    assert "starting" not in mine["run"]
    await closed(stream)


class Viewers:
    """Those who hold places; ``lost``: names of those who lost theirs, in order."""

    def __init__(self) -> None:
        self.places, self.lost, self.held = Places(), list[str](), dict[str, ExitStack]()

    def come(self, name: str, address: str, *, trusted: bool = False) -> bool:
        """Return False if there is no place."""
        if self.places.full(address, trusted):
            return False
        stack = self.held[name] = ExitStack()
        stack.enter_context(self.places.take(address, trusted, lambda: self.lost.append(name)))
        return True


def test_there_are_so_many_viewers_at_most() -> None:
    viewers = Viewers()
    assert all(viewers.come(f"a{number}", "a") for number in range(VIEWERS))
    assert not viewers.come("too many", "a")
    viewers.held["a3"].close()
    assert viewers.come("later", "a")
    assert viewers.lost == []


def test_a_newcomer_takes_from_the_address_that_has_most() -> None:
    viewers = Viewers()
    assert all(viewers.come(f"{'ab'[number % 4 == 0]}{number}", "ab"[number % 4 == 0]) for number in range(VIEWERS))
    assert all(viewers.come(f"c{number}", "c") for number in range(11))
    assert viewers.lost[:3] == ["a1", "a2", "a3"]
    viewers.held["a1"].close()  # of who has lost it already
    shares = [sum(name[0] == one and name not in viewers.lost for name in viewers.held) for one in "abc"]
    assert shares == [13, 8, 11]
    before = list(viewers.lost)
    assert viewers.come("c", "c")
    assert not viewers.come("c again", "c"), "equal shares are not taken"
    assert not viewers.come("again", "a")
    assert viewers.lost == [*before, "a15"]


def test_who_has_the_token_gets_a_place_and_loses_none_to_strangers() -> None:
    viewers = Viewers()
    assert all(viewers.come(f"stranger {number}", str(number)) for number in range(VIEWERS))
    assert not viewers.come("another", "x"), "each address has one"
    assert all(viewers.come(f"operator {number}", "o", trusted=True) for number in range(VIEWERS))
    assert viewers.lost == [f"stranger {number}" for number in range(VIEWERS)]
    assert not viewers.come("stranger", "x")
    assert not viewers.come("operator", "o", trusted=True)
    assert viewers.come("operator", "p", trusted=True)
    assert viewers.lost[VIEWERS:] == ["operator 0"]


@virtual
async def test_the_document_is_there_at_once_for_who_comes_during_the_first_look() -> None:
    run = Run()
    live = Live(run)
    stream = live.changes("")  # a viewer that has lost its supervisor
    await anext(stream)
    documents = await asyncio.gather(*(whole(live) for _ in range(3)))
    assert all(one["run"]["run"] == "grpo" for one in documents)
    await closed(stream)


@virtual
async def test_the_end_of_a_run_is_told_at_once() -> None:
    async with viewed() as (run, stream, _):
        await asyncio.sleep(INTERVAL_S / 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        run.tell(RunEnded(exit_code=3, reason="a failed"))
        run.log.finish()
        _, patch = await message(stream)
        assert patch["run"]["exit_code"] == 3
        assert loop.time() == began, "the port closes soon"
        looks = run.looks
        await asyncio.sleep(5)
        assert run.looks - looks == pytest.approx(5 / INTERVAL_S, abs=2)


@virtual
async def test_a_bug_ends_the_streams_and_is_not_hidden() -> None:
    async with viewed() as (run, stream, _):

        def fails() -> RunStatus:
            raise ZeroDivisionError

        run.status = fails  # type: ignore[method-assign]  # a bug in it
        with pytest.raises(ZeroDivisionError):
            await message(stream)


def record(seq: int, event: Event) -> Record:
    return Record(seq, 1000.0 + seq, event)


def test_many_tracks_get_fewer_spans_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "WHOLE", 140)
    found = History()
    seq = 0
    for version in range(1, 10):
        for index in range(20):
            seq += 1
            found.feed([record(seq, ReplicaLoaded("policy", "rollout", index, version, 0.1))])
    spans = found.whole()["spans"].values()
    assert len(spans) == 20 * 7
    assert {one["version"] for one in spans} == set(range(3, 10)), "the newest"
    assert found.whole()["kept"] == 7, "of one that stays open, too"
    assert "kept" not in History(whole=True).whole()


def test_changes_are_told_once() -> None:
    found = History()
    found.feed([record(1, RunStarted(run="r", pid=1, version="1")), record(2, Scaled(group="a", before=1, after=2))])
    assert {one["seq"] for one in found.changes()["events"].values()} == {1, 2}
    assert found.changes() == {}
    found.feed([record(3, Scaled(group="a", before=2, after=3))])
    patch = found.changes()
    assert [one["what"] for one in patch["events"].values()] == ["scaled from 2 to 3 replicas"]
    assert patch["spans"] == {}


def test_a_viewer_is_told_how_many_spans_there_were_and_a_report_has_them_all() -> None:
    viewed, reported = History(), History(whole=True)
    for seq in range(1, 501):
        for found in (viewed, reported):
            found.feed([record(seq, ReplicaLoaded("policy", "rollout", 0, seq, 0.1))])
    assert viewed.whole()["totals"] == reported.whole()["totals"] == {"replica rollout/0": {"version": 500}}
    assert len(viewed.whole()["spans"]) == 100
    assert len(reported.whole()["spans"]) == 500
    viewed.changes()
    viewed.feed([record(501, Scaled(group="a", before=1, after=2))])
    assert viewed.changes()["totals"] == {"group a": {"mark": 1}}, "of tracks that changed alone"
    assert "unknown" not in viewed.whole()


def test_a_viewer_is_told_the_times_without_events_and_of_open_spans_however_old() -> None:
    found = History(after=41)
    found.feed([record(42, ReplicaLoaded("reference", "rollout", 0, 1, 0.1))])
    found.feed(record(seq, ReplicaLoaded("policy", "rollout", 0, seq, 0.1)) for seq in range(43, 400))
    whole = found.whole()
    assert whole["unknown"] == [(0.0, record(42, Scaled(group="a", before=1, after=2)).at)]
    assert [one["channel"] for one in whole["spans"].values() if "end" not in one] == ["reference", "policy"]


def test_routine_events_push_out_no_others() -> None:
    found = History()
    found.feed([record(1, Scaled(group="a", before=1, after=2))])
    found.feed(record(seq, ReplicaLoaded("policy", "rollout", 0, seq, 0.1)) for seq in range(2, 2 * past.EVENTS))
    events = list(found.whole()["events"].values())
    assert [one["seq"] for one in events] == [1, *range(past.EVENTS, 2 * past.EVENTS)]
    assert "routine" not in events[0]
    assert events[-1]["routine"]


def test_a_viewer_is_told_the_largest_ways_of_bytes_and_a_report_all() -> None:
    pulled = {f"a/{index}/0": {"t/0/0": index + 1} for index in range(60)}
    sync = SyncRecord(version=1, outcome="committed", seconds=1.0, nbytes=5, pulled=pulled, phases={"pack": 0.25})
    for whole_of_it, ways in ((False, 24), (True, 60)):
        found = History(whole=whole_of_it)
        found.feed([record(1, SyncEnded("policy", sync))])
        (span,) = found.whole()["spans"].values()
        assert len(span["between"]) == ways
        assert span["between"][0] == ("t/0", "a/59", 60)
        assert ("pulled" in span) is whole_of_it
        assert span["parts"] == [("pack", 0.0, 0.25)]
        assert key(found.spans.spans()[0]) == "sync1"

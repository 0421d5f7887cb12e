"""Events as spans of time: lanes of replicas, syncs with their parts, and marks, over
several supervisors, gaps in the log and steps of the clock, in bounded memory.

Covers: telemetry/spans.py, telemetry/tracks.py.
"""

from __future__ import annotations

import msgspec
import pytest

from replicas.core.base.effects import (
    CaughtUp,
    LoadFailed,
    MemberLost,
    OperationEnded,
    ReplicaLoaded,
    SyncEnded,
    VersionDecided,
)
from replicas.core.lives.lifecycle import Lifecycle, Transition
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.messages.identity import Member
from replicas.status import SyncRecord
from replicas.telemetry import events
from replicas.telemetry.events import NodeChanged, RankEnd, Record, ReplicaExited, RunEnded, RunStarted
from replicas.telemetry.spans import Spans, read
from replicas.telemetry.tracks import Span, order, parts
from tests.unit.telemetry.test_events import EVERYTHING


class History:
    """Feeds spans with one event after another."""

    def __init__(self, most: int = 100) -> None:
        self.spans = Spans(most)
        self.seq = 0
        self.lives: dict[str, Lifecycle] = {}

    def tell(self, at: float, *happened: events.Event) -> History:
        for event in happened:
            self.seq += 1
            self.spans.feed(Record(self.seq, at, event))
        return self

    def start(self, at: float = 0.0, **more: bool) -> History:
        self.lives.clear()
        return self.tell(at, RunStarted(run="r", pid=self.seq + 1, version="0", **more))

    def step(self, at: float, *steps: Step, name: str = "rollout/0", **fields: object) -> History:
        group, _, index = name.partition("/")
        life = self.lives.setdefault(name, Lifecycle(group, int(index), now=at))
        for one in steps:
            transition = msgspec.structs.replace(life.apply(one, now=at), **fields)
            self.tell(at, transition)
        return self

    def of(self, track: str, kind: str) -> list[Span]:
        return [span for span in self.spans.spans() if (span.track, span.kind) == (track, kind)]

    def told(self, track: str, kind: str) -> list[tuple[str, float, float | None]]:
        return [(span.name, span.start, span.end) for span in self.of(track, kind)]


def sync(version: int, **more: object) -> SyncEnded:
    base = {"outcome": "committed", "seconds": 2.0, "nbytes": 10, "publisher": "trainer/0", "members": 2}
    return SyncEnded("policy", SyncRecord(version=version, **base | more))  # type: ignore[arg-type]  # of a test


REPLICA = "replica rollout/0"


def test_a_silence_begins_with_the_last_heartbeat_and_within_its_generation() -> None:
    run = History().start().step(1, Step.START).step(3, Step.READY)
    run.step(10, Step.SILENT, silent_s=4.0).step(12, Step.UNREADY).step(13, Step.READY).step(
        14, Step.SILENT, silent_s=4.0
    )
    assert run.told(REPLICA, "state") == [
        ("starting", 1, 3),
        ("ready", 3, 6),
        ("silent", 6, 12),
        ("starting", 12, 13),
        ("ready", 13, 13),
        ("silent", 13, None),
    ]
    assert run.told(REPLICA, "generation") == [("generation 1", 1, None)]


def test_a_replica_has_states_and_generations() -> None:
    run = History().start().step(1, Step.START, nodes=("n1",)).step(3, Step.READY)
    run.tell(
        9, ReplicaExited(group="rollout", replica=0, generation=1, outcome="failed", ranks=(RankEnd(rank=0, code=-9),))
    )
    run.step(9, Step.RETRY).step(12, Step.BACKOFF_ELAPSED).step(15, Step.READY)
    assert run.told(REPLICA, "state") == [
        ("starting", 1, 3),
        ("ready", 3, 9),
        ("backoff", 9, 12),
        ("starting", 12, 15),
        ("ready", 15, None),
    ]
    first, second = run.of(REPLICA, "generation")
    assert (first.name, first.start, first.end) == ("generation 1", 1, 9)
    assert first.attributes["exit_codes"] == {"0": -9}
    assert first.attributes["nodes"] == ("n1",)
    assert first.attributes["start_s"] == 2
    assert (second.name, second.end, second.attributes["recovery_s"]) == ("generation 2", None, 6)
    assert [span.parent for span in run.of(REPLICA, "state")] == [first.id, first.id, None, second.id, second.id]
    exits = [mark for mark in run.spans.marks() if mark.kind == "exit"]
    assert [(mark.track, mark.name, mark.at, mark.tone) for mark in exits] == [(REPLICA, "failed", 9, "error")]


def test_a_sync_has_phases_transfers_and_loads() -> None:
    run = History().start().step(1, Step.START, nodes=("n1",)).step(1, Step.START, name="trainer/0", nodes=("n0",))
    phases = {"wait": 0.25, "pack": 0.5, "transfer": 1.0, "commit": 0.25}
    more = {"held": {"rollout/0": 1.5}, "pulled": {"rollout/0/0": {"trainer/0/0": 7}}, "moved_nbytes": 7}
    run.tell(10, sync(4, phases=phases, **more), ReplicaLoaded("policy", "rollout", 0, 4, 0.0))
    run.tell(12, sync(5, phases=phases, **more)).tell(13, ReplicaLoaded("policy", "rollout", 0, 5, 0.5))
    one, two = run.of("channel policy", "sync")
    assert (one.name, one.start, one.end) == ("sync 4", 8, 10)
    assert one.attributes["between"] == {"n0": {"n1": 7}}
    found = [(part.kind, part.name, part.start, part.end, part.parent) for part in parts(one)]
    assert found == [
        ("phase", "wait", 8, 8.25, one.id),
        ("phase", "pack", 8.25, 8.75, one.id),
        ("phase", "transfer", 8.75, 9.75, one.id),
        ("phase", "commit", 9.75, 10, one.id),
        ("transfer", "trainer/0/0 to rollout/0/0", 8.75, 9.5, one.id),
    ]
    assert {name: two.attributes[name] for name in ("loads", "last_loaded", "last_loaded_s")} == {
        "loads": 1,
        "last_loaded": "rollout/0",
        "last_loaded_s": 1,
    }
    assert run.told(REPLICA, "version") == [("version 4", 10, 13), ("version 5", 13, None)]
    fourth, fifth = run.of(REPLICA, "version")
    assert list(parts(fourth)) == []  # not measured: another coordinator told it
    assert [(part.kind, part.name, part.start, part.end, part.parent) for part in parts(fifth)] == [
        ("load", "load 5", 12.5, 13, two.id)
    ]


def test_phases_that_overlap_end_before_the_commit() -> None:
    """Bytes that are sent while they are packed take both times at once."""
    run = History().start().tell(10, sync(1, phases={"pack": 1.5, "transfer": 1.5, "commit": 0.5, "hold": 1.0}))
    found = {part.name: (part.start, part.end) for part in parts(run.of("channel policy", "sync")[0])}
    assert found == {"pack": (8, 9.5), "transfer": (8, 9.5), "commit": (9.5, 10), "hold": (8, 9)}


def test_bytes_without_a_node_go_between_replicas() -> None:
    run = History().start().tell(5, sync(1, moved_to={"rollout/0": 7}))
    assert run.of("channel policy", "sync")[0].attributes["between"] == {"trainer/0": {"rollout/0": 7}}


def test_a_version_is_served_until_another_is_promoted() -> None:
    history = History().start()
    for at, version in enumerate((1, 2), 1):
        history.tell(at, sync(version), VersionDecided("policy", version, "promoted"))
    history.tell(3.0, sync(3), VersionDecided("policy", 3, "rejected", why="by hand"))
    history.tell(4.0, VersionDecided("policy", 4, "rolled_back", value=1.0))
    assert history.told("channel policy", "served") == [
        ("version 1", 1.0, 2.0),
        ("version 2", 2.0, 4.0),
        ("version 4", 4.0, None),
    ]


def test_without_promotions_a_rollback_is_a_mark_alone() -> None:
    history = History().start().tell(1.0, sync(1), sync(2), VersionDecided("policy", 3, "rolled_back", value=1.0))
    assert history.told("channel policy", "served") == []
    assert [mark.kind for mark in history.spans.marks() if mark.track == "channel policy"] == ["decision"]


def test_a_failed_sync_brings_nothing() -> None:
    run = History().start().tell(5, sync(1, outcome="peers_lost", lost=("rollout/0/0",), error="it was lost"))
    run.tell(6, ReplicaLoaded("policy", "rollout", 0, 1, 0.1))
    (failed,) = run.of("channel policy", "sync")
    assert (failed.attributes["outcome"], failed.attributes["error"]) == ("peers_lost", "it was lost")
    assert run.of(REPLICA, "version")[0].parent is None


def test_an_adopted_generation_goes_on() -> None:
    run = History().start().step(1, Step.START).step(2, Step.READY).tell(3, ReplicaLoaded("policy", "rollout", 0, 1))
    run.tell(8, NodeChanged(node="n1", before="up", after="up")).start(20, resumed=True)
    run.lives["rollout/0"] = again = Lifecycle("rollout", 0, now=20)
    again.generation = 1
    run.step(21, Step.ADOPT).step(22, Step.READY).tell(22, ReplicaLoaded("policy", "rollout", 0, 1))
    assert run.told(REPLICA, "state") == [
        ("starting", 1, 2),
        ("ready", 2, 21),
        ("starting", 21, 22),
        ("ready", 22, None),
    ]
    (life,) = run.of(REPLICA, "generation")
    assert (life.start, life.end, life.attributes["adopted"]) == (1, None, 1)
    assert run.told(REPLICA, "version") == [("version 1", 3, None)]
    assert run.told("run", "unsupervised") == [("no supervisor", 8, 20)]
    assert [(span.end, span.attributes.get("died")) for span in run.of("run", "supervisor")] == [
        (8, True),
        (None, None),
    ]


def test_what_a_killed_supervisor_did_not_see_has_an_unknown_end() -> None:
    run = History().start().step(1, Step.START).step(2, Step.READY).tell(3, ReplicaLoaded("policy", "rollout", 0, 1))
    run.start(20, resumed=True)
    run.lives["rollout/0"] = again = Lifecycle("rollout", 0, now=20)
    again.generation = 1
    run.step(25, Step.START)
    ends = [(span.kind, span.end, span.attributes.get("unknown_end")) for span in run.spans.spans() if span.end == 20]
    assert sorted(ends) == [
        ("generation", 20, True),
        ("state", 20, True),
        ("unsupervised", 20, None),
        ("version", 20, True),
    ]
    assert run.told(REPLICA, "state")[-1] == ("starting", 25, None)


def test_another_run_forgets_the_one_before() -> None:
    run = History().start().step(1, Step.START).tell(2, sync(1)).start(50)
    assert [(span.track, span.kind) for span in run.spans.spans()] == [("run", "supervisor")]
    assert [mark.kind for mark in run.spans.marks()] == ["start"]


def test_a_log_without_its_begin_is_told_from_where_it_goes_on() -> None:
    found = Spans()
    life = Lifecycle("rollout", 0, now=0)
    steps = [life.apply(step, now=0) for step in (Step.START, Step.READY, Step.RETRY, Step.BACKOFF_ELAPSED, Step.READY)]
    found.feed(Record(40, 100.0, steps[1]))
    found.feed(Record(60, 130.0, steps[4]))
    states = [(span.name, span.start, span.end) for span in found.spans() if span.kind == "state"]
    assert states == [("ready", 100, 100), ("ready", 130, None)]
    gaps = [(mark.at, mark.text.split(" events")[0]) for mark in found.marks() if mark.kind == "gap"]
    assert gaps == [(100, "39"), (130, "19")]
    assert list(found.unknown) == [(0, 100), (100, 130)]


def test_a_state_that_began_in_a_time_without_events_is_known_from_its_end_on() -> None:
    found = Spans()
    life = Lifecycle("rollout", 0, now=0)
    steps = [life.apply(step, now=0) for step in (Step.START, Step.READY, Step.RETRY, Step.BACKOFF_ELAPSED, Step.READY)]
    found.feed(Record(40, 100.0, events.Scaled(group="rollout", before=1, after=2)))
    found.feed(Record(41, 120.0, steps[2]))
    found.feed(Record(60, 130.0, events.Scaled(group="rollout", before=2, after=3)))
    found.feed(Record(61, 140.0, steps[4]))
    found.feed(Record(62, 150.0, Lifecycle("rollout", 1, now=0).apply(Step.START, now=0)))
    states = [span for span in found.spans() if span.kind == "state"]
    about = [(span.name, span.attributes.get("before"), span.attributes.get("before_since")) for span in states]
    assert about == [("backoff", "ready", 100), ("ready", "starting", 130), ("starting", None, None)]


def test_a_replica_that_ends_serves_nothing_though_its_start_is_not_known() -> None:
    found = Spans()
    life = Lifecycle("rollout", 0, now=0)
    *_, ends = [life.apply(step, now=0) for step in (Step.START, Step.READY, Step.RETRY)]
    found.feed(Record(40, 100.0, ReplicaLoaded("policy", "rollout", 0, 7, 0.1)))
    found.feed(Record(41, 120.0, ends))
    assert [(span.start, span.end) for span in found.spans() if span.kind == "version"] == [(100, 120)]


def test_a_supervisor_that_goes_on_after_lost_events_does_not_hide_that_they_are() -> None:
    run = History().start().step(1, Step.START, Step.READY)
    run.seq += 5
    run.start(20, resumed=True)
    assert list(run.spans.unknown) == [(1, 20)]
    assert list(run.start(30).spans.unknown) == []


def test_a_clock_that_is_set_back_makes_no_negative_span() -> None:
    run = History().start(1000).step(1001, Step.START).step(500, Step.READY).step(503, Step.UNREADY)
    assert run.told(REPLICA, "state") == [("ready", 500, 503), ("starting", 503, None), ("starting", 1001, 1001)]
    assert [mark.text for mark in run.spans.marks() if mark.kind == "clock"] == ["the clock was set back by 8m 21s"]


def test_the_end_of_a_run_ends_all() -> None:
    run = History().start().step(1, Step.START).tell(2, NodeChanged(node="n1", before="lost", after="up"))
    run.tell(3, events.Draining(target=""), RunEnded(exit_code=3, reason="why"))
    assert {span.end for span in run.spans.spans()} == {3}
    assert run.of("run", "supervisor")[0].attributes["exit_code"] == 3


def test_nodes_groups_and_channels_have_tracks() -> None:
    run = History().start().tell(1, NodeChanged(node="n1", before="lost", after="up"))
    run.tell(4, NodeChanged(node="n1", before="up", after="away", reason="silent"))
    run.tell(5, events.Draining(target="node n1"), events.Scaled(group="rollout", before=1, after=2))
    run.tell(6, events.Drained(target="node n1", seconds=1))
    run.tell(7, OperationEnded("policy", "all_reduce", "ok", 2.0), CaughtUp("policy", 3, (), 5, seconds=1.5))
    assert run.told("node n1", "node") == [("up", 1, 4), ("away", 4, None)]
    assert run.told("node n1", "drain") == [("requested", 5, 6)]
    assert run.told("channel policy", "operation") == [("all_reduce", 5, 7)]
    assert run.told("channel policy", "catch_up") == [("catch-up 3", 5.5, 7)]
    tracks = sorted({span.track for span in run.spans.spans()} | {mark.track for mark in run.spans.marks()}, key=order)
    assert tracks == ["run", "channel policy", "group rollout", "node n1"]


def test_replicas_are_ordered_by_their_index() -> None:
    names = ["replica b/10", "replica b/9", "replica a/11", "node x", "run", "channel z", "group b"]
    assert sorted(names, key=order) == [
        *reversed(names[4:5]),
        "channel z",
        "group b",
        "node x",
        "replica a/11",
        "replica b/9",
        "replica b/10",
    ]


def test_an_observer_that_leaves_is_no_loss_of_a_replica() -> None:
    member = Member("rollout", 0, 0, "n")
    run = (
        History()
        .start()
        .tell(1, MemberLost("policy", member, "left", observes=True), MemberLost("policy", member, "died"))
    )
    assert [mark.track for mark in run.spans.marks()[1:]] == ["channel policy", REPLICA]


def test_old_spans_are_counted_and_the_rest_stays_small() -> None:
    run = History(most=10).start().step(0, Step.START).step(0, Step.READY)
    for version in range(1, 401):
        run.tell(float(version * 10), sync(version), ReplicaLoaded("policy", "rollout", 0, version, 0.5))
        run.tell(float(version * 10), LoadFailed("policy", "rollout", 1, version, "no"))
    assert [span.name for span in run.of("channel policy", "sync")] == [f"sync {n}" for n in range(371, 401)]
    assert [span.name for span in run.of(REPLICA, "version")] == [f"version {n}" for n in range(391, 401)]
    folded = run.spans.folded[REPLICA, "version"]
    assert (folded.count, folded.seconds, folded.until) == (390, 3900.0, 3910.0)
    assert [span.name for span in run.of(REPLICA, "state")] == ["starting", "ready"]  # versions do not push them out
    assert len(run.spans.marks()) == 11
    assert run.spans.folded["replica rollout/1", "mark"].count == 390
    assert run.spans.totals()["replica rollout/1"] == {"mark": 400}
    everything, _ = run.spans.changed(0)
    assert len(everything) == len(run.spans.spans())


def test_a_page_gets_what_has_changed() -> None:
    run = History().start().step(1, Step.START).tell(2, sync(1))
    seen = run.spans.seq
    assert run.spans.changed(seen) == ([], [])
    run.tell(3, ReplicaLoaded("policy", "rollout", 0, 1, 0.1)).step(4, Step.READY)
    spans, marks = run.spans.changed(seen)
    assert sorted((span.kind, span.name) for span in spans) == [
        ("generation", "generation 1"),
        ("state", "ready"),
        ("state", "starting"),
        ("sync", "sync 1"),  # it was loaded
        ("version", "version 1"),
    ]
    assert marks == []
    run.spans.feed(Record(run.spans.seq, 99.0, RunEnded(exit_code=0)))  # again, as after a lost connection
    assert run.spans.at == 4


@pytest.mark.parametrize("first", [1, 5])
def test_every_event_can_be_fed_and_sent(first: int) -> None:
    found = read(Record(first + index, 100.0 + index, event) for index, event in enumerate(EVERYTHING))
    assert found.run == "r"
    again = msgspec.json.decode(msgspec.json.encode(found.spans()), type=list[Span])
    assert [span.name for span in again] == [span.name for span in found.spans()]
    assert all(span.end is not None for span in again)
    assert all(mark.text for mark in found.marks())


def test_self_transitions_only_say_why() -> None:
    run = History().start().step(1, Step.START).step(2, Step.READY).step(3, Step.STOP)
    assert isinstance(run.lives["rollout/0"].apply(Step.HELD_UP, now=4, reason="it does not die"), Transition)
    run.step(5, Step.HELD_UP, reason="it does not die")
    states = run.of(REPLICA, "state")
    assert [span.name for span in states] == ["starting", "ready", "draining"]
    assert states[-1].attributes["reason"] == "it does not die"

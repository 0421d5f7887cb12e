"""Timelines for Perfetto: the file keeps the rules of the Trace Event Format, whatever
overlaps in a run.

Covers: telemetry/trace_file.py.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from replicas.core.base.effects import MemberLost, ReplicaLoaded
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.messages.identity import Member
from replicas.telemetry.events import NodeChanged, Record
from replicas.telemetry.spans import Spans, read
from replicas.telemetry.trace_file import trace_json
from tests.support.showing.trace_rules import check_trace
from tests.unit.telemetry.test_events import EVERYTHING
from tests.unit.telemetry.test_spans import History, sync


def trace(found: Spans, tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "run.json"
    path.write_bytes(b"".join(trace_json(found)))
    return check_trace(path)


def named(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["ph"] == "M" and one["name"] == what}


def test_each_replica_node_and_channel_has_a_track(tmp_path: Path) -> None:
    run = History().start(10).tell(11, NodeChanged(node="n1", before="lost", after="up"))
    run.step(12, Step.START, nodes=("n1", "n2")).step(13, Step.READY).tell(15, sync(1)).step(16, Step.UNREADY)
    found = trace(run.spans, tmp_path)
    tracks = named(found, "process_name")
    assert list(tracks.values()) == ["run", "channel policy", "node n1", "node n2", "replica rollout/0"]
    on_node = [one["name"] for one in found if one["ph"] == "X" and tracks[one["pid"], 0] == "node n2"]
    assert on_node == ["rollout/0 generation 1"]
    states = [one for one in found if one.get("cat") == "state"]
    assert [(one["name"], one["ts"], one["dur"]) for one in states] == [
        ("starting", 12_000_000, 1_000_000),
        ("ready", 13_000_000, 3_000_000),
        ("starting", 16_000_000, 0),
    ]
    assert states[-1]["args"]["goes_on"] is True


def test_an_arrow_leads_from_a_sync_to_each_load(tmp_path: Path) -> None:
    run = History().start().tell(10, sync(1, phases={"pack": 1.0}))
    run.tell(12, ReplicaLoaded("policy", "rollout", 0, 1, 0.5), ReplicaLoaded("policy", "rollout", 1, 1))
    found = trace(run.spans, tmp_path)
    ends = [one for one in found if one["ph"] == "f"]
    assert [(one["id"], one["ts"]) for one in ends] == [(1, 11_500_000), (2, 12_000_000)]
    (brought,) = [one for one in found if one.get("cat") == "sync"]
    begins = [(one["pid"], one["tid"], one["ts"]) for one in found if one["ph"] == "s"]
    assert begins == [(brought["pid"], brought["tid"], 9_999_999)] * 2


def test_what_overlaps_lies_on_threads_of_its_own(tmp_path: Path) -> None:
    """A version is packed while another one moves; two channels load side by side."""
    run = History().start().tell(10, sync(1, seconds=4.0)).tell(11, sync(2, seconds=4.0)).tell(20, sync(3, seconds=1.0))
    for channel in ("policy", "critic"):
        run.tell(12, ReplicaLoaded(channel, "rollout", 0, 1, 1.0)).tell(
            12.5, ReplicaLoaded(channel, "rollout", 0, 2, 1.0)
        )
    found = trace(run.spans, tmp_path)
    threads = defaultdict(list)
    for one in found:
        if one["ph"] == "X" and one["cat"] in ("sync", "load"):
            threads[one["cat"]].append((one["name"], one["tid"] % 100))
    assert threads["sync"] == [("sync 1", 0), ("sync 2", 1), ("sync 3", 0)]
    assert len({lane for _, lane in threads["load"]}) == 4
    labels = Counter(label for label in named(found, "thread_name").values() if label.startswith("load"))
    assert labels == {"load policy": 1, "load critic 1": 1, "load policy 2": 1, "load critic 3": 1}


def test_every_event_and_hostile_texts_make_a_file(tmp_path: Path) -> None:
    hostile = MemberLost("policy", Member("rollout", 0, 0, "n"), '</script>"\x1b]0;x\n\u2028')
    happened = [*EVERYTHING[:-1], hostile, EVERYTHING[-1]]
    found = trace(read(Record(index, 100.0 + index, event) for index, event in enumerate(happened, 1)), tmp_path)
    assert "\x1b" not in (tmp_path / "run.json").read_text()
    assert {one["ph"] for one in found} >= {"M", "X", "i"}
    assert json.loads((tmp_path / "run.json").read_text())["otherData"] == {"run": "r"}

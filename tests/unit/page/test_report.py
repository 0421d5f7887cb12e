"""A run's page from its events alone, in one file; and the recorded run.

Covers: page/assets.py, page/past.py, page/report.py.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import msgspec

from replicas.core.base.effects import LoadFailed, MemberJoined, MemberLost, ReplicaLoaded, StepFell, SyncEnded
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.messages.identity import Member
from replicas.page.assets import MODULES, POLICY, STATIC, asset, script
from replicas.page.past import Past
from replicas.page.report import recorded, report
from replicas.status import SyncRecord
from replicas.telemetry import events
from replicas.telemetry.spans import read
from replicas.telemetry.verdict import verdict

HOSTILE = "</script><script>alert(1)</script><!--"


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        self.attributes.append((tag, about))
        self._in = {"application/json": "data", "module": "script"}.get(about.get("type") or "", tag)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._in] = self.texts.get(self._in, "") + data


def told(*happened: events.Event) -> list[events.Record]:
    return [events.Record(seq, 1000.0 + seq, event) for seq, event in enumerate(happened, 1)]


def moved(index: int, event: ReplicaEvent, before: Any, after: Any, **more: Any) -> Transition:
    about = {"group": "rollout", "replica": index, "generation": 1, "reason": "", **more}
    return Transition(event=event, before=before, after=after, **about)


START = events.RunStarted(run="grpo", pid=7, version="0.3")
UP = (
    moved(0, ReplicaEvent.START, "pending", "starting", nodes=("n1",)),
    moved(0, ReplicaEvent.READY, "starting", "ready"),
)


def test_a_frozen_replica_is_silent_in_a_report_from_its_last_heartbeat() -> None:
    why = "no heartbeat from rank 0 (limit: 10 s)"
    silent = moved(0, ReplicaEvent.SILENT, "ready", "silent", reason=why, silent_s=0.4)
    past = Past()
    for record in told(START, *UP, silent):
        past.feed(record)
    (one,) = past.status(1005.0).groups[0].replicas
    assert (one.state, one.reason, round(one.state_age_s, 1)) == ("silent", why, 1.4)
    assert verdict(past.status(1005.0), 1005.0).sentence == f"rollout/0 is silent: {why}"


def test_its_script_and_style_have_the_hashes_that_its_policy_allows() -> None:
    found = Parsed(report(told(START)))
    policy = next(about["content"] for _, about in found.attributes if about.get("http-equiv"))
    assert policy is not None
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not [about for _, about in found.attributes if {"src", "style", "onclick", "onload"} & about.keys()]
    assert [tag for tag, about in found.attributes if "href" in about] == ["a"], "the one to skip to the timeline"


def test_texts_of_programs_cannot_leave_its_data() -> None:
    exited = events.ReplicaExited(group="rollout", replica=0, generation=1, outcome="failed", reason=HOSTILE)
    text = report(told(START, *UP, exited))
    found = Parsed(text)
    assert text.count("</script>") == 2
    data = msgspec.json.decode(found.texts["data"])
    assert HOSTILE in data["replicas"]["rollout/0"]["last_exit"]


def test_the_script_is_its_modules_with_different_names() -> None:
    assert {f"{name}.js" for name in MODULES} == {path.name for path in STATIC.glob("*.js")}
    text = script()
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    for name in MODULES:
        imported = re.findall(r'from "\./(\w+)\.js"', (STATIC / f"{name}.js").read_text())
        assert all(MODULES.index(one) < MODULES.index(name) for one in imported), name


def test_nothing_of_the_page_makes_markup_or_code_of_text() -> None:
    text = script() + (STATIC / "index.html").read_text()
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "style="):
        assert name not in text, name
    for name in ("localStorage", "sessionStorage", "document.cookie", "indexedDB"):
        assert name not in text, f"{name}: a token could get there"
    assert "unsafe" not in POLICY


def test_a_file_of_the_page_is_small_and_known_by_name_alone() -> None:
    sizes = {}
    for name in ("index.html", "page.js", "page.css", "icon.svg"):
        found = asset(name)
        assert found is not None
        sizes[name] = len(found.packed)
    assert sum(sizes.values()) < 40_000, sizes
    for name in ("main.js", "../assets.py", "", "/etc/passwd"):
        assert asset(name) is None


def test_the_past_of_a_run_is_the_status_that_it_had() -> None:
    past = Past()
    for record in told(
        START,
        events.NodeChanged(node="n1", before="", after="up", address="10.0.0.1"),
        *UP,
        moved(1, ReplicaEvent.START, "pending", "starting"),
        MemberJoined("policy", Member("rollout", 0, 0, "x")),
        MemberJoined("policy", Member("rollout", 0, 1, "x")),
        MemberJoined("policy", Member("trainer", 0, 0, "x")),
        SyncEnded(
            "policy", SyncRecord(version=1, outcome="committed", seconds=1, nbytes=9, publisher="trainer/0", step=4)
        ),
        ReplicaLoaded("policy", "rollout", 0, 1, 0.1),
        StepFell("policy", 1, 4, 8),
        MemberLost("policy", Member("rollout", 0, 1, "x"), "it died"),
        events.ReplicaExited(group="rollout", replica=1, generation=1, outcome="failed", reason="rank 0 exited"),
        moved(1, ReplicaEvent.RETRY, "starting", "backoff", reason="rank 0 exited", restart_reason="exit"),
    ):
        past.feed(record)
    status = past.status(past.at)
    first, second = status.groups[0].replicas
    assert (first.state, first.nodes, first.versions) == ("ready", ("n1",), {"policy": 1})
    assert (second.state, second.reason, second.restarts, second.last_exit) == (
        "backoff",
        "rank 0 exited",
        1,
        "rank 0 exited",
    )
    (channel,) = status.channels
    assert (channel.committed_version, channel.step, channel.step_before) == (1, 4, 8)
    assert (channel.sources, channel.targets) == (("trainer",), ("rollout",))
    assert [(one.name, one.role, one.loaded) for one in channel.members] == [
        ("rollout/0/0", "target", 1),
        ("trainer/0/0", "source", 0),
    ]
    assert status.nodes[0].replicas == ("rollout/0",)
    assert not status.ready
    assert status.exit_code is None
    (again,) = told(events.Scaled(group="rollout", before=2, after=1))
    past.feed(again)
    assert [one.name for one in past.status(past.at).groups[0].replicas] == ["rollout/0"]


def test_only_the_last_run_of_a_folder_is_shown_with_its_end() -> None:
    past = Past()
    end = events.RunEnded(exit_code=1, reason="rollout failed")
    for record in told(START, *UP, end, events.RunStarted(run="second", pid=8, version="0.3")):
        past.feed(record)
    status = past.status(past.at)
    assert (status.run, status.exit_code, status.groups) == ("second", None, ())
    past.feed(events.Record(99, 2000.0, end))
    assert verdict(past.status(2000.0), 2000.0).sentence == "The run is over, with exit code 1: rollout failed."


def test_the_recorded_run_ends_when_it_is_told_to_and_has_what_the_page_shows() -> None:
    records = recorded(2_000_000_000.0)
    assert records[-1].at == 2_000_000_000.0
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert [record.at for record in records] == sorted(record.at for record in records)
    assert {"sync", "state", "generation", "version", "node"} <= {span.kind for span in read(records).spans()}
    silent = [span for span in read(records).spans() if span.name == "silent"]
    assert len(silent) == 2
    assert all(span.end is not None and span.end - span.start > 10 for span in silent)
    found = [record.event for record in records]
    syncs = [event.record for event in found if isinstance(event, SyncEnded)]
    assert {"committed", "peers_lost"} == {sync.outcome for sync in syncs}
    assert any(sync.lost for sync in syncs)
    slowest, usual = max(sync.seconds for sync in syncs[1:]), sorted(sync.seconds for sync in syncs)[len(syncs) // 2]
    assert slowest > 5 * usual
    assert any(isinstance(event, LoadFailed) for event in found)
    assert any(isinstance(event, events.Scaled) for event in found)
    assert {event.event for event in found if isinstance(event, Transition)} >= {
        ReplicaEvent.BACKOFF_ELAPSED,
        ReplicaEvent.RESTART,
        ReplicaEvent.GIVE_UP,
    }
    assert any(isinstance(event, events.NodeChanged) and event.after == "lost" for event in found)
    assert isinstance(end := found[-1], events.RunEnded)
    assert end.exit_code == 0


def test_the_recorded_run_names_nothing_of_the_machine_that_recorded_it() -> None:
    text = (STATIC.parent / "demo.jsonl").read_text()
    assert len(text) < 100_000
    places = set(re.findall(r"(?<![\w.<])/[a-z]+/[\w.-]+", text))
    assert places
    assert all(place.startswith(("/home/user", "/usr/lib")) for place in places), places
    assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", text)) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}

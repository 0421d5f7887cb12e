"""What is wrong with a run, in sentences.

Covers: telemetry/verdict.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from replicas.status import (
    ChannelStatus,
    GroupStatus,
    NodeStatus,
    PublishStatus,
    ReplicaStatus,
    RunStatus,
    StoreStatus,
    SyncRecord,
)
from replicas.telemetry.verdict import verdict

NOW = 1000.0


def replica(index: int = 0, **about: Any) -> ReplicaStatus:
    found: dict[str, Any] = {"state": "ready", "generation": 1, "state_age_s": 5.0, **about}
    return ReplicaStatus(name=f"a/{index}", group="a", replica=index, **found)


def run(*replicas: ReplicaStatus, group: dict[str, Any] | None = None, **about: Any) -> RunStatus:
    found = GroupStatus(name="a", launcher="exec", world_size=1, replicas=replicas or (replica(),), **(group or {}))
    given: dict[str, Any] = {"store": StoreStatus(up=True, host="", port=0), "groups": (found,), **about}
    return RunStatus(run="r", version="", endpoint="", pid=1, uptime_s=0, ready=True, **given)


def channel(**about: Any) -> ChannelStatus:
    given: dict[str, Any] = {"members": (), "committed_version": 7, **about}
    return ChannelStatus(name="policy", epoch=1, digest="", **given)


SLOW = PublishStatus(
    version=9, publisher="t/0", state="moving", seconds=3.0, waits_for=("a/0/0", "a/1/0"), waiting=2, left_s=57.0
)
FAILED = SyncRecord(version=8, outcome="deadline_exceeded", seconds=1.0, nbytes=0)


def test_all_is_well() -> None:
    quick = (msgspec.structs.replace(SLOW, seconds=1.9), msgspec.structs.replace(SLOW, waits_for=(), waiting=0))
    found = verdict(run(replica(), replica(1, state="finished"), channels=(channel(under_way=quick),)), NOW)
    assert (found.level, found.troubles) == ("good", ())
    assert found.sentence == "All is well: 1 replica ready, 1 finished, policy at version 7."


@pytest.mark.parametrize(
    ("status", "level", "about", "text", "since"),
    [
        (
            run(replica(state="failed", reason="rank 0 exited")),
            "bad",
            "replica a/0",
            "a/0 has failed for good: rank 0 exited",
            995.0,
        ),
        (run(replica(state="backoff")), "warn", "replica a/0", "a/0 has ended, and waits to be started again.", 995.0),
        (run(replica(state="starting", reason="behind")), "note", "replica a/0", "a/0 is starting: behind", 995.0),
        (
            run(*(replica(index, state="pending", state_age_s=index) for index in range(5))),
            "note",
            "group a",
            "a/0, a/1, a/2 and 2 more wait for their start.",
            996.0,
        ),
        (
            run(*(replica(index, state="draining", reason="waits 58 s for the lease of node n1") for index in (0, 1))),
            "note",
            "group a",
            "a/0, a/1 are being ended: waits 58 s for the lease of node n1",
            995.0,
        ),
        (
            run(channels=(channel(under_way=(SLOW,)),)),
            "note",
            "channel policy",
            "The publish of version 9 of policy (moving) waits for a/0/0 and 1 more.",
            997.0,
        ),
        (
            run(channels=(channel(disk_problem="No space left on device"),)),
            "bad",
            "channel policy",
            "A decision of policy cannot be written to disk, and waits: No space left on device",
            None,
        ),
        (
            run(replica(state="silent", reason="no heartbeat from rank 0", heartbeat_age_s=8.0, state_age_s=8.0)),
            "warn",
            "replica a/0",
            "a/0 is silent: no heartbeat from rank 0",
            992.0,
        ),
        (
            run(
                replica(state="silent", reason="nothing is heard of node n2", nodes=("n2",)),
                nodes=(NodeStatus(name="n2", state="away", heard_age_s=9.0, replicas=("a/0",)),),
            ),
            "warn",
            "node n2",
            "Node n2 is away: its agent is silent; it runs a/0.",
            991.0,
        ),
        (
            run(group={"restart_budget_remaining_ratio": 0.2, "on_failure": "run"}),
            "warn",
            "group a",
            "Group a has 20% of its restart budget left; without any, a failure ends the run.",
            None,
        ),
        (
            run(replica(cycles=2), group={"no_progress_remaining_ratio": 0.3, "no_progress_cycles": 3}),
            "warn",
            "group a",
            "a/0 failed 2 times in a row without a new step or version; from 3 on, a failure ends the run.",
            None,
        ),
        (
            run(store=StoreStatus(up=False, host="", port=0)),
            "bad",
            "run",
            "The rendezvous store does not answer: no new process group forms.",
            None,
        ),
        (run(draining=True), "warn", "run", "The run is being drained: 1 replica left.", None),
        (
            run(event_loop_lag_s=2.0),
            "warn",
            "run",
            "The supervisor is slow: its event loop lags by over a second.",
            None,
        ),
        (
            run(nodes=(NodeStatus(name="n2", state="away", heard_age_s=9.0),)),
            "warn",
            "node n2",
            "Node n2 is away: its agent is silent.",
            991.0,
        ),
        (
            run(channels=(channel(last_sync=FAILED),)),
            "warn",
            "channel policy",
            "Version 8 of policy was not committed: deadline exceeded.",
            None,
        ),
        (
            run(channels=(channel(mixed_since=900.0, served={6: 1, 7: 2}),)),
            "warn",
            "channel policy",
            "Replicas serve different versions of policy: version 7 on 2, version 6 on 1.",
            900.0,
        ),
        (
            run(replica(lag_s={"policy": 40.0}), channels=(channel(),)),
            "warn",
            "replica a/0",
            "a/0 is behind: a newer version of policy is not loaded yet.",
            960.0,
        ),
        (
            run(replica(open_s={"policy": 90.0}), channels=(channel(),)),
            "warn",
            "replica a/0",
            "a/0 holds an update of policy open, and with it a slot.",
            910.0,
        ),
    ],
)
def test_each_trouble_is_a_sentence(status: RunStatus, level: str, about: str, text: str, since: float | None) -> None:
    found = verdict(status, NOW)
    (trouble,) = found.troubles
    assert (trouble.level, trouble.about, trouble.text, trouble.since) == (level, about, text, since)
    assert (found.level, found.sentence) == (level, text)
    later = msgspec.structs.replace(status, uptime_s=60.0)
    assert [one.text for one in verdict(later, NOW).troubles] == [text], "an age is in no sentence"


def test_each_reason_of_a_trouble_is_a_sentence_with_its_own_age() -> None:
    told = [(4.0, "no heartbeat"), (9.0, "rank 0 exited"), (6.0, "rank 0 exited")]
    ill = [replica(n, state="failed", state_age_s=age_s, reason=why) for n, (age_s, why) in enumerate(told)]
    assert [(one.about, one.text, one.since) for one in verdict(run(*ill), NOW).troubles] == [
        ("replica a/0", "a/0 has failed for good: no heartbeat", 996.0),
        ("group a", "a/1, a/2 have failed for good: rank 0 exited", 991.0),
    ]


def test_many_reasons_are_one_sentence() -> None:
    ill = [replica(index, state="failed", state_age_s=index, reason=f"rank {index} exited") for index in range(4)]
    (one,) = verdict(run(*ill), NOW).troubles
    assert (one.text, one.since) == ("a/0, a/1, a/2 and 1 more have failed for good.", 997.0)


def test_a_group_without_the_replicas_that_it_needs_is_the_worst() -> None:
    found = verdict(run(replica(), replica(1, state="backoff"), group={"min_ready": 2}), NOW)
    assert found.sentence == "Group a has 1 of the 2 ready replicas that it needs."
    assert [one.level for one in found.troubles] == ["bad", "warn"]


def test_a_step_that_fell_is_told() -> None:
    found = verdict(run(channels=(channel(step=0.0, step_before=40.0),)), NOW)
    assert found.sentence == "The step of policy fell from 40 to 0: did its trainer lose its checkpoint?"
    # a report knows only the fall from the events, and the newest step
    assert verdict(run(channels=(channel(step=41.0, step_before=40.0),)), NOW).level == "good"


@pytest.mark.parametrize(("code", "level"), [(0, "good"), (1, "bad")])
def test_a_run_that_is_over_says_how(code: int, level: str) -> None:
    found = verdict(run(replica(state="drained"), exit_code=code, ended_by="trainer finished"), NOW)
    assert (found.level, found.sentence) == (level, f"The run is over, with exit code {code}: trainer finished.")
    assert found.troubles == ()


def test_a_wait_has_its_end() -> None:
    """The sentence stays as it is while the time passes: only ``until`` says when."""
    ends = [
        (run(replica(state="backoff", left_s=12.0)), "a/0 has ended, and waits to be started again.", 1012.0),
        (run(replica(state="draining", left_s=8.0), replica(1, state="draining")), "a/0, a/1 are being ended.", None),
        (
            run(replica(state="draining", left_s=8.0), draining=True),
            "The run is being drained: 1 replica left.",
            1008.0,
        ),
        (
            run(
                channels=(channel(waits="for 1 of 2 members to reconnect after the coordinator's restart", left_s=2.5),)
            ),
            "policy waits for 1 of 2 members to reconnect after the coordinator's restart.",
            1002.5,
        ),
    ]
    for status, sentence, until in ends:
        found = verdict(status, NOW)
        assert (found.sentence, found.troubles[0].until) == (sentence, until)

"""Events as lines for people: every kind has one, and the lines of a run read like a
story.

Covers: cli/render.py, telemetry/words.py.
"""

from __future__ import annotations

from typing import get_args

import pytest

from replicas.cli.render import event_line
from replicas.core.base import effects
from replicas.core.lives.lifecycle import ReplicaEvent as Step
from replicas.core.lives.lifecycle import Transition
from replicas.messages.identity import Member
from replicas.status import SyncRecord
from replicas.telemetry import events
from replicas.telemetry.words import concerns, routine

MEMBER = Member("rollout", 1, 0, "nonce")


def transition(**fields: object) -> Transition:
    base = {"group": "a", "replica": 0, "generation": 2, "event": Step.READY, "before": "starting", "after": "ready"}
    return Transition(**{**base, "reason": "", **fields})  # type: ignore[arg-type]  # fields by name


TOLD: list[tuple[events.Event, str, str]] = [
    (transition(start_s=2.0), "a/0", "ready after 2 s (generation 2)"),
    (transition(start_s=2.0, recovery_s=3.5), "a/0", "ready after 2 s (generation 2, down for 3.5 s)"),
    (transition(event=Step.START, before="pending", after="starting"), "a/0", "starting (generation 2)"),
    (transition(event=Step.UNREADY, before="ready", after="starting", reason="behind"), "a/0", "not ready: behind"),
    (
        transition(event=Step.SILENT, before="ready", after="silent", reason="no heartbeat from rank 0", silent_s=4.0),
        "a/0",
        "silent: no heartbeat from rank 0",
    ),
    (transition(before="silent", reason="heard after 12.0 s"), "a/0", "ready again: heard after 12.0 s"),
    (transition(event=Step.UNREADY, before="silent", after="starting"), "a/0", "not ready"),
    (
        transition(event=Step.RETRY, after="backoff", reason="rank 0 was killed by SIGKILL", resume_s=1.5),
        "a/0",
        "ended: rank 0 was killed by SIGKILL; starts again in 1.5 s",
    ),
    (
        transition(event=Step.RETRY, before="draining", after="backoff", reason="restart requested", resume_s=0.0),
        "a/0",
        "ended: restart requested; starts again when its old processes have ended",
    ),
    (events.RunStarted(run="grpo", pid=7, version="1.0"), "run", "grpo started by supervisor process 7 (replicas 1.0)"),
    (events.RunEnded(exit_code=1, reason="a failed"), "run", "over, exit code 1: a failed"),
    (events.Draining(target="", reason="preempted"), "run", "draining: ends after its present sync (preempted)"),
    (events.Draining(target="a/0", hurry=True), "a/0", "draining: its processes are killed at once (requested)"),
    (events.Drained(target="a", seconds=1.5), "a", "drained: none of its processes is left, after 1.5 s"),
    (events.Scaled(group="a", before=1, after=3), "a", "scaled from 1 to 3 replicas"),
    (events.RestartAsked(target="a", rolling=True), "a", "restart requested, a few replicas at a time"),
    (events.FailedReset(replicas=("a/0", "a/1")), "run", "by order (reset-failed): starting a/0, a/1 again"),
    (events.Reloaded(changed=("a",), removed=("b",)), "config", "reloaded: changed a; removed b"),
    (events.Reloaded(), "config", "reloaded: nothing has changed"),
    (events.ReloadRefused(problems=("a: b", "c")), "config", "new file refused, the old config stays: a: b; c"),
    (
        events.ReplicaExited(group="a", replica=0, generation=1, outcome="failed", reason="rank 0 exited"),
        "a/0",
        "generation 1 failed: rank 0 exited",
    ),
    (
        events.HeldUp(group="a", replica=0, generation=1, what="port :80", holder="process 7"),
        "a/0",
        "waits for port :80, still held by process 7",
    ),
    (
        events.HeldUp(
            group="a", replica=0, generation=1, what="the end of a process", holder="process 7", pid=7, since=40.0
        ),
        "a/0",
        "waits for process 7 to die, alive 1m after SIGKILL",
    ),
    (events.TokenChanged(role="operator", change="revoked"), "run", "old operator token revoked"),
    (
        events.LeftoverFound(pid=7, start_time=1, command="sleep 9", how="mark", group="a", replica=0),
        "a/0",
        "process 7 of a dead supervisor was killed: sleep 9",
    ),
    (
        events.LeasesAwaited(nodes=("n1", ""), seconds=34.0),
        "run",
        "waiting up to 34 s before replicas start: old ones may still run on n1 and a node whose name is lost",
    ),
    (
        events.ConnectionsRefused(reason="token", count=3),
        "run",
        "control port refused 3 connections: a wrong or old token (the right one: replicas token)",
    ),
    (
        events.ConnectionsRefused(reason="hello", count=1),
        "run",
        "control port refused 1 connection: a join that the run cannot accept",
    ),
    (
        events.ConnectionsRefused(reason="too_many", count=2),
        "run",
        "control port refused 2 connections: too many at once without a token",
    ),
    (effects.MemberJoined("policy", MEMBER), MEMBER.name, "joined channel policy"),
    (
        effects.MemberLost("policy", MEMBER, "lease"),
        MEMBER.name,
        "removed from channel policy: no heartbeat came within heartbeat_timeout",
    ),
    (effects.MemberLost("policy", MEMBER, "left"), MEMBER.name, "closed channel policy"),
    (
        effects.MemberLost("policy", MEMBER, "absent"),
        MEMBER.name,
        "removed from channel policy: it has not reconnected to the restarted coordinator",
    ),
    (effects.MemberLost("policy", MEMBER, "rank 0 exited"), MEMBER.name, "removed from channel policy: rank 0 exited"),
    (effects.EpochStarted("policy", 4, (MEMBER,)), "policy", "membership has changed: 1 member now (epoch 4)"),
    (
        effects.SyncEnded("policy", SyncRecord(version=3, outcome="committed", seconds=0.5, nbytes=2048, members=2)),
        "policy",
        "version 3 committed in 500 ms: 2 KiB on 2 members",
    ),
    (
        effects.OperationEnded("outer", "barrier", "SyncError", 0.5, "a/0/0 cannot be reached by b/0/0"),
        "outer",
        "barrier failed (SyncError) after 500 ms: a/0/0 cannot be reached by b/0/0",
    ),
    (effects.ReplicaLoaded("policy", "rollout", 1, 3), "rollout/1", "all ranks serve version 3 on channel policy"),
    (
        effects.ReplicaLoaded("policy", "rollout", 1, 0),
        "rollout/1",
        "no version is served by all ranks on channel policy",
    ),
    (
        effects.StepFell("policy", 3, 0, 812),
        "policy",
        "the trainer's step fell from 812 to 0 with version 3: was its checkpoint lost?",
    ),
    (
        effects.StoreChanged("policy", False),
        "policy",
        "the rendezvous store does not answer: no new process group forms",
    ),
    (effects.CaughtUp("policy", 3, (MEMBER,), 10), "policy", "rollout/1/0 caught up: received version 3 late"),
    (
        effects.WrongBytes("policy", 3, MEMBER, "rollout/0/0", "block 2 is not what was published"),
        MEMBER.name,
        "got wrong bytes of version 3 from rollout/0/0, and asks again: block 2 is not what was published",
    ),
    (
        effects.LoadFailed("policy", "rollout", 0, 7, "no weights for b", kept=True),
        "rollout/0",
        "keeps its version and refuses version 7 of policy: no weights for b",
    ),
    (effects.Retried("policy", "frozen"), "policy", "trying a transfer or operation again: a member was frozen"),
    (effects.Retried("policy", "refused"), "policy", "trying a transfer or operation again: a member was not ready"),
    (
        effects.Retried("policy", "failed", "its store was replaced"),
        "policy",
        "trying a transfer or operation again: its store was replaced",
    ),
    (
        effects.SidecarReplaced("policy", "lost", 2),
        "policy",
        "replacing 2 sidecars (helper processes): a member was lost",
    ),
    (effects.ReplicaIdle("policy", "rollout", 1, 4), "rollout/1", "may end: no sync of channel policy needs it now"),
    (
        effects.SyncEnded("policy", SyncRecord(version=4, outcome="busy", seconds=6.0, nbytes=0, members=0)),
        "policy",
        "version 4 failed after 6 s, not committed: no free slot, all are in use (raise slots)",
    ),
    (
        events.StacksSaved(group="a", replica=0, generation=2, reason="no heartbeat", path="logs"),
        "a/0",
        "saved stack traces in the log of generation 2: no heartbeat",
    ),
    (events.Draining(target="", reason="over"), "run", "draining: ends after its present sync (the run is over)"),
    (
        events.FailedReset(replicas=(), groups=("a",)),
        "run",
        "by order (reset-failed): restart budget of group a is full again",
    ),
    (events.EventsLost(count=3, reason="disk full"), "run", "3 events not written to disk: disk full"),
]


@pytest.mark.parametrize(("event", "who", "what"), TOLD, ids=lambda value: type(value).__name__)
def test_what_is_told(event: events.Event, who: str, what: str) -> None:
    line = event_line(events.Record(12, 100.0, event)).plain
    assert line[8:] == f"{12:>7}  {who:18} {what}"


def test_what_a_change_of_state_tells_is_not_listed_twice() -> None:
    lost = effects.MemberLost("policy", MEMBER, "exited")
    assert routine(lost)
    assert not routine(effects.MemberLost("policy", MEMBER, "exited", observes=True)), "no replica changes for it"
    assert not routine(effects.MemberLost("policy", MEMBER, "lease"))
    assert routine(events.ReplicaExited(group="a", replica=0, generation=1, outcome="failed"))
    assert routine(effects.ReplicaLoaded("policy", "rollout", 1, 0))
    assert not routine(transition(event=Step.RETRY, after="backoff"))


def test_every_kind_of_event_has_its_group_where_it_is_looked_for() -> None:
    """A new kind is told by its name and fields; it must not be about a group in
    another way than all others."""
    for kind in get_args(events.Event):
        fields = set(kind.__struct_fields__)
        if "replica" in fields:
            assert "group" in fields, kind
        assert fields & {"group", "target", "member", "channel"} or fields.isdisjoint({"replica", "rank"}), kind


@pytest.mark.parametrize(
    ("target", "concerned"),
    [
        ("a", [True, True, False, True, True]),
        ("a/0", [True, False, False, True, True]),
        ("a/0/0", [True, False, False, False, True]),
        ("a/0/1", [True, False, False, True, True]),
        ("b", [False, False, True, False, True]),
    ],
)
def test_whom_an_event_concerns(target: str, concerned: list[bool]) -> None:
    told: list[events.Event] = [
        transition(),
        transition(replica=1),
        transition(group="b"),
        effects.MemberLost("policy", Member("a", 0, 1, "x"), ""),
        events.RunEnded(exit_code=0),
    ]
    assert [concerns(events.Record(1, 0.0, event), target) for event in told] == concerned

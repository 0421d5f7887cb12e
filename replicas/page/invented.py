"""A run that never was, for a look at the page without one. Pure.

A trainer and four rollouts on three nodes learn for some minutes: a rollout is killed,
a node is switched off, a load fails, somebody scales, and one replica fails for good.
The events are made as a coordinator and a supervisor would tell them, and are the same
each time.
"""

from __future__ import annotations

import random

from replicas.core.base import effects
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.messages.identity import Member
from replicas.status import ReplicaState, SyncRecord
from replicas.telemetry import events

CHANNEL = "policy"
NBYTES = 3_090_000_000
LASTS_S = 600.0
_EACH_S = 7.5
_SEED = 7
_HOMES = {
    "trainer/0": "n1",
    "rollout/0": "n1",
    "rollout/1": "n2",
    "rollout/2": "n2",
    "rollout/3": "n3",
    "rollout/4": "n2",
}
_MOVED = ("rollout/3", 262.1, "n1")
"""Where a replica starts again that has lost its node."""
_KILLED = "rank 0 was killed by SIGKILL"
_FELL = "rank 0 exited with code 1"


def home(name: str, at: float) -> str:
    """The node of a replica."""
    return _MOVED[2] if name == _MOVED[0] and at > _MOVED[1] else _HOMES[name]


class _Story:
    """What happens, in the order of its times."""

    def __init__(self, began_at: float, seed: int) -> None:
        self.began_at = began_at
        self.random = random.Random(seed)
        self.told: list[tuple[float, events.Event]] = []
        self.generations: dict[str, int] = {}
        self.states: dict[str, list[tuple[float, ReplicaState]]] = {}

    def tell(self, at: float, event: events.Event) -> None:
        self.told.append((at, event))

    def moves(
        self, at: float, name: str, what: ReplicaEvent, after: ReplicaState, reason: str = "", **more: object
    ) -> None:
        group, _, index = name.partition("/")
        known = self.states.setdefault(name, [(0.0, "pending")])
        if what in (ReplicaEvent.START, ReplicaEvent.BACKOFF_ELAPSED):
            self.generations[name] = self.generations.get(name, 0) + 1
            more["nodes"] = (home(name, at),)
        step = Transition(
            group=group,
            replica=int(index),
            generation=self.generations.get(name, 0),
            event=what,
            before=known[-1][1],
            after=after,
            reason=reason,
            **more,  # type: ignore[arg-type]  # fields by name
        )
        known.append((at, after))
        self.tell(at, step)

    def starts(self, at: float, name: str, takes_s: float, *, again: float = 0.0) -> None:
        """``again``: when it was last ready, if this is another generation."""
        self.moves(at, name, ReplicaEvent.BACKOFF_ELAPSED if again else ReplicaEvent.START, "starting")
        self.tell(at + 0.6 * takes_s, effects.MemberJoined(CHANNEL, self.member(name)))
        recovery_s = at + takes_s - again if again else None
        self.moves(at + takes_s, name, ReplicaEvent.READY, "ready", start_s=takes_s, recovery_s=recovery_s)

    def dies(
        self, at: float, name: str, reason: str, code: int, *, outcome: str = "failed", final: bool = False
    ) -> None:
        group, _, index = name.partition("/")
        lost = "its process has ended"
        self.tell(at, effects.MemberLost(CHANNEL, self.member(name), lost))
        rank = events.RankEnd(rank=0, code=code, pid=4100 + int(index), text=reason)
        about = {"group": group, "replica": int(index), "generation": self.generations[name], "reason": reason}
        self.tell(at + 0.08, events.ReplicaExited(**about, outcome=outcome, ranks=(rank,)))  # type: ignore[arg-type]  # fields by name
        if final:
            reason = f"{reason}; its restart budget is spent"
            self.moves(at + 0.09, name, ReplicaEvent.GIVE_UP, "failed", reason)
        else:
            why = "signal" if code < 0 else "exit"
            self.moves(at + 0.09, name, ReplicaEvent.RETRY, "backoff", reason, restart_reason=why)

    def member(self, name: str) -> Member:
        group, _, index = name.partition("/")
        return Member(group, int(index), 0, f"g{self.generations.get(name, 0)}")

    def ready(self, name: str, at: float) -> bool:
        return max((one for one in self.states.get(name, []) if one[0] <= at), default=(0.0, "pending"))[1] == "ready"


def invented(began_at: float, *, seed: int = _SEED) -> list[events.Record]:
    """Return the events of the whole run, which began at ``began_at`` (since 1970)."""
    story = _Story(began_at, seed)
    story.tell(0.0, events.RunStarted(run="demo", pid=4021, version="0.3.0"))
    for at, node in ((0.1, "n1"), (0.9, "n2"), (1.2, "n3")):
        story.tell(at, events.NodeChanged(node=node, before="", after="up", address=f"10.0.0.{node[1]}"))
    _troubles(story)
    _versions(story)
    story.tell(LASTS_S, events.RunEnded(exit_code=0, reason="trainer finished"))
    told = sorted(story.told, key=lambda one: one[0])
    return [events.Record(seq, began_at + at, event) for seq, (at, event) in enumerate(told, 1)]


def _troubles(story: _Story) -> None:
    for at, name, takes_s in (
        (2.0, "trainer/0", 6.0),
        (8.5, "rollout/0", 9.0),
        (8.6, "rollout/1", 9.4),
        (8.7, "rollout/2", 11.0),
        (8.8, "rollout/3", 13.0),
    ):
        story.starts(at, name, takes_s)
    story.dies(142.3, "rollout/1", _KILLED, -9)
    story.starts(143.4, "rollout/1", 11.5, again=142.3)
    story.tell(236.0, events.NodeChanged(node="n3", before="up", after="away", reason="its agent is not connected"))
    story.moves(236.4, "rollout/3", ReplicaEvent.UNREADY, "starting", "its node n3 is away")
    story.tell(262.0, events.NodeChanged(node="n3", before="away", after="lost", reason="its lease is over"))
    story.dies(262.1, "rollout/3", "its node n3 was lost", 0, outcome="lost")
    story.starts(263.4, "rollout/3", 12.0, again=236.4)
    story.tell(330.0, events.Scaled(group="rollout", before=4, after=5))
    story.starts(330.2, "rollout/4", 10.4)
    story.tell(402.6, effects.LoadFailed(CHANNEL, "rollout", 2, 53, "out of memory in load_weights", kept=False))
    story.dies(402.7, "rollout/2", _FELL, 1)
    story.starts(404.0, "rollout/2", 10.0, again=402.6)
    story.tell(470.0, events.RestartAsked(target="rollout/0", rolling=False))
    for at in (503.0, 519.0):
        story.dies(at, "rollout/4", _FELL, 1)
        story.starts(at + 2.0, "rollout/4", 8.0, again=at)
    story.dies(535.0, "rollout/4", _FELL, 1, final=True)


def _versions(story: _Story) -> None:
    targets = [name for name in _HOMES if name != "trainer/0"]
    version, at = 0, 24.0
    while at < LASTS_S - 10:
        version += 1
        slow = 1.0 if version % 9 else 3.2
        phases = {name: slow * seconds * story.random.uniform(0.8, 1.25) for name, seconds in _PHASES.items()}
        seconds = sum(phases.values())
        here = [name for name in targets if story.ready(name, at)]
        lost = tuple(f"{name}/0" for name in here if not story.ready(name, at + seconds))
        story.tell(at + seconds, effects.SyncEnded(CHANNEL, _record(at, version, phases, seconds, here, lost)))
        for name in here:
            load_s = story.random.uniform(0.5, 1.1) * (2.5 if name == "rollout/2" and version % 5 == 0 else 1.0)
            then = at + seconds + load_s + story.random.uniform(0.0, 2.5)
            if story.ready(name, then):
                group, _, index = name.partition("/")
                story.tell(then, effects.ReplicaLoaded(CHANNEL, group, int(index), version, load_s))
        at += _EACH_S * story.random.uniform(0.85, 1.2)


_PHASES = {
    "wait": 0.02,
    "pack": 0.21,
    "queue": 0.003,
    "form": 0.03,
    "map": 0.015,
    "transfer": 0.9,
    "verify": 0.12,
    "commit": 0.004,
}


def _record(
    at: float, version: int, phases: dict[str, float], seconds: float, here: list[str], lost: tuple[str, ...]
) -> SyncRecord:
    homes = {name: home(name, at) for name in here}
    away = [name for name in here if homes[name] != "n1"]
    first = {homes[name]: f"{name}/0" for name in reversed(away)}
    pulled = {member: {"trainer/0/0": NBYTES} for member in first.values()}
    if "n3" in first and "n2" in first:
        pulled[first["n3"]] = {"trainer/0/0": NBYTES // 3, first["n2"]: NBYTES - NBYTES // 3}
    failed = version == 41
    return SyncRecord(
        version=version,
        outcome="deadline_exceeded" if failed else "committed",
        seconds=seconds,
        nbytes=NBYTES,
        moved_nbytes=sum(sum(givers.values()) for givers in pulled.values()),
        moved_to={member.rpartition("/")[0]: sum(givers.values()) for member, givers in pulled.items()},
        pulled=pulled,
        phases=phases,
        members=0 if failed else 1 + len(here) - len(lost),
        lost=lost,
        publisher="trainer/0",
        held={name: seconds * share for name, share in zip(sorted(away), (0.97, 0.9, 0.8, 0.7), strict=False)},
        reasons=dict.fromkeys(lost, "its process has ended"),
        error="not all targets had it after 30 s" if failed else "",
        step=version * 4,
    )

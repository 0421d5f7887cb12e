"""kill -9 of the whole supervisor, which another one follows, and of the canary, at
each step of promote, reject and rollback: on real processes.

Whoever dies, the replicas end with one version, the one that was decided; no process
loads an older version after a newer one; and none but the canary ever loads what was
rejected.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from replicas import errors
from replicas.control.client import Client
from replicas.messages.version_orders import Promote, Reject, Rollback, VersionOrder
from replicas.status import ChannelStatus, VersionStatus
from tests.integration.supervisor import armed_supervisor
from tests.support.nodes import replicas_of
from tests.support.programs import group
from tests.support.runs import Run, running
from tests.support.waits import eventually

TRAINER = """
import os, time, torch, replicas
out = os.environ["OUT"]
with replicas.join("policy") as channel:
    while True:
        for name in sorted(os.listdir(out + "/asked"), key=int):
            channel.publish({"weight": torch.full((1000,), float(name))}, meta={"step": float(name)}).wait(60)
            os.unlink(f"{out}/asked/{name}")
        time.sleep(0.02)
"""
"""Publishes each number for which there is a file, as a weight."""
ROLLOUT = """
import json, os, replicas
log = open(os.environ["OUT"] + "/loaded-" + os.environ["REPLICA_ID"], "a", buffering=1)
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait() as update:
            (value,) = {value for _, tensor in update for value in tensor.tolist()}
        log.write(json.dumps({"pid": os.getpid(), "version": update.version, "value": value}) + chr(10))
"""
REPLICAS = 3
CANARY = 0
STEPS = [("decided", 1), ("granting", 1), ("loaded", 1), ("loaded", REPLICAS - 1)]


class Loaded(NamedTuple):
    pid: int
    version: int
    value: float


class Fleet:
    """A run with a trainer, rollouts of which one is the canary, and a supervisor that
    kills."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rejected: set[float] = set()
        self.published = 0

    def publish(self) -> float:
        """Publish another candidate; return its value once the canary serves it."""
        value = self.ask_to_publish()
        eventually(lambda: self.serves(CANARY) == value, f"a canary that serves {value}", timeout_s=60)
        eventually(lambda: self.channel().versions[0].serving == (f"rollout/{CANARY}",), "that it is known")
        return value

    def ask_to_publish(self) -> float:
        """Let the trainer publish another value; return it."""
        self.published += 1
        (self.run.folder / "out" / "asked" / str(self.published)).touch()
        return float(self.published)

    def order(self, order: VersionOrder) -> None:
        """Send an order; whoever carries it out may die before the answer."""
        token = (self.run.state_dir / "operator-token").read_text().strip()
        with suppress(errors.Disconnected):
            Client(self.run.endpoint(), token=token).order(order)

    def channel(self) -> ChannelStatus:
        (found,) = self.run.status().channels
        return found

    def version(self, number: int) -> VersionStatus:
        return next(one for one in self.channel().versions if one.number == number)

    def tried(self, number: int) -> VersionStatus | None:
        """The candidate of this number, once it is served or rejected."""
        found = self.version(number)
        return found if found.rejected or found.serving else None

    def number_of(self, value: float) -> int:
        """The version that was published with the value; 0: not yet committed."""
        return next((one.number for one in self.channel().versions if one.step == value), 0)

    def pid(self, replica: int) -> int:
        (_, _, pid, _) = replicas_of(self.run.status(), "rollout")[f"rollout/{replica}"]
        assert pid is not None
        return pid

    def loaded(self, replica: int) -> list[Loaded]:
        path = self.run.folder / "out" / f"loaded-{replica}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [Loaded(**json.loads(line)) for line in lines if line.endswith("}")]

    def value(self, label: str) -> float:
        """The value of the version with this label."""
        (found,) = [one for one in self.channel().versions if label in one.labels]
        return float(found.step or 0)

    def serves(self, replica: int) -> float:
        """The value that the replica's living process has loaded last; 0: none."""
        pid = replicas_of(self.run.status(), "rollout")[f"rollout/{replica}"][2]
        return next((one.value for one in reversed(self.loaded(replica)) if one.pid == pid), 0.0)

    def all_serve(self, value: float) -> None:
        """All replicas come to serve the value, under one number, the current one."""
        eventually(
            lambda: [self.serves(one) for one in range(REPLICAS)] == [value] * REPLICAS, f"{value}", timeout_s=60
        )
        found = eventually(lambda: one_served(self.channel()), "one version that all serve", timeout_s=60)
        assert {self.loaded(one)[-1].version for one in range(REPLICAS)} == {found}

    def started(self) -> dict[str, Any]:
        """Generation and pid of each rollout that is ready."""
        found = replicas_of(self.run.status(), "rollout")
        return {name: (generation, pid) for name, (state, generation, pid, _) in found.items() if state == "ready"}

    def settled(self) -> bool:
        """Whether all replicas are ready, and the channel knows them all."""
        return len(self.started()) == REPLICAS and len(self.channel().members) == REPLICAS + 1

    def restarted_canary(self, before: dict[str, Any]) -> None:
        """All replicas come to be ready, and none but the canary has started anew."""
        canary = f"rollout/{CANARY}"
        eventually(lambda: self.started().get(canary, before[canary]) != before[canary], "the next canary")
        eventually(self.settled, "all replicas", timeout_s=60)
        assert {name for name, found in self.started().items() if found != before[name]} == {canary}

    def check(self) -> None:
        """Nobody went back, no number means two contents, and what was rejected was
        loaded by one replica at most."""
        contents: dict[int, set[float]] = defaultdict(set)
        tried: dict[float, set[int]] = defaultdict(set)
        for replica in range(REPLICAS):
            newest: dict[int, int] = defaultdict(int)
            for one in self.loaded(replica):
                contents[one.version].add(one.value)
                assert one.version > newest[one.pid], one
                newest[one.pid] = one.version
                tried[one.value].add(replica)
        assert all(len(found) == 1 for found in contents.values()), contents
        assert all(len(tried[value]) <= 1 for value in self.rejected), tried


def one_served(channel: ChannelStatus) -> int:
    """The current version, once it is what all replicas serve; 0 before."""
    return channel.current if channel.served == {channel.current: REPLICAS} else 0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "out" / "asked").mkdir(parents=True)
    more = f'env = {{ OUT = "{tmp_path / "out"}" }}\nrestart = {{ max_restarts = 1000, initial_delay = 0 }}\n'
    text = (
        group("trainer", TRAINER, more)
        + group("rollout", ROLLOUT, f"replicas = {REPLICAS}\n{more}")
        + '[channels.policy]\nsources = ["trainer"]\ntargets = ["rollout"]\nfollow = "promoted"\nslots = 6\n'
        + 'canary = { group = "rollout", replicas = 1 }\n'
    )
    with running(tmp_path, text, stop_when='[]\nadopt = "60s"', command=armed_supervisor.COMMAND) as run:
        run.wait_line("control at", timeout_s=60)
        fleet = Fleet(run)
        eventually(fleet.settled, "all replicas", timeout_s=120)
        for _ in range(2):
            value = fleet.publish()
            fleet.order(Promote(channel="policy"))
            fleet.all_serve(value)
        yield fleet
        fleet.check()
        run.end(timeout_s=60)


def decide(fleet: Fleet, kind: str, moment: str, times: int, pid: int = 0) -> float:
    """Publish a candidate, give an order during which a process dies; return the value
    that all must serve then."""
    candidate, current, previous = fleet.publish(), fleet.value("current"), fleet.value("previous")
    if kind != "promote":
        fleet.rejected.add(candidate)
    orders: dict[str, tuple[VersionOrder, float]] = {
        "promote": (Promote(channel="policy"), candidate),
        "reject": (Reject(channel="policy", why="worse"), current),
        "rollback": (Rollback(channel="policy"), previous),
    }
    order, expected = orders[kind]
    armed_supervisor.arm(fleet.run.folder, moment, times, pid)
    fleet.order(order)
    eventually(lambda: armed_supervisor.has_fired(fleet.run.folder), f"{kind}: {moment} {times}", timeout_s=30)
    return expected


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["promote", "reject", "rollback"])
def test_another_supervisor_goes_on_with_what_was_decided(fleet: Fleet, kind: str) -> None:
    for moment, times in STEPS:
        before = fleet.started()
        served = decide(fleet, kind, moment, times)
        fleet.run.left()
        fleet.run.start()
        fleet.run.wait_line("control at", timeout_s=60)
        fleet.all_serve(served)
        eventually(fleet.settled, "all replicas under the next supervisor", timeout_s=60)
        assert fleet.started() == before, "it took them over"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["promote", "reject", "rollback"])
def test_the_canary_dies_and_what_was_decided_stands(fleet: Fleet, kind: str) -> None:
    for moment, times in STEPS:
        before = fleet.started()
        served = decide(fleet, kind, moment, times, fleet.pid(CANARY))
        fleet.all_serve(served)
        fleet.restarted_canary(before)


def reject_by_death(fleet: Fleet, moment: str, is_told: bool) -> None:
    """Publish a candidate whose canary dies at the moment; it ends rejected, by that if
    the canary was told of it, else perhaps by an order."""
    armed_supervisor.arm(fleet.run.folder, moment, 1, fleet.pid(CANARY))
    candidate = fleet.ask_to_publish()
    fleet.rejected.add(candidate)
    eventually(lambda: armed_supervisor.has_fired(fleet.run.folder), moment, timeout_s=30)
    number = int(eventually(lambda: fleet.number_of(candidate), "the candidate is committed", timeout_s=60))
    if is_told:
        found = eventually(lambda: fleet.version(number).rejected, "the death of its canary", timeout_s=60)
        assert "lost while it" in found
    elif not eventually(lambda: fleet.tried(number), "a canary, or its death", timeout_s=60).rejected:
        fleet.order(Reject(channel="policy", why="worse"))


@pytest.mark.timeout(400)
def test_a_canary_dies_while_it_gets_a_candidate(fleet: Fleet) -> None:
    """The others go on with what they serve, and then with the next candidate."""
    for moment, is_told in [("mapping", False), ("decided", False), ("granting", True), ("loaded", True)]:
        current = fleet.value("current")
        reject_by_death(fleet, moment, is_told)
        fleet.all_serve(current)
        eventually(fleet.settled, "all replicas", timeout_s=60)
        value = fleet.publish()
        fleet.order(Promote(channel="policy"))
        fleet.all_serve(value)

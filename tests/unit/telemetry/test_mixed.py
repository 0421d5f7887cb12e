"""Which versions the ready replicas of a channel serve, and since when they differ.

Covers: telemetry/tally.py.
"""

from __future__ import annotations

import time

import msgspec
import pytest
from rich.console import Console

from replicas.cli.render import status_tables
from replicas.core.base.effects import ReplicaLoaded
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.status import ChannelStatus, ReplicaState, RunStatus, StoreStatus
from replicas.telemetry.metrics import Metrics
from replicas.telemetry.tally import Tally


class Fleet:
    def __init__(self) -> None:
        self.tally = Tally()

    def moves(self, replica: int, after: ReplicaState, at: float = 0.0) -> None:
        step = Transition(
            group="rollout",
            replica=replica,
            generation=1,
            event=ReplicaEvent.READY if after == "ready" else ReplicaEvent.UNREADY,
            before="starting" if after == "ready" else "ready",
            after=after,
            reason="",
        )
        self.tally.count(step, at)

    def loads(self, replica: int, version: int, at: float = 0.0) -> None:
        self.tally.count(ReplicaLoaded("policy", "rollout", replica, version), at)

    @property
    def channel(self) -> ChannelStatus:
        status = ChannelStatus(name="policy", epoch=1, committed_version=6, digest="", members=(), adopt_together=True)
        return self.tally.channel(status)

    @property
    def run(self) -> RunStatus:
        return RunStatus(
            run="grpo",
            version="0",
            endpoint="",
            pid=1,
            uptime_s=0.0,
            ready=True,
            store=StoreStatus(up=True, host="", port=0),
            channels=(self.channel,),
        )


@pytest.fixture
def fleet() -> Fleet:
    found = Fleet()
    for replica in range(3):
        found.loads(replica, 5)
        found.moves(replica, "ready")
    return found


def test_a_fleet_is_mixed_from_the_first_load_to_the_last(fleet: Fleet) -> None:
    assert (fleet.channel.served, fleet.channel.mixed_since) == ({5: 3}, None)
    fleet.loads(0, 6, at=100.0)
    fleet.loads(1, 6, at=101.0)
    assert (fleet.channel.served, fleet.channel.mixed_since) == ({6: 2, 5: 1}, 100.0)
    fleet.loads(2, 6, at=102.0)
    assert (fleet.channel.served, fleet.channel.mixed_since) == ({6: 3}, None)


def test_one_that_is_not_ready_or_serves_no_whole_version_does_not_count(fleet: Fleet) -> None:
    fleet.loads(0, 6, at=100.0)
    fleet.loads(1, 0, at=101.0)
    assert fleet.channel.served == {6: 1, 5: 1}
    fleet.moves(2, "starting", at=102.0)
    assert (fleet.channel.served, fleet.channel.mixed_since) == ({6: 1}, None)
    fleet.moves(2, "ready", at=103.0)
    assert fleet.channel.mixed_since == 103.0


def test_the_next_supervisor_knows_since_when(fleet: Fleet) -> None:
    fleet.loads(0, 6, at=100.0)
    fleet.tally = msgspec.json.decode(msgspec.json.encode(fleet.tally), type=Tally)
    fleet.loads(0, 6, at=200.0)  # as its coordinator tells again
    assert fleet.channel.mixed_since == 100.0
    assert msgspec.json.decode(msgspec.json.encode(fleet.channel), type=ChannelStatus) == fleet.channel


def test_the_metric_counts_versions(fleet: Fleet) -> None:
    text = Metrics(lambda: fleet.run).render()[0].decode()
    assert 'replicas_served_versions{channel="policy",run="grpo"} 1.0' in text
    assert 'replicas_adopts_together{channel="policy",run="grpo"} 1.0' in text
    fleet.loads(0, 6)
    assert (
        'replicas_served_versions{channel="policy",run="grpo"} 2.0' in Metrics(lambda: fleet.run).render()[0].decode()
    )


def test_the_status_says_so_at_80_columns_and_only_then(fleet: Fleet) -> None:
    def shown() -> str:
        console = Console(width=80, no_color=True)
        with console.capture() as capture:
            console.print(status_tables(fleet.run))
        return capture.get()

    assert "different versions" not in shown()
    fleet.loads(0, 6, at=time.time() - 9001.0)
    line = "Replicas serve different versions of policy: version 6 on 1, version 5 on 2, for 2h 30m"
    assert line in " ".join(shown().split())

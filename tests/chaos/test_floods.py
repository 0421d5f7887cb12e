"""A real run under floods of connections of a stranger: members join, probes are
answered, memory is bounded, and nobody is evicted.

Here, and not beside other tests: a flood takes all the processors that it can get.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import replicas
from tests.support.machine.flood import KINDS, flood
from tests.support.programs import SERVES, group
from tests.support.runs import Run, running
from tests.support.waits import eventually

TRAINER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    while True:
        channel.publish({"w": torch.ones(1000)}).wait(timeout=60)
        time.sleep(0.1)
"""
CONFIG = (
    """
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""
    + group("trainer", TRAINER)
    + group("rollout", SERVES, 'restart = { initial_delay = "50ms" }')
)
JOIN_S = 3.0
PROBE_S = 1.0
MEMORY_NBYTES = 256 << 20
"""By which the supervisor may grow in all the floods together."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with running(tmp_path_factory.mktemp("flooded"), CONFIG) as found:
        eventually(lambda: ready(found), "the members", timeout_s=90)
        joins(found)  # torch is loaded here, too
        yield found


def ready(run: Run) -> bool:
    return run.status().ready


def joins(run: Run, many: int = 5) -> list[float]:
    token = (run.state_dir / "token").read_text().strip()
    return [timed(lambda: join(run.endpoint(), token)) for _ in range(many)]


def join(endpoint: str, token: str) -> None:
    replicas.join("policy", endpoint=endpoint, token=token, group="rollout", run="test", observe=True).close()


def probes(run: Run, many: int = 10) -> list[float]:
    return [timed(lambda: live(run.endpoint())) for _ in range(many)]


def live(endpoint: str) -> None:
    """As a kubelet asks."""
    connection = http.client.HTTPConnection(endpoint, timeout=10)
    try:
        connection.request("GET", "/livez")
        assert connection.getresponse().status == 200
    finally:
        connection.close()


def timed(do: Callable[[], None]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def resident_nbytes(run: Run) -> int:
    pages = Path(f"/proc/{run.status().pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def facts(run: Run) -> list[tuple[str, object]]:
    """What changes when a member or replica is lost."""
    status = run.status()
    members = [(one.name, one.state) for channel in status.channels for one in channel.members]
    return members + [(group.name, [one.generation for one in group.replicas]) for group in status.groups]


@pytest.fixture(scope="module")
def quiet_nbytes(run: Run) -> int:
    return resident_nbytes(run)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_delays_joins_and_probes_a_little_and_evicts_nobody(
    run: Run, quiet_nbytes: int, kind: str, record_property: Callable[[str, object], None]
) -> None:
    host, port = run.endpoint().split(":")
    before = facts(run)
    with flood(host, int(port), kind) as rate:
        found = {"join": joins(run), "probe": probes(run)}
    grown_nbytes = resident_nbytes(run) - quiet_nbytes
    for name, value in {**found, "rate": rate, "grown_nbytes": grown_nbytes}.items():
        record_property(name, value)
    print(
        kind,
        rate,
        grown_nbytes >> 20,
        {name: (sorted(times)[len(times) // 2], max(times)) for name, times in found.items()},
    )
    assert max(found["join"]) < JOIN_S
    assert max(found["probe"]) < PROBE_S
    assert grown_nbytes < MEMORY_NBYTES
    assert facts(run) == before

"""A real run under floods of connections of a stranger: joins, probes and recovery go on."""

from __future__ import annotations

import http.client
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

import replicas
from tests.support.flood import KINDS, flood
from tests.support.runs import Run, eventually, running

TRAINER = """
import time, torch, replicas
with replicas.join("policy") as channel:
    while True:
        channel.publish({"w": torch.ones(1000)}).wait(timeout=60)
        time.sleep(0.1)
"""
ROLLOUT = """
import replicas
with replicas.join("policy") as channel:
    while True:
        channel.receive().wait().close()
"""


def group(name: str, program: str, more: str = "") -> str:
    return f"""
[groups.{name}]
launcher = "exec"
command = ["{sys.executable}", "-c", '''{program}''']
{more}
"""


CONFIG = (
    """
[channels.policy]
sources = ["trainer"]
targets = ["rollout"]
"""
    + group("trainer", TRAINER)
    + group("rollout", ROLLOUT, 'restart = { initial_delay = "50ms", max_restarts = 20 }')
)
LIMIT_S = 1.0


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_delays_joins_and_probes_by_a_second_at_most(
    run: Run, kind: str, record_property: Callable[[str, object], None]
) -> None:
    host, port = run.endpoint().split(":")
    quiet_s = max(*joins(run), *probes(run))
    with flood(host, int(port), kind) as rate:
        found = {"join": joins(run), "probe": probes(run)}
    for name, times in found.items():
        record_property(name, sorted(times))
    record_property("rate", rate)
    print(kind, rate, quiet_s, {name: (sorted(times)[len(times) // 2], max(times)) for name, times in found.items()})
    for name, times in found.items():
        assert max(times) < quiet_s + LIMIT_S, name


def recovers(run: Run) -> float:
    """Seconds from the death of the rollout's rank to its readiness."""
    (rollout,) = next(one for one in run.status().groups if one.name == "rollout").replicas
    victim = run.find("channel.receive()")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def again() -> bool:
        status = run.status()
        (now,) = next(one for one in status.groups if one.name == "rollout").replicas
        return now.generation > rollout.generation and status.ready

    eventually(again, "another generation", timeout_s=90)
    return time.monotonic() - began


@pytest.mark.parametrize("kind", ["touch", "page"])
def test_a_flood_delays_recovery_by_half_at_most(
    run: Run, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """Compared with a process that takes as much of the processors, and leaves the port alone."""
    host, port = run.endpoint().split(":")
    with flood(host, int(port), "busy"):
        quiet_s = recovers(run)
    with flood(host, int(port), kind):
        flooded_s = recovers(run)
    record_property("quiet_s", quiet_s)
    record_property("flooded_s", flooded_s)
    print(kind, quiet_s, flooded_s)
    assert flooded_s < 1.5 * quiet_s + LIMIT_S

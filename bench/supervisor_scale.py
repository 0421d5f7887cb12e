"""What does a supervisor of 10, 30, 100 replicas of a trivial command cost?

Theory of operation
===================

The command is ``sleep``: whatever is measured is ours. *Up*: from the start of ``python
-m replicas.supervisor`` to the first status in which every replica is ready, the start
of its own store (which loads torch) included. *Idle*: the time of all processes of the
run on all cores, commands included, while nobody asks anything. *Status*: ``GET
/status``, each over a connection of its own, as the command line does it; also while a
tenth of the replicas is killed and started again. *Memory*: the PSS of all processes
but the commands; by its growth from one size to the next, that of one replica.
"""

from __future__ import annotations

import http.client
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.trees import Process, Supervised, cpu_s, pss_nbytes, send, supervised, until
from replicas.control.client import Client

__all__ = ["SETTLE_S", "SIZES", "ScaleSample", "asked", "idle_parts", "measure", "p99"]

SIZES = (10, 30, 100)
SETTLE_S = 8.0
"""By then shims have looked once at what their processes have."""
IDLE_S = 10.0
ASKED = 300
UP_TIMEOUT_S = 120.0
LOOK_S = 0.05
COMMAND = ("sleep", "100000")


@dataclass(frozen=True)
class ScaleSample:
    """Seconds, bytes, and parts of a core. ``idle_parts``: by kind of process.
    ``hit_s``: status while some are restarted."""

    replicas: int
    up_s: float
    down_s: float
    idle: float
    idle_parts: dict[str, float]
    status_s: list[float]
    metrics_s: list[float]
    hit_s: list[float]
    memory_nbytes: int
    processes: int


def p99(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=100, method="inclusive")[98]


def _kind(line: str) -> str:
    for name in ("shim", "log pump", "store_process", "agent.local"):
        if name in line:
            return name
    return "supervisor" if "replicas.supervisor" in line else "command" if "sleep" in line else "other"


def _up(run: Supervised, replicas: int) -> float:
    """Seconds until all are ready."""
    endpoint = run.endpoint()

    def ready() -> bool:
        time.sleep(LOOK_S)
        (group,) = Client(endpoint).status().groups
        return sum(one.state == "ready" for one in group.replicas) == replicas

    until(ready, f"{replicas} replicas are ready", UP_TIMEOUT_S)
    return time.monotonic() - run.began


def idle_parts(tree: dict[Process, str], kind_of: Callable[[str], str]) -> dict[str, float]:
    """By kind of process, which its command line tells: the part of a core that they
    use."""
    by_kind: dict[str, list[Process]] = {}
    for process, line in tree.items():
        by_kind.setdefault(kind_of(line), []).append(process)
    before = {kind: cpu_s(those) for kind, those in by_kind.items()}
    began = time.monotonic()
    time.sleep(IDLE_S)
    lasted_s = time.monotonic() - began
    return {kind: (cpu_s(those) - before[kind]) / lasted_s for kind, those in by_kind.items()}


def asked(ask: Callable[[], object]) -> list[float]:
    """Seconds of each of many requests."""
    found = []
    for _ in range(ASKED):
        began = time.monotonic()
        ask()
        found.append(time.monotonic() - began)
    return found


def _while_hit(run: Supervised, endpoint: str, replicas: int) -> list[float]:
    """Kill a tenth of the commands, and ask until all are ready again."""
    (before,) = run.status().groups
    for one in before.replicas[: max(1, replicas // 10)]:
        assert one.pid is not None
        send(next(process for process in run.processes() if process[0] == one.pid), signal.SIGKILL)
    found: list[float] = []

    def again() -> bool:
        began = time.monotonic()
        (group,) = Client(endpoint).status().groups
        found.append(time.monotonic() - began)
        restarted = sum(group.restarts.values()) >= max(1, replicas // 10)
        return restarted and all(one.state == "ready" for one in group.replicas)

    until(again, "all replicas are ready again", UP_TIMEOUT_S)
    return found


def measure(folder: Path, replicas: int) -> ScaleSample:
    command = ", ".join(f'"{word}"' for word in COMMAND)
    text = f'[groups.many]\nlauncher = "exec"\ncommand = [{command}]\nreplicas = {replicas}\n'
    text += 'restart = { initial_delay = "100ms", max_restarts = 1000 }\n'
    with supervised(folder, text) as run:
        up_s = _up(run, replicas)
        endpoint = run.endpoint()
        time.sleep(SETTLE_S)
        tree = run.processes()
        idle = idle_parts(tree, _kind)
        status_s = asked(lambda: Client(endpoint).status())
        metrics_s = asked(lambda: _get(endpoint, "/metrics"))
        memory = pss_nbytes([process for process, line in tree.items() if _kind(line) != "command"])
        hit_s = _while_hit(run, endpoint, replicas)
        began = time.monotonic()
        run.popen.send_signal(signal.SIGTERM)
        run.popen.wait(UP_TIMEOUT_S)
        down_s = time.monotonic() - began
    return ScaleSample(replicas, up_s, down_s, sum(idle.values()), idle, status_s, metrics_s, hit_s, memory, len(tree))


def _get(endpoint: str, path: str) -> bytes:
    host, _, port = endpoint.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()

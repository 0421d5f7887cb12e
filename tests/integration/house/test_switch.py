"""What the switch of the tests says it does to packets, it does: where it did less, the
tests of links would pass, and prove nothing. And nothing of it outlives a killed test.

(A cut that cuts nothing, or that heals nothing, is found by those tests themselves.)
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine.networks import Machine
from tests.support.machine.switch import MBIT_NBYTES, ROOT, Shape, Switch, switched_hosts, why_no_switch
from tests.support.waits import eventually

IP_UDP_NBYTES = 28
"""Headers of one datagram."""

TALKER = """
import json, select, socket, sys, threading, time
server = socket.create_server((sys.argv[1], 9))  # before anybody is told that this host is up
def transfers():
    while True:
        connection = server.accept()[0]
        while connection.recv(1 << 20):
            pass
        connection.close()
threading.Thread(target=transfers, daemon=True).start()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
    talk.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    talk.bind((sys.argv[1], 7))
    heard = []
    print("up", flush=True)
    while True:
        ready = select.select([sys.stdin, talk], [], [])[0]
        if talk in ready:
            data, (source, _) = talk.recvfrom(65536)
            heard.append((source, float(data.rstrip(b".")), time.monotonic()))
        elif not (line := sys.stdin.readline()):
            break
        else:
            order = json.loads(line)
            if "stream" in order:
                began = time.monotonic()
                with socket.create_connection((order["to"], 9), timeout=60) as stream:
                    stream.sendall(bytes(order["stream"]))
                    stream.shutdown(socket.SHUT_WR)
                    stream.recv(1)  # closed when all has been read
                heard.append((order["to"], began, time.monotonic()))
            for _ in range(order.get("datagrams", 0)):
                talk.sendto(str(time.monotonic()).encode().ljust(order["nbytes"], b"."), (order["to"], 7))
            print(json.dumps(heard), flush=True)
"""
"""Tells what it has heard so far: from whom, when that was sent, and when it came."""


@pytest.fixture(autouse=True, scope="module")
def _switch() -> None:
    reason = why_no_switch()
    if reason:
        pytest.skip(reason)


class Talker:
    """A program on each host that sends, and notes what it hears."""

    def __init__(self, host: Machine) -> None:
        self.address = host.address
        command = host.command(sys.executable, "-c", TALKER, host.address)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def send(self, other: Talker, datagrams: int = 10, nbytes: int = 100) -> None:
        self._ask(to=other.address, datagrams=datagrams, nbytes=nbytes)

    def stream_s(self, other: Talker, nbytes: int) -> float:
        """Seconds from the first to the last byte of a TCP connection of its own."""
        _, began, ended = self._ask(to=other.address, stream=nbytes)[-1]
        return float(ended - began)

    def heard(self, other: Talker) -> list[tuple[float, float]]:
        """When each datagram of this one was sent, and came."""
        return [(sent, came) for source, sent, came in self._ask() if source == other.address]

    def hears(self, other: Talker, datagrams: int) -> list[tuple[float, float]]:
        """The same, once there are so many."""
        eventually(lambda: len(self.heard(other)) >= datagrams, f"{datagrams} datagrams from {other.address}")
        return self.heard(other)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def _ask(self, **order: Any) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        found: list[Any] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def talkers(size: int) -> Iterator[tuple[Switch, list[Talker]]]:
    with switched_hosts(size) as switch, ExitStack() as stack:
        made = [Talker(host) for host in switch.hosts]
        for one in made:
            stack.callback(one.close)
        yield switch, made


def datagrams_lost(switch: Switch, one: int, other: int, nbytes: int = 100) -> int:
    return switch.counts(one, other).lost_nbytes // (nbytes + IP_UDP_NBYTES)


def all_lost(switch: Switch, one: int, other: int, datagrams: int) -> None:
    """So many have come to the switch, and went no further."""
    passed = switch.counts(one, other).passed_nbytes
    eventually(lambda: datagrams_lost(switch, one, other) == datagrams, f"{datagrams} lost from {one} to {other}")
    assert switch.counts(one, other).passed_nbytes == passed


def test_a_cut_one_way_is_of_that_way_alone() -> None:
    with talkers(3) as (switch, (a, b, c)):
        switch.cut(0, 1, one_way=True)
        for one, other in ((a, b), (b, a), (a, c), (c, a), (b, c), (c, b)):
            one.send(other)
        for one, other in ((a, b), (c, a), (a, c), (c, b), (b, c)):
            assert len(one.hears(other, 10)) == 10
        all_lost(switch, 0, 1, 10)
        assert b.heard(a) == []
        switch.heal(1)
        a.send(b)
        assert len(b.hears(a, 10)) == 10, "what was lost never comes"


def test_a_delay_is_of_its_way_and_keeps_the_order() -> None:
    with talkers(2) as (switch, (a, b)):
        switch.shape(0, 1, Shape(delay_s=0.3), one_way=True)
        for _ in range(5):
            a.send(b)
            b.send(a)
        there, back = b.hears(a, 50), a.hears(b, 50)
        assert there == sorted(there)
        assert min(came - sent for sent, came in there) >= 0.3
        assert statistics.median(came - sent for sent, came in there) < 0.6
        assert min(came - sent for sent, came in back) < 0.1


def test_so_many_are_lost_as_was_said() -> None:
    with talkers(2) as (switch, (a, b)):
        switch.shape(0, 1, Shape(loss=0.2), one_way=True)
        for done in range(0, 2000, 100):
            a.send(b, 100)
            b.send(a, 100)
            eventually(
                lambda done=done: len(b.heard(a)) + datagrams_lost(switch, 0, 1) == done + 100,  # type: ignore[misc]  # mypy sees no default
                "all have come or were lost",
            )
        assert 300 < datagrams_lost(switch, 0, 1) < 500
        assert len(a.hears(b, 2000)) == 2000
        switch.shape_all(Shape(loss=0.05))
        assert a.stream_s(b, 500_000) > 0, "TCP gets everything through"


@pytest.mark.parametrize(
    ("rate_nbytes_s", "nbytes"), [(10_000.0, 40_000), (8 * MBIT_NBYTES, 2_000_000), (200 * MBIT_NBYTES, 40_000_000)]
)
def test_a_rate_is_kept_and_used(rate_nbytes_s: float, nbytes: int) -> None:
    """Never faster, whoever sends; and TCP finds it, on a machine that has time for
    it."""
    with talkers(2) as (switch, (a, b)):
        switch.shape(0, 1, Shape(rate_nbytes_s=rate_nbytes_s), one_way=True)
        for _ in range(3):
            before = switch.counts(0, 1).passed_nbytes
            seconds = a.stream_s(b, nbytes)
            passed = switch.counts(0, 1).passed_nbytes - before
            assert nbytes <= passed <= rate_nbytes_s * seconds * 1.02 + 2 * 65_536
            if nbytes / seconds > 0.7 * rate_nbytes_s:
                break
        else:
            pytest.fail(f"{nbytes / seconds:.0f} bytes a second of {rate_nbytes_s:.0f}")
        assert b.stream_s(a, 100_000) < max(2.0, 100_000 / rate_nbytes_s), "the way back has no limit"


DIES = """
import subprocess, sys, time
from tests.support.machine.switch import switched_hosts
with switched_hosts(2) as switch:
    subprocess.Popen(switch.hosts[0].command("sh", "-c", "setsid sleep 987 & sleep 988"))
    while len(switch.hosts[0].processes("sleep")) < 2:
        time.sleep(0.01)
    print(switch._process.pid, *(host.holder for host in switch.hosts), *switch.hosts[0].processes(), flush=True)
    time.sleep(600)
"""


def test_nothing_outlives_a_test_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, cwd=ROOT) as test:
        assert test.stdout is not None
        pids = [int(pid) for pid in test.stdout.readline().split()]
        assert len(pids) >= 6
        began = [started(pid) for pid in pids]
        assert all(began)
        os.kill(test.pid, signal.SIGKILL)
        eventually(lambda: [started(pid) for pid in pids if started(pid) in began] == [], "all of it has ended")


def started(pid: int) -> tuple[int, str]:
    """What names a process, also when its pid is used again; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""
    return (0, "") if fields[0] == "Z" else (pid, fields[19])

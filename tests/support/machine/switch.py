"""Hosts joined by a switch on which each way from one to another can be cut, slowed
down, delayed and made to lose packets.

Theory of operation
===================

A *way* is an ordered pair of hosts, so that a link may be broken in one direction
alone, and between two hosts alone while both reach all others. Kernels of test machines
seldom have what shapes ways (``netem``, the filters of ``tc``): a process does it,
:mod:`tests.support.machine.switch_process`, which needs ``/dev/net/tun`` and root.

The hosts are those of :mod:`tests.support.machine.networks`: namespaces of network,
mounts and processes, held by a process each. They reach each other, and nobody else;
this process is not on their network, and talks to what it starts there over pipes. The
holders and the switch end when their standard inputs do, so also when the test run is
killed by SIGKILL, and the kernel then kills all that runs on the hosts, and takes links
and namespaces away.

A cut and a shape are two things: a way that is healed has the shape that it had before.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import select
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from tests.support.machine.networks import Machine, bare_hosts, why_no_hosts
from tests.support.machine.switch_process import MTU
from tests.support.root import ROOT

__all__ = ["MBIT_NBYTES", "ROOT", "Counts", "Shape", "Switch", "switched_hosts", "why_no_switch"]

MBIT_NBYTES = 125_000
"""Bytes a second of 1 Mbit/s."""
TIMEOUT_S = 20.0
_PROGRAM = "tests.support.machine.switch_process"


class Shape(NamedTuple):
    """How packets pass on a way. ``rate_nbytes_s``: bytes a second, 0 for no limit;
    ``loss``: from 0 to 1, of packets.

    A packet on its way here is what a sender's kernel sends at once: one segment of
    TCP, or some in a row, which are lost together. The rate counts the headers of IP
    and TCP, too.
    """

    rate_nbytes_s: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0


class Counts(NamedTuple):
    """Of one way."""

    passed_nbytes: int
    lost_nbytes: int


class Switch:
    """The switch from the test's side; hosts are named by their places in ``hosts``. An
    order holds when its call returns."""

    def __init__(self, hosts: tuple[Machine, ...], process: subprocess.Popen[bytes]) -> None:
        self.hosts = hosts
        self._process = process
        self._off: set[int] = set()

    def ways(self, *hosts: int) -> list[tuple[int, int]]:
        """All ways from and to ``hosts``; without one, all that there are."""
        every = itertools.permutations(range(len(self.hosts)), 2)
        return [way for way in every if not hosts or set(way) & set(hosts)]

    def cut(self, one: int, other: int, *, one_way: bool = False) -> None:
        """Nothing passes from ``one`` to ``other`` any more, nor back, unless it is to
        be cut ``one_way`` only."""
        self._order(self._both(one, other, one_way=one_way), cut=True)

    def cut_off(self, host: int) -> None:
        """Nothing passes from this host to any other, nor back."""
        self._off.add(host)
        self._order(self.ways(host), cut=True)

    def heal(self, *hosts: int) -> None:
        """No way from or to these hosts is cut, but for those of others that are cut
        off; without one, none at all. Shapes stay."""
        self._off -= set(hosts or self._off)
        self._order((way for way in self.ways(*hosts) if not set(way) & self._off), cut=False)

    def shape(self, one: int, other: int, shape: Shape, *, one_way: bool = False) -> None:
        """How packets pass between the two, in both directions or one."""
        self._order(self._both(one, other, one_way=one_way), **shape._asdict())

    def shape_all(self, shape: Shape, *hosts: int) -> None:
        """How packets pass on all ways from and to these hosts; without one, on all."""
        self._order(self.ways(*hosts), **shape._asdict())

    def counts(self, one: int, other: int) -> Counts:
        """What has passed from one to the other so far, and what was lost."""
        ((passed, lost),) = self._order([(one, other)])
        return Counts(passed, lost)

    @staticmethod
    def _both(one: int, other: int, *, one_way: bool) -> list[tuple[int, int]]:
        return [(one, other)] if one_way else [(one, other), (other, one)]

    def _order(self, ways: Iterable[tuple[int, int]], **what: Any) -> list[tuple[int, int]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ways": list(ways), **what}).encode() + b"\n")
        self._process.stdin.flush()
        answer: list[tuple[int, int]] = json.loads(_line(self._process))
        return answer


@contextmanager
def switched_hosts(size: int, shape: Shape = Shape()) -> Iterator[Switch]:
    """So many hosts, all ways between them of this shape."""
    net = f"10.{random.randint(64, 127)}.{random.randint(0, 255)}"
    with ExitStack() as stack:
        hosts = stack.enter_context(bare_hosts([f"{net}.{index + 1}" for index in range(size)]))
        process = stack.enter_context(_process(hosts))
        for host in hosts:
            host.set_up_link(mtu=MTU)
        switch = Switch(hosts, process)
        switch.shape_all(shape)
        yield switch


@functools.cache
def why_no_switch() -> str:
    """Why this machine cannot have one; empty when it can."""
    reason = why_no_hosts()
    if reason:
        return reason
    try:
        with switched_hosts(2):
            return ""
    except (subprocess.SubprocessError, OSError, AssertionError) as error:
        return f"no switch between hosts: {error}"


@contextmanager
def _process(hosts: tuple[Machine, ...]) -> Iterator[subprocess.Popen[bytes]]:
    given = json.dumps([(host.holder, host.address) for host in hosts])
    command = [sys.executable, "-m", _PROGRAM, given]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        _line(process)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    assert process.stderr is not None
    assert select.select([process.stdout], [], [], TIMEOUT_S)[0], "the switch does not answer"
    line = process.stdout.readline()
    assert line, f"the switch has ended: {process.stderr.read().decode().strip()}"
    return line

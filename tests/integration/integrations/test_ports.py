"""Engines of one host that start at once never fail by a port."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.machine.networks import why_no_networks
from tests.support.root import ROOT

ENGINES, TIMES = 8, 20


def rush(way: str, times: int) -> list[int]:
    """How many of eight servers were up in each round; see the program."""
    program = f'ip link set lo up && exec {sys.executable} -m tests.support.machine.port_rush "$0" "$1"'
    command = ["unshare", "--net", "sh", "-c", program, way, str(times)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks())
def test_a_program_that_takes_every_port_keeps_no_engine_from_its_own() -> None:
    assert rush("held", TIMES) == [ENGINES] * TIMES
    assert rush("closed", 1) == [0]  # a port that was only looked up is somebody else's

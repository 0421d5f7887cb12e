"""A host that is far from the others of its network: its cable to the bridge has a
delay, a rate, and loses packets, each way.

Kernels of test machines seldom have ``netem``: a process carries the frames
(:mod:`tests.support.machine.cable_process`). All else is as on the other hosts of
:func:`tests.support.machine.networks.hosts`, and the test's own process reaches the far
one, too, over the same cable.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.machine.networks import LINK, TIMEOUT_S, Machine, Network, _run
from tests.support.machine.switch import MBIT_NBYTES, Shape
from tests.support.root import ROOT

__all__ = ["FAR", "MBIT_NBYTES", "Shape", "far"]

FAR = Shape(100 * MBIT_NBYTES, 0.025, 0.01)
"""100 Mbit/s, a round trip of 50 ms, one packet in a hundred lost each way."""
_PROGRAM = "tests.support.machine.cable_process"


@contextmanager
def far(network: Network, machine: Machine, shape: Shape = FAR) -> Iterator[None]:
    """Put this cable in the place of the host's own, for good: nothing runs on it
    yet, and its network has no use after the block."""
    port = f"port{network.machines.index(machine)}"
    _run(*network.switch._ip("ip", "link", "del", port))  # and the other end with it
    ends = [[network.switch.holder, port], [machine.holder, LINK], shape._asdict()]
    command = [sys.executable, "-m", _PROGRAM, json.dumps(ends)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], TIMEOUT_S)[0], "the cable does not answer"
        if not process.stdout.readline():
            raise OSError(process.communicate(timeout=TIMEOUT_S)[1].decode().strip())
        _run(*network.switch._ip("ip", "link", "set", port, "txqueuelen", "10000", "master", "bridge", "up"))
        _run(*machine._ip("ip", "link", "set", LINK, "txqueuelen", "10000"))
        machine.set_up_link()
        yield
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)

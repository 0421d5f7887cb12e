"""A stopped process with a dead child, as the shim sees it."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from replicas.linux.processes import has_zombie, is_stopped
from replicas.supervisor.shim.deaths import STOPPED_S, StoppedWatch
from tests.support.waits import eventually

# Its child lives until a line comes.
PARENT = """
import os, signal, sys
os.fork() or os._exit(len(sys.stdin.readline()) > 9)
print("up", flush=True)
signal.pause()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_only_one_that_is_stopped_and_has_a_dead_child_is_blind(parent: subprocess.Popen[str]) -> None:
    watch = StoppedWatch(parent.pid)
    assert not watch.is_stuck(0.0)
    assert watch.due == math.inf  # its stop will wake the shim

    parent.send_signal(signal.SIGSTOP)
    eventually(lambda: is_stopped(parent.pid), "the stop")
    assert not watch.is_stuck(1.0)
    assert not watch.is_stuck(100.0)  # stopped, but its rank lives
    assert watch.due < math.inf

    assert parent.stdin is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    eventually(lambda: has_zombie(parent.pid), "the end of its child")
    assert not watch.is_stuck(101.0)
    looks = [watch.is_stuck(101.0 + 0.5 * look) for look in range(1, int(2 * STOPPED_S) + 2)]
    assert looks == [False] * (len(looks) - 1) + [True]
    assert not watch.is_stuck(150.0), "for a long time nobody looked"

    parent.send_signal(signal.SIGCONT)
    eventually(lambda: not is_stopped(parent.pid), "its continuation")
    assert not watch.is_stuck(200.0)

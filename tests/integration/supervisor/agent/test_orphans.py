"""What the next agent of a node ends of a dead one (supervisor/agent/orphans.py)."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from replicas.linux.processes import MARK, start_time
from replicas.supervisor.agent.messages import ShimLeft
from replicas.supervisor.agent.orphans import clean_up


@contextmanager
def process(mark: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that was started under a shim with this mark, or the shim itself."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, **({MARK: mark} if mark else {})}) as found:
        try:
            yield found
        finally:
            found.kill()


def left(nonce: str, shim: subprocess.Popen[bytes], *, later: int = 0) -> ShimLeft:
    return ShimLeft(nonce=nonce, pid=shim.pid, start_time=(start_time(shim.pid) or 0) + later)


def test_a_frozen_shim_is_swept_with_all_of_its_processes_and_nothing_else_is_touched() -> None:
    frozen, gone, other = (secrets.token_hex(8) for _ in range(3))
    with process(frozen) as shim, process(frozen) as rank, process() as reused, process(other) as stranger:
        shim.send_signal(signal.SIGSTOP)
        assert clean_up([left(frozen, shim), left(gone, reused, later=-1), ShimLeft(nonce=gone)], 0.2) == (
            frozen,
            gone,
            gone,
        )
        assert (shim.wait(10), rank.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert (reused.poll(), stranger.poll()) == (None, None)


def test_a_shim_that_ends_by_itself_is_waited_for() -> None:
    nonce = secrets.token_hex(8)
    with process(nonce) as shim, process(nonce) as rank:
        found = left(nonce, shim)
        shim.terminate()
        shim.wait()
        began = time.monotonic()
        assert clean_up([found], 20.0) == (nonce,)
        assert time.monotonic() - began < 10
        assert rank.wait(10) == -signal.SIGKILL

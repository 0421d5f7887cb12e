"""The supervisor's side of a shim, against processes that are no shims: they say
nothing, or die in a bad moment.

Covers: supervisor/agent/shim_process.py.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from pathlib import Path

import pytest

from replicas.linux.processes import MARK, marked
from replicas.supervisor.agent.shim_process import ShimProcess
from replicas.supervisor.wire.orders import PartSpec
from replicas.supervisor.wire.part_state import ExitReport

DEAF = "echo; exec sleep 600 >&2"
LEAVES_ONE = "sleep 600 >&2 & echo; exec sleep 600 >&2"
"""What it leaves has the other end of the control socket: there is no end of that
stream."""


class NoShim(ShimProcess):
    """A shim that is a few words of shell."""

    words = DEAF

    def _spawn(self, control: int, lock: int | None) -> subprocess.Popen[bytes]:
        env = {**os.environ, MARK: self.spec.nonce}
        made = subprocess.Popen(["sh", "-c", self.words], pass_fds=[control], env=env, stdout=subprocess.PIPE)
        assert made.stdout is not None
        with made.stdout:
            made.stdout.readline()  # what it starts is there
        return made


class LeavesOne(NoShim):
    words = LEAVES_ONE


def spec(tmp_path: Path, env: dict[str, str] | None = None) -> PartSpec:
    folder = str(tmp_path)
    return PartSpec("r", "g", 0, 1, 0, 1, 1, "exec", ("x",), env or {}, folder, folder, 1.0, secrets.token_hex(16))


async def end(kind: type[NoShim], tmp_path: Path) -> ExitReport:
    """Kill one of this kind; its report, when all that it left is gone."""
    moved = asyncio.Event()
    one = kind(spec(tmp_path), moved.set)
    one.kill()
    async with asyncio.timeout(30):
        while not one.state.gone:
            await moved.wait()
            moved.clear()
    assert one.state.remains is None
    assert one.state.report is not None
    assert not marked(one.spec.nonce)
    return one.state.report


@pytest.mark.anyio
async def test_a_shim_that_dies_is_gone_although_its_socket_is_held(tmp_path: Path) -> None:
    assert (await end(LeavesOne, tmp_path)).outcome == "lost"


@pytest.mark.anyio
async def test_a_shim_that_dies_is_swept_where_exit_codes_are_lost(tmp_path: Path) -> None:
    """A program that ignores SIGCHLD gets 0 as every exit code."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        report = await end(LeavesOne, tmp_path)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (report.outcome, report.text) == (
        "lost",
        "the shim on node 0, which watches the ranks, ended before the ranks",
    )


@pytest.mark.anyio
async def test_orders_that_are_too_long_leave_no_shim_behind(tmp_path: Path) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Kept(NoShim):
        def _spawn(self, control: int, lock: int | None) -> subprocess.Popen[bytes]:
            made.append(super()._spawn(control, lock))
            return made[0]

    with pytest.raises(OSError, match=r"19531 KiB"):
        Kept(spec(tmp_path, {"A": "x" * 20_000_000}), lambda: None)
    assert made == []

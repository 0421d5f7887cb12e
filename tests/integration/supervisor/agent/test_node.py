"""The supervisor's side of a shim, against processes that are no shims: they say
nothing, or die in a bad moment.

Covers: supervisor/agent/node.py.
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
from replicas.supervisor.agent.node import Node
from replicas.supervisor.wire.orders import NodeSpec

DEAF = "echo; exec sleep 600 >&2"
LEAVES_ONE = "sleep 600 >&2 & echo; exec sleep 600 >&2"
"""What it leaves has the other end of the control socket: there is no end of that
stream."""


class NoShim(Node):
    """A node whose shim is a few words of shell."""

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


def spec(tmp_path: Path, env: dict[str, str] | None = None) -> NodeSpec:
    folder = str(tmp_path)
    return NodeSpec("r", "g", 0, 1, 0, 1, 1, "exec", ("x",), env or {}, folder, folder, 1.0, secrets.token_hex(16))


async def end(node: Node) -> None:
    node.kill()
    await asyncio.wait_for(node.gone.wait(), 30)
    assert node.remains is None


@pytest.mark.anyio
async def test_a_shim_that_dies_is_gone_although_its_socket_is_held(tmp_path: Path) -> None:
    node = LeavesOne(spec(tmp_path), lambda: None)
    await end(node)
    assert node.report is not None
    assert node.report.outcome == "lost"


@pytest.mark.anyio
async def test_a_shim_that_dies_is_swept_where_exit_codes_are_lost(tmp_path: Path) -> None:
    """A program that ignores SIGCHLD gets 0 as every exit code."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        node = LeavesOne(spec(tmp_path), lambda: None)
        await end(node)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert node.report is not None
    assert (node.report.outcome, node.report.text) == ("lost", "the shim of node 0 ended before its processes")
    assert not marked(node.spec.nonce)


@pytest.mark.anyio
async def test_stacks_that_are_never_told_are_asked_for_again(tmp_path: Path) -> None:
    node = NoShim(spec(tmp_path), lambda: None)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await node.stacks(0.01)
        assert node._asking is None
    asking = asyncio.create_task(node.stacks(30.0))
    await asyncio.sleep(0)
    await end(node)
    assert await asking == {}, "it has ended: nobody waits for it"
    assert await node.stacks(30.0) == {}


@pytest.mark.anyio
async def test_orders_that_are_too_long_leave_no_shim_behind(tmp_path: Path) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Kept(NoShim):
        def _spawn(self, control: int, lock: int | None) -> subprocess.Popen[bytes]:
            made.append(super()._spawn(control, lock))
            return made[0]

    with pytest.raises(
        OSError, match=r"its orders of 19531 KiB are too long for a message; the environment must be smaller"
    ):
        Kept(spec(tmp_path, {"A": "x" * 20_000_000}), lambda: None)
    assert made[0].returncode == -signal.SIGKILL

"""What the library's own processes do not have of whoever starts them: working folder,
torchrun's options, the kernel's limit of one string."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import SLEEPS, group
from tests.support.runs import Run, running
from tests.support.shims import shim
from tests.support.waits import eventually

DAEMON = (sys.executable, "-m", "replicas.supervisor")
ELSEWHERE = ("sh", "-c", 'mkdir gone && cd gone && exec "$@"', "sh", *DAEMON)
PEERS = '[channels.grads]\npeers = ["a"]\n'

RANK_IN_A_REMOVED_FOLDER = """
import asyncio, os
from replicas.sidecar.kept_forkserver import KeptForkserver
from replicas.sidecar.rank_side.forkserver_client import Forkserver

async def main():
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    helper = KeptForkserver(os.environ, print)
    forkserver = await Forkserver.connect(helper.address)
    sidecar = await forkserver.fork()
    print("a sidecar of a rank without a folder", flush=True)
    await helper.aclose()

asyncio.run(main())
"""
LONG = tuple(str(number) * 9_000 for number in range(100, 170))  # 1.9 MB, no word over 128 KiB


def successor(run: Run, text: str) -> int:
    """Pid of what replaces a helper that is killed here."""
    old = run.find(text)
    os.kill(old, signal.SIGKILL)
    return run.find(text, besides=old)


def test_helpers_do_not_mind_the_end_of_the_folder_they_were_started_in(tmp_path: Path) -> None:
    with running(tmp_path, group("a", SLEEPS) + PEERS, command=ELSEWHERE) as run:
        run.wait_line("a/0: starting")
        (tmp_path / "gone").rmdir()
        eventually(lambda: run.status().store.up, "the store", timeout_s=60.0)
        successor(run, "store_process")
        forkserver = successor(run, "sidecar.forkserver")
        eventually(lambda: run.status().store.up, "the next store", timeout_s=60.0)
        libraries = Path(f"/proc/{forkserver}/maps")
        eventually(lambda: "libtorch_cpu" in libraries.read_text(), "torch in the next forkserver", timeout_s=60.0)
        folders = {line: str(Path(f"/proc/{pid}/cwd").readlink()) for pid, line in run.processes().items()}
        mine = {line for line in folders if "replicas" in line}
        assert len(mine) >= 5, folders  # agent, shim, log pump, store, forkserver
        assert {folders[line] for line in mine} == {"/"}
        assert {folders[line] for line in folders.keys() - mine} == {str(tmp_path)}
        run.end(timeout_s=60)


def test_a_rank_in_a_removed_folder_gets_a_sidecar(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK_IN_A_REMOVED_FOLDER],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "a sidecar of a rank without a folder" in done.stdout, done.stderr


@pytest.mark.parametrize("launcher", ["exec", "torchrun"])
def test_a_long_command_is_started(tmp_path: Path, launcher: str) -> None:
    code = "import os, sys; print(sum(map(len, sys.argv)), os.getcwd(), 'REPLICAS_GUARD' in os.environ, flush=True)"
    command = (sys.executable, "-c", code, *LONG)
    with shim(tmp_path, "", command=command, launcher=launcher) as one:
        assert one.report().outcome == "ok", one.state
        assert one.log().split() == [b"1890002", str(tmp_path).encode(), b"False"]
        assert one.gone() == 0


def test_options_of_another_torchrun_are_the_ranks_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ['PET_MODULE'], os.environ['PET_VIRTUAL_LOCAL_RANK'], os.environ['LOCAL_RANK'])"
    env = {**os.environ, "PET_MODULE": "1", "PET_VIRTUAL_LOCAL_RANK": "1", "PET_NO_PYTHON": "0"}
    with shim(tmp_path, code, launcher="torchrun", nproc_per_node=2, env=env) as one:
        assert one.report().outcome == "ok", one.state
        assert [one.log(rank).split() for rank in range(2)] == [[b"1", b"1", b"0"], [b"1", b"1", b"1"]]
        assert one.gone() == 0

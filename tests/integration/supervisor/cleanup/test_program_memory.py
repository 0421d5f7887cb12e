"""Named shared memory of the programs themselves: Python's resource tracker unlinks it,
and has the time for that."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from replicas.linux.processes import parents
from tests.support.programs import group
from tests.support.runs import ROOT, Run, running
from tests.support.waits import eventually

COMMAND = [sys.executable, "-c", "import sys; from replicas.cli.main import main; sys.exit(main())"]

ENGINE = """
import multiprocessing, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory

def worker(name, slow):
    memory = SharedMemory(name + '-worker', create=True, size=4096)
    def clean(*_):
        time.sleep(slow)
        memory.close()
        memory.unlink()
        open(os.environ['OUT'] + '/cleaned', 'w').close()
        os._exit(0)
    signal.signal(signal.SIGTERM, clean)
    print('up', flush=True)
    while True:
        time.sleep(1)

if __name__ == '__main__':
    memory = SharedMemory(os.environ['NAME'], create=True, size=4096)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # and leaves its child to itself
    multiprocessing.get_context('fork').Process(target=worker, args=(os.environ['NAME'], 2.0)).start()
    while True:
        time.sleep(1)
"""
"""A program with a child, each with a segment. The child needs 2 s from SIGTERM on to
clean up."""


def kill_main(run: Run, main: int) -> None:
    os.kill(main, signal.SIGKILL)


def kill_shim(run: Run, main: int) -> None:
    os.kill(parents(main)[0], signal.SIGKILL)


def restart(run: Run, main: int) -> None:
    order = [*COMMAND, "restart", "a/0", "-c", str(run.config)]
    subprocess.run(order, check=True, cwd=ROOT, capture_output=True)


WAYS: dict[str, Callable[[Run, int], None]] = {
    "its main process is killed": kill_main,
    "its shim is killed": kill_shim,
    "it is restarted": restart,
}


@pytest.mark.parametrize("way", WAYS)
def test_shared_memory_of_a_program_is_gone_with_its_generation(tmp_path: Path, way: str) -> None:
    name = f"replicas-test-{secrets.token_hex(6)}"
    env = f'env = {{ NAME = "{name}", OUT = "{tmp_path}" }}\nrestart = {{ initial_delay = "10ms" }}'
    (tmp_path / "engine.py").write_text(ENGINE)
    code = f"import runpy, sys; sys.path.insert(0, '{tmp_path}'); runpy.run_path('{tmp_path}/engine.py', run_name='__main__')"

    def segments() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"{name}*")}

    try:
        with running(tmp_path, group("a", code, env)) as run:
            eventually(lambda: run.log("a/0").exists() and "up" in run.log("a/0").read_text(), "the program")
            assert segments() == {name, f"{name}-worker"}
            inodes = {path: (Path("/dev/shm") / path).stat().st_ino for path in segments()}
            WAYS[way](run, int(run.status().groups[0].replicas[0].pid or 0))
            run.wait_line("a/0: starting (generation 2)", timeout_s=90.0)
            left = {path for path, inode in inodes.items() if inode in inodes_of(segments())}
            assert not left
            assert (tmp_path / "cleaned").exists() == (way == "it is restarted")
    finally:
        for path in segments():
            (Path("/dev/shm") / path).unlink(missing_ok=True)


def inodes_of(names: set[str]) -> set[int]:
    """Of those that are still there."""
    found = set()
    for name in names:
        try:
            found.add((Path("/dev/shm") / name).stat().st_ino)
        except FileNotFoundError:
            continue
    return found

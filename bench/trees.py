"""Trees of processes that the benchmark of supervisors starts, watches and ends: by a
mark in their environment.

A process counts by pid and start time, which no other has. What the mark does not show
(a daemon that wiped its environment) is known by what its starter told. Only such
processes are ever signalled, by pidfd.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.support import ROOT
from replicas.control.client import Client
from replicas.linux.processes import start_time
from replicas.status import RunStatus

__all__ = [
    "WORKER",
    "Process",
    "Supervised",
    "Tree",
    "alive",
    "cpu_s",
    "pss_nbytes",
    "send",
    "supervised",
    "until",
    "worker",
]

MARK = "BENCH_TREE_MARK"
WORKER = Path(__file__).with_name("tree_worker.py")
LOOK_S = 0.01
Process = tuple[int, int]
"""Pid and start time."""
T = TypeVar("T")


def until(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """The first true value of ``condition``.

    :raises RuntimeError: there was none within ``timeout_s`` (default 60 s).
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(LOOK_S)
    return value


def worker(kind: str, path: Path) -> list[str]:
    """Command line of a worker that tells in ``path`` when it runs."""
    return [sys.executable, "-I", "-S", str(WORKER), kind, str(path)]


def alive(processes: Iterable[Process]) -> set[Process]:
    """Those of them that still are."""
    return {(pid, began) for pid, began in processes if start_time(pid) == began}


def send(process: Process, signum: int) -> None:
    """Signal that very process, or nobody."""
    pid, began = process
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if start_time(pid) == began:
                signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)


def cpu_s(processes: Iterable[Process]) -> float:
    """Seconds of a core that they have used so far."""
    nanoseconds = 0
    for pid, _ in processes:
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # ended meanwhile
                nanoseconds += int(thread.read_text().split()[0])
    return nanoseconds / 1e9


def pss_nbytes(processes: Iterable[Process]) -> int:
    """Their memory; of a page that several processes have, to each its share."""
    total = 0
    for pid, _ in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return total


class Tree:
    """A command and all that comes of it. ``told``: file in which its workers say that
    they run. ``root``: where it finds this library; None: where its Python does."""

    def __init__(self, command: Sequence[str], folder: Path, log: str = "tree.log", root: Path | None = ROOT) -> None:
        self.folder = folder
        self.told_in = folder / "workers.jsonl"
        self._mark = secrets.token_hex(8)
        paths = os.pathsep.join(filter(None, (str(root or ""), os.environ.get("PYTHONPATH"))))
        self._env = {**os.environ, MARK: self._mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._log, self._others = folder / log, list[subprocess.Popen[bytes]]()
        self.began = time.monotonic()
        self.popen = self._start(command, {})
        self.main: Process = (self.popen.pid, start_time(self.popen.pid) or 0)

    def _start(self, command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as out:
            return subprocess.Popen(
                command,
                env={**self._env, **env},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start(self, command: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start one more program, which ends with the others."""
        self._others.append(self._start(command, env))
        return self._others[-1]

    def told(self) -> list[dict[str, Any]]:
        """What its workers have said, in the order in which they came up."""
        if not self.told_in.exists():
            return []
        return [json.loads(line) for line in self.told_in.read_text().splitlines()]

    def processes(self) -> dict[Process, str]:
        """All that are alive, with their command lines; daemons without the mark
        too."""
        found = self._marked()
        for line in self.told():
            for pid in (line["pid"], *line["daemons"]):
                began = start_time(pid)
                if began is not None:
                    found.setdefault((pid, began), _command_line(pid))
        return found

    def _marked(self) -> dict[Process, str]:
        entry = f"{MARK}={self._mark}".encode()
        found: dict[Process, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if entry not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
            except OSError:
                continue  # it ended meanwhile, or is somebody else's
            began = start_time(int(folder.name))
            if began is not None:
                found[int(folder.name), began] = _command_line(int(folder.name))
        return found

    def find(self, *words: str) -> Process:
        """The process with one of these in its command line, once there is one."""

        def look() -> Process | None:
            return next((who for who, line in self.processes().items() if any(word in line for word in words)), None)

        found = until(look, f"a process with {' or '.join(words)} in its command line")
        assert found is not None
        return found

    def close(self) -> None:
        """Nothing of it is left, whatever happened."""
        deadline = time.monotonic() + 20.0
        while left := self.processes():
            for process in left:
                send(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise RuntimeError(f"these do not end: {left}")
            time.sleep(LOOK_S)
        for popen in (self.popen, *self._others):
            popen.wait(10)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Supervised(Tree):
    """A run of ours. ``text``: TOML without its head; ``run``: keys of its table;
    ``python``: another interpreter, with a release of its own."""

    def __init__(self, folder: Path, text: str, run: str = "", python: str = sys.executable) -> None:
        head = f'schema_version = 1\n[run]\nname = "bench"\n{run}\n[control]\nlisten = "127.0.0.1:0"\n'
        (folder / "run.toml").write_text(head + text)
        self.state_dir = folder / ".replicas" / "bench"
        self.command = [python, "-m", "replicas.supervisor", str(folder / "run.toml")]
        super().__init__(self.command, folder, root=ROOT if python == sys.executable else None)

    def endpoint(self) -> str:
        """Of its control port, once it is there."""
        path = self.state_dir / "endpoint.json"
        until(path.exists, "the endpoint file")
        return str(msgspec.json.decode(path.read_bytes())["endpoint"])

    def status(self) -> RunStatus:
        return Client(self.endpoint()).status()


@contextmanager
def supervised(folder: Path, text: str, run: str = "", python: str = sys.executable) -> Iterator[Supervised]:
    """Ended with the block, whatever happened in it."""
    folder.mkdir(parents=True)
    started = Supervised(folder, text, run, python)
    try:
        yield started
    finally:
        started.close()

"""Processes that the benchmarks of start-up and of faults look at and hit: sidecars and
carriers, and how far they have come.

Theory of operation
===================

A fault must hit in the middle of something, on every machine and at every size. The
kernel counts what a process has written, to sockets too (what Gloo reads from them
is not counted). :class:`Progress` samples that count every 0.2 ms on a thread of its
own (there is nothing that could be waited for instead), and acts when it has grown by
so many bytes. The count at that moment is part of the result, so that a hit that came
too late can be told from one that was in time.

Only children of processes that the benchmark itself has started are looked at and
signalled, by pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicas.linux.sockets import SocketAddress

__all__ = [
    "Forkserver",
    "Hit",
    "Progress",
    "carriers_of",
    "children_of",
    "forkservers",
    "held",
    "one_core_left",
    "send",
]

FORKSERVER_TIMEOUT_S = 60.0
SAMPLE_S = 0.0002


def children_of(pid: int) -> list[int]:
    """Children of the process, oldest first; none when it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def carriers_of(pid: int) -> list[int]:
    """Carriers of this rank, whichever of its threads has started them."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                if b"replicas.carry.carrier" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def _name(pid: int) -> str:
    """As ``ps`` shows it; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def held(pids: Sequence[int]) -> Iterator[list[int]]:
    """pidfds of those that are there: a number of a process that is gone may belong to
    another one later."""
    found: list[int] = []
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                found.append(os.pidfd_open(pid))
        yield found
    finally:
        for pidfd in found:
            os.close(pidfd)


def send(pidfds: Sequence[int], number: signal.Signals) -> float:
    """Send a signal to those that are still there; the time just before."""
    began = time.monotonic()
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
    return began


@contextmanager
def one_core_left() -> Iterator[int | None]:
    """Keep this process, and all that it starts, off one core, and say which; None
    where there is only one."""
    before = os.sched_getaffinity(0)
    *others, core = sorted(before)
    if not others:
        yield None
        return
    os.sched_setaffinity(0, others)
    try:
        yield core
    finally:
        os.sched_setaffinity(0, before)


class Forkserver:
    """One that a shim would start: its children are the sidecars of one rank."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    def sidecars(self) -> list[int]:
        """Those that have a lane; not the spare one."""
        return [pid for pid in children_of(self._process.pid) if _name(pid) == "replica-sidecar"]

    def kill_sidecar(self) -> float:
        """SIGKILL to its newest child; the time just before."""
        sidecars = self.sidecars()
        if not sidecars:
            raise RuntimeError(f"the forkserver {self.name} has no sidecar")
        with held(sidecars[-1:]) as pidfds:
            return send(pidfds, signal.SIGKILL)


@asynccontextmanager
async def _forkserver() -> AsyncIterator[Forkserver]:
    name = f"replicas-bench-{secrets.token_hex(8)}"
    with SocketAddress(name).listen() as listener:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "replicas.sidecar.forkserver", "--listener", str(listener.fileno())),
            pass_fds=[listener.fileno()],
            env={**os.environ, "REPLICAS_FORKSERVER": name},
        )
    try:
        yield Forkserver(name, process)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())


@asynccontextmanager
async def forkservers(count: int) -> AsyncIterator[list[Forkserver]]:
    """So many, each of which has loaded torch: it answers its first client only
    then."""
    from replicas.sidecar.rank_side import forkserver_client  # takes torch, of which this process needs nothing later

    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(_forkserver()) for _ in range(count)]
        connections = await asyncio.gather(
            *(forkserver_client.Forkserver.connect(one.name, timeout_s=FORKSERVER_TIMEOUT_S) for one in found)
        )
        for one in connections:
            one.close()
        yield found


@dataclass(frozen=True)
class Hit:
    """``at``: when; ``nbytes``: how much had been written by then."""

    at: float
    nbytes: int


class Progress:
    """What the processes that ``pids()`` names write from now on."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._before = {pid: _written_nbytes(pid) for pid in pids()}

    @property
    def nbytes(self) -> int:
        return sum(_written_nbytes(pid) - self._before.get(pid, 0) for pid in self._pids())

    async def reaches(self, nbytes: int, act: Callable[[], float], timeout_s: float = 60.0) -> Hit:
        """Call ``act``, which returns the time, as soon as ``nbytes`` have been
        written.

        :raises RuntimeError: they were not, within ``timeout_s`` (default 60 s).
        """
        return await asyncio.to_thread(self._watch, nbytes, act, timeout_s)

    def _watch(self, nbytes: int, act: Callable[[], float], timeout_s: float) -> Hit:
        deadline = time.monotonic() + timeout_s
        while (written := self.nbytes) < nbytes:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {written} of {nbytes} bytes were written within {timeout_s:g} s")
            time.sleep(SAMPLE_S)
        return Hit(act(), written)


def _written_nbytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[3])  # the second line, "wchar: N"
    except (FileNotFoundError, ProcessLookupError):
        return 0

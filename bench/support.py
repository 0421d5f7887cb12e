"""What the benchmarks share: rank processes and their commands, the machine, medians,
tables and JSON.

Theory of operation
===================

The driver takes no torch into its process. Each rank is a process of its own, which
does what the driver asks in lines of JSON (:mod:`bench.rank`): one line to its standard
input, one or more back. Times are stamps of CLOCK_MONOTONIC, which all processes of one
machine share, so that a span may begin in one process and end in another.

A rank ends when its standard input does, whoever killed the driver; the driver kills
what has not ended in time.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "Bar",
    "Rank",
    "Spread",
    "available_nbytes",
    "busy_ratio",
    "in_words",
    "machine",
    "rank",
    "rotated",
    "run_bench",
    "scratch",
    "show",
    "threads_for",
    "together",
    "until",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
REPLY_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0
REPLY_NBYTES = 1 << 20
WIDTH = 150  # of a table that is written to a file


class Rank:
    """The driver's side of one process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    async def tell(self, do: str, **arguments: Any) -> None:
        """Give a command; its replies are read by :meth:`hear`."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await stdin.drain()

    async def hear(self, timeout_s: float = REPLY_TIMEOUT_S) -> dict[str, Any]:
        """Its next reply. :class:`RuntimeError`: it failed, ended, or said nothing for
        ``timeout_s`` (default 120 s)."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await stdout.readline()
        except TimeoutError:
            raise RuntimeError(f"{self.name}: no reply within {timeout_s:g} s") from None
        if not line:
            raise RuntimeError(f"{self.name}: the process has ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name}:\n{reply['error']}")
        return reply

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        await self.tell(do, **arguments)
        return await self.hear()

    async def end(self) -> None:
        """Close its standard input and wait for its end, or kill it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def rank(
    module: str, name: str, python: str = sys.executable, within: Sequence[str] = (), **environment: str
) -> AsyncIterator[Rank]:
    """A process with the commands of ``bench.MODULE``; it ends with the block, killed
    if that failed.

    :param python: the interpreter, which may be that of another virtual environment
        (:mod:`bench.peers`).
    :param within: the words before it, of a command that starts it elsewhere.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = await asyncio.create_subprocess_exec(
        *(*within, python, "-m", "bench.rank", module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        limit=REPLY_NBYTES,
    )
    found = Rank(name, process)
    try:
        yield found
    except BaseException:
        found.kill()
        raise
    finally:
        await asyncio.shield(found.end())


@asynccontextmanager
async def together(
    module: str, names: Sequence[str], python: str = sys.executable, **environment: str
) -> AsyncIterator[list[Rank]]:
    """Several such processes, started at once; they end at once, too."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(rank(module, name, python, **environment)) for name in names]
        try:
            yield found
        except BaseException:
            for one in found:
                one.kill()
            raise
        await asyncio.gather(*(one.end() for one in found))


async def until(condition: Callable[[], object], changed: asyncio.Event, what: str, timeout_s: float = 60.0) -> None:
    """Wait until ``condition`` is true; ``changed`` is set by whoever may have made it
    so."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                changed.clear()
                await changed.wait()
    except TimeoutError:
        raise RuntimeError(f"not within {timeout_s:g} s: {what}") from None


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """The same items, beginning with number ``by``: who comes first changes with every
    repetition."""
    by %= len(items)
    return [*items[by:], *items[:by]]


class Spread:
    """Samples in seconds and what is said of them."""

    def __init__(self, samples: Sequence[float]) -> None:
        self.samples = list(samples)
        self.median = statistics.median(samples)

    def cells(self, *references: Spread | None) -> list[str]:
        """Median, range, and the median as a multiple of each reference."""
        times = [in_words(self.median), f"{in_words(min(self.samples))} - {in_words(max(self.samples))}"]
        return [*times, *("" if other is None else f"{self.median / other.median:.2f}" for other in references)]

    def report(self) -> dict[str, Any]:
        return {
            "median_s": self.median,
            "min_s": min(self.samples),
            "max_s": max(self.samples),
            "samples_s": self.samples,
        }


@dataclass(frozen=True)
class Bar:
    """Something that is promised, the figure found, and whether that keeps the
    promise."""

    text: str
    figure: float
    kept: bool

    def line(self) -> str:
        return f"{'yes' if self.kept else 'NO':<4}{self.text}: {self.figure:.2f}"


def run_bench(main: Coroutine[Any, Any, None]) -> None:
    """Run it to its end; SIGTERM ends it as Ctrl-C does, with all its processes."""

    async def ended_by_signals() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main

    try:
        asyncio.run(ended_by_signals())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


@contextmanager
def scratch(parent: str | None = None) -> Iterator[str]:
    """A folder that ends with the block; those of programs that were killed are removed
    first.

    :param parent: default: that for temporary files.
    """
    prefix = "bench-"
    for stale in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*-*"):
        owner = stale.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            shutil.rmtree(stale)
    made = tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True)
    with made as folder:  # somebody who is being killed may still write there: the next program removes it
        yield folder


def available_nbytes(path: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be had without swapping."""
    line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def in_words(value: float) -> str:
    """Seconds as text."""
    return f"{value * 1e3:.{1 if abs(value) < 0.1 else 0}f} ms" if abs(value) < 1.0 else f"{value:.2f} s"


def machine() -> dict[str, Any]:
    """Where this runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": int(memory.split()[1]) * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def threads_for(processes: int) -> int:
    """Threads of each of so many processes that share the cores: more of them would
    only wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


async def busy_ratio(seconds: float = 1.0) -> float:
    """The part of all cores' time that others use, measured while this program does
    nothing for ``seconds``."""
    before = _cpu_times()
    await asyncio.sleep(seconds)
    spent = [after - earlier for after, earlier in zip(_cpu_times(), before, strict=True)]
    total = sum(spent)
    return 1.0 - (spent[3] + spent[4]) / total if total else 0.0


def _cpu_times() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str] | None], note: str = "") -> None:
    """Print a table; None draws a line between two rows."""
    table = Table(title=title, title_justify="left", caption=note or None, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def write(name: str, result: dict[str, Any]) -> Path:
    """Save as ``bench-results/NAME.json``."""
    path = ROOT / "bench-results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path.write_text(json.dumps({"bench": name, "finished": finished, **result}, indent=1) + "\n")
    Console().print(f"written to {path.relative_to(ROOT)}")
    return path

"""What does the page of a run cost, and how fast is it there?

    python bench/bench_page.py [--quick] [--replicas N] [--rate N] [--seconds N]

A run of 200 replicas of which 10 events a second are told is served through the real
server, routes and hub by a process of its own, and looked at with a headless Chromium
(``make test-browser`` installs it). Its status is made of the events, so the cost of
asking a fleet for its state is not in it: ``bench_supervisor.py`` has that
(``/status``).

The processor time is that of the kernel's accounts: of the serving process with nobody
looking, then with one page open, and of all processes of Chromium beside it. Memory is
what the page's heap has after a collection, and the resident set of the serving
process, after each tenth of the time; the first tenth fills what is kept. The first
view is opened anew some times, each in a tab of its own without a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.processes import children_of
from bench.support import END_TIMEOUT_S, Bar, machine, run_bench, scratch, show, write
from replicas.core.base.effects import ReplicaLoaded, SyncEnded
from replicas.core.lives.lifecycle import ReplicaEvent, Transition
from replicas.messages.identity import Member
from replicas.status import SyncRecord
from replicas.telemetry.events import RunStarted
from tests.support.browser import Chromium, Tab, find_chromium
from tests.support.browser.shown import ShownRun, served

VIEW_LIMIT_S = 1.0
VIEW_LIMIT = 120.0
"""kB of the first view, with all files."""
SERVER_LIMIT = 0.05
BROWSER_LIMIT = 0.20
GROWTH_LIMIT = 1.3
VIEWS, TENTHS, LOOKS = 5, 10, 3
_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = "document.querySelectorAll('rect.state').length > 10 && performance.now()"


def _moved(group: str, index: int, event: ReplicaEvent, before: Any, after: Any) -> Transition:
    return Transition(group=group, replica=index, generation=1, event=event, before=before, after=after, reason="")


def _commit(run: ShownRun, version: int) -> None:
    phases = {"pack": 0.2, "transfer": 0.9, "verify": 0.1}
    pulled = {Member("rollout", index, 0, "").name: {"trainer/0/0": 1 << 30} for index in range(0, 64, 8)}
    record = SyncRecord(
        version=version,
        outcome="committed",
        seconds=1.2,
        nbytes=1 << 30,
        phases=phases,
        pulled=pulled,
        publisher="trainer/0",
    )
    run.tell(SyncEnded("policy", record))


async def serve(replicas: int, rate: float, folder: Path) -> None:
    """The run, for the process of its own: it prints its address, and ends with its
    standard input."""
    run, dice = ShownRun(events=folder / "events.jsonl"), random.Random(1)
    run.tell(RunStarted(run="bench", pid=1, version="0"))
    for group, count in (("trainer", 1), ("rollout", replicas)):
        for index in range(count):
            run.tell(_moved(group, index, ReplicaEvent.START, "pending", "starting"))
            run.tell(_moved(group, index, ReplicaEvent.READY, "starting", "ready"))
    for version in range(1, 13):
        _commit(run, version)
        for index in range(replicas):
            run.tell(ReplicaLoaded("policy", "rollout", index, version, 0.2))

    async def tells() -> None:
        version, number = 12, 0
        while True:
            await asyncio.sleep(1 / rate)
            number += 1
            if number % 40 == 0:
                version += 1
                _commit(run, version)
            else:
                run.tell(ReplicaLoaded("policy", "rollout", dice.randrange(replicas), version, 0.2))

    async with served(run) as url:
        print(url, flush=True)
        telling = asyncio.create_task(tells())
        await asyncio.to_thread(sys.stdin.read)
        telling.cancel()


def cpu_s(pid: int) -> float:
    """Processor time of a process and all below it, as far as they live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(map(cpu_s, children_of(pid)))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _heap(tab: Tab) -> int:
    """The least of several looks: during a drawing the one before is still there."""
    found = []
    for _ in range(LOOKS):
        await tab.call("HeapProfiler.collectGarbage")
        found.append(int((await tab.call("Runtime.getHeapUsage"))["usedSize"]))
        await asyncio.sleep(0.5)
    return min(found)


async def _view(browser: Chromium, url: str) -> tuple[float, int]:
    tab = await browser.tab(1360, 1000)
    await tab.call("Network.setCacheDisabled", cacheDisabled=True)
    await tab.open(url)
    shown_ms = await tab.until(_SHOWN)
    nbytes = tab.nbytes
    await tab.close()
    return shown_ms / 1000, nbytes


async def _share(pids: list[int], seconds: float) -> list[float]:
    before, began = [cpu_s(pid) for pid in pids], time.monotonic()
    await asyncio.sleep(seconds)
    lasted = time.monotonic() - began
    return [(cpu_s(pid) - was) / lasted for pid, was in zip(pids, before, strict=True)]


async def measure(url: str, pid: int, seconds: float) -> dict[str, Any]:
    (alone,) = await _share([pid], min(seconds, 20.0))
    async with Chromium.start() as browser:
        views = [await _view(browser, url) for _ in range(VIEWS)]
        tab = await browser.tab(1360, 1000)
        await tab.open(url)
        await tab.until(_SHOWN)
        await asyncio.sleep(3)
        heaps, resident, shares = [await _heap(tab)], [_resident(pid)], []
        for _ in range(TENTHS):
            shares.append(await _share([pid, browser.pid], seconds / TENTHS))
            heaps.append(await _heap(tab))
            resident.append(_resident(pid))
        server, chromium = (fmean(each) for each in zip(*shares, strict=True))
        if tab.errors:
            raise RuntimeError(f"the page complains: {tab.errors}")
    return {
        "view_s": [shown_s for shown_s, _ in views],
        "view_nbytes": max(nbytes for _, nbytes in views),
        "nobody": alone,
        "server": server,
        "browser": chromium,
        "heap_nbytes": heaps,
        "resident_nbytes": resident,
        "seconds": seconds,
    }


async def main(options: argparse.Namespace) -> None:
    command = [
        sys.executable,
        str(Path(__file__)),
        "--serve",
        "--replicas",
        str(options.replicas),
        "--rate",
        str(options.rate),
    ]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=path)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        async with asyncio.timeout(120):
            url = (await server.stdout.readline()).decode().strip()
        found = await measure(url, server.pid, options.seconds)
    finally:
        server.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await server.wait()
        except TimeoutError:
            server.kill()
            await server.wait()
    _tell(found, options)


def _tell(found: dict[str, Any], options: argparse.Namespace) -> None:
    growth = max(kept[-1] / kept[1] for kept in (found["heap_nbytes"], found["resident_nbytes"]))
    view_s, view_kb, costs = median(found["view_s"]), found["view_nbytes"] / 1000, found["server"] - found["nobody"]
    bars = [
        Bar("seconds until the first view is there", view_s, view_s <= VIEW_LIMIT_S),
        Bar("kB of the first view", view_kb, view_kb <= VIEW_LIMIT),
        Bar("of a core of the supervisor for a viewer", costs, costs <= SERVER_LIMIT),
        Bar("of a core in the browser", found["browser"], found["browser"] <= BROWSER_LIMIT),
        Bar("times as much memory at the end", growth, growth <= GROWTH_LIMIT),
    ]
    rows = [
        [name, *(f"{found[kept][at] / 1e6:.1f}" for at in (0, 1, -1))]
        for name, kept in (("page's heap, MB", "heap_nbytes"), ("serving process, MB", "resident_nbytes"))
    ]
    rows.append(["its share of a core: nobody, one viewer", f"{found['nobody']:.3f}", "", f"{found['server']:.3f}"])
    title = f"{options.replicas} replicas, {options.rate:g} events/s, {found['seconds']:g} s"
    show(title, ("", "at first", "after a tenth", "at last"), rows, "\n".join(bar.line() for bar in bars))
    kept = [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    write("page", {"machine": machine(), "replicas": options.replicas, "rate": options.rate, **found, "bars": kept})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the page of a run costs.")
    parser.add_argument("--quick", action="store_true", help="half a minute in place of ten")
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0, help="events a second")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.seconds = given.seconds or (30.0 if given.quick else 600.0)
    if given.serve:
        with scratch() as folder:
            asyncio.run(serve(given.replicas, given.rate, Path(folder)))
    elif find_chromium() is None:
        print("left out: no Chromium is installed (Debian: apt-get install chromium)")
    else:
        run_bench(main(given))

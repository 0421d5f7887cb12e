"""What does a fault cost those that are left?

    python bench/bench_faults.py [--quick] [--repetitions N] [--only PART ...]

Four parts, each described in its own file: faults in the middle of a publish
(``publish``, ``bench/faults_sync.py``), kill -9 of a peer during all-reduces
(``peers``, ``bench/faults_peers.py``), groups formed again (``groups``,
``bench/faults_groups.py``), and the trainer while a latecomer is caught up (``stall``,
``bench/faults_stall.py``). Each line says which bar it has to keep, and whether its
median does.

torchft takes part in ``peers`` where it is installed: ``pip install torchft``, also in
an environment of its own that sees this one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from rich.console import Console

from bench import faults_groups, faults_peers, faults_stall, faults_sync
from bench.shapes import FULL, SMALL, nbytes_of
from bench.support import Spread, busy_ratio, in_words, machine, show, write

PARTS = ("publish", "peers", "groups", "stall")
COLUMNS = ("", "", "median", "range", "beyond", "bar", "kept")
REBUILD_LIMIT_S = 0.1
REBUILD_LIMIT_MEMBERS = 4
REPLACE_LIMIT_S = 0.15
PEER_NAMES = {
    "library": "replicas",
    "ProcessGroupBabyGloo": "torchft, subprocess",
    "ProcessGroupGloo": "torchft, in the rank",
    "restart": "all started anew",
}


class Lines:
    """A table and the rows of the JSON, line by line."""

    def __init__(self) -> None:
        self.table: list[list[str] | None] = []
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        of: str,
        what: str,
        samples: Sequence[float],
        *,
        bar: str = "",
        kept: bool | None = None,
        beyond_s: float | None = None,
    ) -> None:
        """``kept``: whether the bar is; None where there is none. ``beyond_s``: what
        the bar looks at, if not the median."""
        spread = Spread(samples)
        verdict = "" if kept is None else "yes" if kept else "NO"
        beyond = "" if beyond_s is None else in_words(beyond_s)
        self.table.append([of, what, *spread.cells(), beyond, bar, verdict])
        row = {"of": of, "what": what, **spread.report(), "beyond_s": beyond_s, "bar": bar, "kept": kept}
        self.rows.append(row)

    def line(self) -> None:
        self.table.append(None)

    def show(self, title: str, note: str = "") -> dict[str, Any]:
        """Print the table, without the columns in which there is nothing; what is to be
        written of it."""
        lines = [line for line in self.table if line is not None]
        used = [number for number in range(len(COLUMNS)) if number < 2 or any(line[number] for line in lines)]
        table = [None if line is None else [line[number] for number in used] for line in self.table]
        show(title, [COLUMNS[number] for number in used], table, note)
        return {"rows": self.rows, "note": note}


def told(sample: object) -> None:
    """Show that the run goes on."""
    print(sample, file=sys.stderr, flush=True)


# ------------------------------------------------------------ publish


async def publish(quick: bool, repetitions: int) -> dict[str, Any]:
    lines = Lines()
    found: dict[str, list[faults_sync.Sample]] = {}
    for small in (True,) if quick else (False, True):
        nbytes = nbytes_of(SMALL if small else FULL)
        for way in faults_sync.WAYS:
            of = f"{nbytes / 1e6:.0f} MB, {way}"
            found[of] = await faults_sync.measure(way, nbytes, small, repetitions, told)
            _publish_lines(lines, of, found[of])
            lines.line()
    note = (
        f"Counted from the fault until all that are left have committed; lease {faults_sync.LEASE_S:g} s, deadline "
        f"{faults_sync.DEADLINE_S:g} s.\nBeyond: less the bare time of sending all bytes to those that are left."
    )
    failed = sum(len(sample.failures) for samples in found.values() for sample in samples)
    if failed:
        note += f"\n{failed} publish(es) failed and were made again; the time is that of the one that was committed."
    result = lines.show(f"A fault in the middle of a publish to {faults_sync.TARGETS} targets", note)
    return result | {"samples": {of: msgspec.to_builtins(samples) for of, samples in found.items()}}


def _publish_lines(lines: Lines, of: str, samples: list[faults_sync.Sample]) -> None:
    bare: dict[bool, Spread] = {}
    seen = {sample.fault for sample in samples}
    lines.add(of, "no fault: to commit", [sample.undisturbed_s for sample in samples])
    for of_rank, count in ((True, faults_sync.TARGETS - 1), (False, faults_sync.TARGETS)):
        names = {fault.name for fault in faults_sync.FAULTS if fault.of_rank == of_rank} & seen
        if names:
            bare[of_rank] = Spread([sample.bare_s for sample in samples if sample.fault in names])
            lines.add(of, f"bare bytes to {count}", bare[of_rank].samples)
    for fault in (fault for fault in faults_sync.FAULTS if fault.name in seen):
        mine = [sample for sample in samples if sample.fault == fault.name]
        times = Spread([sample.committed_s for sample in mine])
        beyond_s = times.median - bare[fault.of_rank].median if fault.beyond else None
        kept = (times.median if beyond_s is None else beyond_s) < fault.limit_s
        kept = kept and not any(sample.failures for sample in mine)
        lines.add(of, fault.name, times.samples, bar=f"< {fault.limit_s:g} s", kept=kept, beyond_s=beyond_s)


# ------------------------------------------------------------ peers


async def peers(quick: bool, repetitions: int) -> dict[str, Any]:
    lines = Lines()
    samples = await faults_peers.measure(repetitions, told)
    recovered = {
        name: Spread([sample.recovered_s for sample in samples if sample.contender == name])
        for name in faults_peers.contenders()
    }
    torchft = recovered.get("ProcessGroupBabyGloo")
    for name, spread in recovered.items():
        mine = [sample for sample in samples if sample.contender == name]
        barred = name == "library" and torchft is not None
        kept = spread.median < torchft.median if barred and torchft is not None else None
        lines.add(PEER_NAMES[name], "an all-reduce", [sample.operation_s for sample in mine])
        if failed := [sample.failed_s for sample in mine if sample.failed_s is not None]:
            lines.add(PEER_NAMES[name], "kill -9 to failure", failed)
        bar = "< torchft" if barred else ""
        lines.add(PEER_NAMES[name], "kill -9 to next good", spread.samples, bar=bar, kept=kept)
        lines.line()
    title = f"Kill -9 of one of {faults_peers.PEERS} peers during all-reduces of {faults_peers.NBYTES >> 20} MiB"
    result = lines.show(title, f"torchft {_torchft()}")
    return result | {"samples": msgspec.to_builtins(samples)}


def _torchft() -> str:
    try:
        found = version("torchft")
    except PackageNotFoundError:
        return "is not installed and was left out: pip install torchft"
    return f"{found} was told at once who is left; its own quorum and heartbeats would come on top."


# ------------------------------------------------------------ groups


async def groups(quick: bool, repetitions: int) -> dict[str, Any]:
    lines = Lines()
    samples = await faults_groups.measure(repetitions, told)
    for size in faults_groups.SIZES:
        mine = [sample for sample in samples if sample.members == size]
        of = f"{size} members"
        lines.add(of, "a barrier", [sample.barrier_s for sample in mine])
        rebuilt = Spread([sample.rebuilt_s for sample in mine])
        barred = size <= REBUILD_LIMIT_MEMBERS
        bar, kept = (_below(rebuilt, REBUILD_LIMIT_S)) if barred else ("", None)
        lines.add(of, "the first one of an epoch", rebuilt.samples, bar=bar, kept=kept)
        replaced = Spread([sample.replaced_s for sample in mine])
        bar, kept = _below(replaced, REPLACE_LIMIT_S)
        lines.add(of, "kill -9 of a sidecar to the next", replaced.samples, bar=bar, kept=kept)
        lines.line()
    result = lines.show("A group formed again: barriers of peers")
    return result | {"samples": msgspec.to_builtins(samples)}


def _below(spread: Spread, limit_s: float) -> tuple[str, bool]:
    return f"< {in_words(limit_s)}", spread.median < limit_s


# ------------------------------------------------------------ stall


async def stall(quick: bool, repetitions: int) -> dict[str, Any]:
    lines = Lines()
    nbytes = nbytes_of(SMALL if quick else FULL)
    samples = await faults_stall.measure(nbytes, quick, repetitions, told)
    kinds: dict[str, tuple[str, Callable[[faults_stall.StallSample], float]]] = {
        "step_s": ("a training step", lambda sample: sample.step_s),
        "worst_s": ("its longest step", lambda sample: sample.worst_s),
        "held_s": ("publish returns", lambda sample: sample.held_s),
        "committed_s": ("publish commits", lambda sample: sample.committed_s),
    }
    for key, (what, value) in kinds.items():
        found = {name: Spread([value(s) for s in samples if s.setting == name]) for name in faults_stall.SETTINGS}
        for name, spread in found.items():
            barred = name == "catch-up" and key in ("step_s", "held_s")
            kept = spread.median <= max(*found["alone"].samples, found["other work"].median) if barred else None
            lines.add(name, what, spread.samples, bar="<= other work" if barred else "", kept=kept)
        lines.line()
    lasted = Spread([sample.lasted_s for sample in samples if sample.setting == "catch-up"])
    note = (
        f"Catching up took {in_words(lasted.median)} from join to readable; 'other work': Gloo between two other "
        "processes.\nThe bar: no more than 'alone' ever takes, or than that other work costs."
    )
    result = lines.show(f"The trainer while a latecomer is caught up: {nbytes / 1e6:.0f} MB", note)
    return result | {"samples": msgspec.to_builtins(samples)}


# ------------------------------------------------------------ all


async def run(parts: Sequence[str], quick: bool, repetitions: int) -> None:
    measures: dict[str, Callable[[bool, int], Awaitable[dict[str, Any]]]] = {
        "publish": publish,
        "peers": peers,
        "groups": groups,
        "stall": stall,
    }
    busy, load = await busy_ratio(), os.getloadavg()
    result: dict[str, Any] = {}
    for part in parts:
        result[part] = await measures[part](quick, repetitions)
    facts = {"busy_before": busy, "load": load, "quick": quick, "repetitions": repetitions}
    Console().print(f"Others used {busy:.0%} of the cores before.")
    write("bench_faults", {"machine": machine(), **facts, **result})


def main() -> None:
    parser = argparse.ArgumentParser(description="What a fault costs those that are left.")
    parser.add_argument("--quick", action="store_true", help="the small set of tensors only, 2 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 5")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all parts")
    options = parser.parse_args()
    asyncio.run(run(options.only, options.quick, options.repetitions or (2 if options.quick else 5)))


if __name__ == "__main__":
    main()

"""The table, the bars and the JSON of ``bench_sync.py``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bench.support import Bar, Spread, in_words, show

__all__ = ["BESIDE_RAY", "Results", "bars", "report", "rows"]

Results = dict[int, dict[str, dict[str, list[float]]]]
"""Seconds by number of targets, contender, and what was reached."""

LIMIT = "limit"
READ = "replicas, read"
LOAD = "replicas, load"
GLOO = "Gloo, flat"
RAY = "Ray, put and get"
BESIDE_RAY = "Gloo, flat, with Ray up"
REACHED = ("copied", "held", "readable", "loaded")


def rows(results: Results) -> list[dict[str, Any]]:
    """One for each number of targets, contender and what was reached.

    ``gloo_ratio``: how many times as fast as Gloo's flat broadcast; ``limit_ratio``:
    how much of the limit's speed.
    """
    found: list[dict[str, Any]] = []
    for targets, contenders in results.items():
        for name, reached in contenders.items():
            gloo = contenders.get(BESIDE_RAY if name in (RAY, BESIDE_RAY) else GLOO, {})
            for what in REACHED:
                if what not in reached:
                    continue
                row = {"targets": targets, "contender": name, "reached": what, **Spread(reached[what]).report()}
                if what in gloo:
                    row["gloo_ratio"] = statistics.median(gloo[what]) / row["median_s"]
                if what == "loaded" and LIMIT in contenders:
                    row["limit_ratio"] = statistics.median(contenders[LIMIT]["loaded"]) / row["median_s"]
                found.append(row)
    return found


def bars(results: Results) -> list[Bar]:
    """What is promised, and whether it is kept."""

    def median(targets: int, name: str, reached: str) -> float:
        return statistics.median(results[targets][name][reached])

    most, least = max(results), min(results)
    readable = median(most, GLOO, "readable") / median(most, READ, "readable")
    limit = median(most, LIMIT, "loaded") / median(most, LOAD, "loaded")
    loaded = median(most, GLOO, "loaded") / median(most, LOAD, "loaded")
    one = median(least, GLOO, "loaded") / median(least, LOAD, "loaded")
    return [
        Bar(f"readable at {most} targets, at least 4 times as fast as Gloo's flat broadcast", readable, readable >= 4),
        Bar(f"loaded at {most} targets, at least 0.8 of the limit's speed", limit, limit >= 0.8),
        Bar(f"loaded at {most} targets, at least 2 times as fast as Gloo's flat broadcast", loaded, loaded >= 2),
        Bar(f"loaded at {least} target, not slower than Gloo's flat broadcast", one, one >= 1),
    ]


def report(
    results: Results,
    facts: Mapping[str, Any],
    cold: Mapping[str, float],
    phases: list[dict[str, float]],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Print it; returns it for the JSON."""
    lines = rows(results)
    kept = bars(results)
    medians = {phase: statistics.median(one[phase] for one in phases if phase in one) for phase in phases[-1]}
    notes = [
        "x Gloo: times as fast as Gloo's flat broadcast (Ray: as that beside it). of limit: part of the limit's speed.",
        "After each round the bytes of source and targets were compared by their digests.",
        f"Each process has {facts['threads']} thread(s). The first publish of all held the trainer "
        f"{in_words(cold['held'])} and was loaded after {in_words(cold['loaded'])}.",
        "Phases of a publish: " + ", ".join(f"{phase} {in_words(seconds)}" for phase, seconds in medians.items()) + ".",
        *(f"Left out: {name} ({why})." for name, why in missing.items()),
        "Bars:",
        *(bar.line() for bar in kept),
    ]
    title = f"Weight sync on one host: {facts['tensors']} tensors, {facts['nbytes'] / 1e6:.0f} MB bf16"
    columns = ["to", "who", "readable", "range", "x Gloo", "loaded", "range", "x Gloo", "of limit"]
    show(title, columns, _table(lines), "\n".join(notes))
    return {
        **facts,
        "digest_checked": True,
        "rows": lines,
        "bars": [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept],
        "cold_s": cold,
        "phases_s": medians,
        "left_out": missing,
    }


def _table(lines: list[dict[str, Any]]) -> list[list[str] | None]:
    table: list[list[str] | None] = []
    by_who: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_who.setdefault((line["targets"], line["contender"]), {})[line["reached"]] = line
    before = 0
    for (targets, name), reached in by_who.items():
        if before and targets != before:
            table.append(None)
        before = targets
        if "copied" in reached:
            copied = reached["copied"]
            table.append([str(targets), f"{name}: copy in", "", "", "", *_cells(copied, with_ratio=False), "", ""])
        loaded = reached.get("loaded")
        readable = _cells(reached["readable"]) if "readable" in reached else ["", "", ""]
        ratio = f"{loaded['limit_ratio']:.2f}" if loaded and "limit_ratio" in loaded else ""
        table.append([str(targets), name, *readable, *(_cells(loaded) if loaded else ["", "", ""]), ratio])
    return table


def _cells(line: dict[str, Any], with_ratio: bool = True) -> list[str]:
    times = [in_words(line["median_s"]), f"{in_words(line['min_s'])} - {in_words(line['max_s'])}"]
    return [*times, f"{line['gloo_ratio']:.2f}" if "gloo_ratio" in line else ""] if with_ratio else times

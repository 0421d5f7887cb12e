"""The tables, the bars and the ratios of ``bench_gpu.py``."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from bench.support import Bar, Spread, in_words, show

__all__ = ["LIMIT_OF", "bars", "report", "rows", "step_rows"]

LIMIT_OF = {"device": {"publish": "card", "load": "card"}, "host": {"publish": "to host", "load": "to card"}}
"""What a copy into a slot, and out of it, is compared with, by staging."""
LARGE = "few"
ENOUGH = 0.8
STALL = 0.05
MIB = 1 << 20
LABELS = {
    "card": "copy on the card, one piece",
    "tensors": "copy on the card, tensor by tensor",
    "to host": "card to pinned memory, one piece",
    "to card": "pinned memory to card, one piece",
    "publish": "publish: the stream is held",
    "returned": "publish: the call",
    "committed": "publish: until the commit",
    "load": "load_into, on the card",
    "arrived": "publish to loaded by the target",
    "hand over": "slot of another process (IPC), one piece",
}
HOW = {True: "copies on its stream", False: "copies beside it (hold=False)"}
Result = Mapping[str, Any]


def rows(result: Result) -> list[dict[str, Any]]:
    """One for each figure. ``limit_ratio``: how much of the limit's speed, where there
    is one."""
    nbytes = result["nbytes"]
    limits = {name: Spread(seconds) for name, seconds in result["limits"].items()}
    found = [_row("", name, spread, nbytes) for name, spread in limits.items()]
    given = result["hand over"]
    found.append(
        _row("", "hand over", Spread(given["seconds"]), given["nbytes"], limit=Spread(given["card"]), limit_of="card")
    )
    for staging, of in LIMIT_OF.items():
        rounds = result["staging"][staging]["rounds"]
        for name, key in (
            ("publish", "held"),
            ("returned",) * 2,
            ("committed",) * 2,
            ("load", "load_s"),
            ("arrived",) * 2,
        ):
            limit = limits[of[name]] if name in of else None
            spread = Spread([one[key] for one in rounds])
            found.append(_row(staging, name, spread, nbytes, limit=limit, limit_of=of.get(name, "")))
    return found


def _row(
    staging: str, what: str, spread: Spread, nbytes: int, *, limit: Spread | None = None, limit_of: str = ""
) -> dict[str, Any]:
    ratio = None if limit is None else limit.median / spread.median if spread.median > 0 else 0.0
    speed = nbytes / spread.median / 1e9 if spread.median > 0 else 0.0
    return {"staging": staging, "what": what, **spread.report(), "gb_s": speed, "limit_ratio": ratio, "limit": limit_of}


def step_rows(result: Result) -> list[dict[str, Any]]:
    """``part``: what all steps lost, as a part of the time from the call of publish to
    its commit."""
    found: list[dict[str, Any]] = []
    for staging in LIMIT_OF:
        for case, samples in result["staging"][staging]["steps"].items():
            scene, _, hold = case.partition(" ")
            parts = [one["lost"] / one["committed"] for one in samples]
            found.append(
                {
                    "staging": staging,
                    "scene": scene,
                    "hold": hold == "True",
                    "lost_s": median(one["lost"] for one in samples),
                    "committed_s": median(one["committed"] for one in samples),
                    "step_s": median(one["step"] for one in samples),
                    "parts": parts,
                    "part": median(parts),
                }
            )
    return found


def bars(name: str, found: list[dict[str, Any]], steps: list[dict[str, Any]]) -> list[Bar]:
    """What is promised, and whether it is kept: speeds for large tensors, steps for
    all."""
    promised = {("", "hand over"), *((staging, what) for staging, of in LIMIT_OF.items() for what in of)}
    kept: list[Bar] = []
    for row in found if name == LARGE else ():
        if (row["staging"], row["what"]) in promised:
            where = f"staging {row['staging']}: " if row["staging"] else ""
            text = f"{where}{LABELS[row['what']]}, at least {ENOUGH} of the speed of a {LABELS[row['limit']]}"
            kept.append(Bar(text, row["limit_ratio"], row["limit_ratio"] >= ENOUGH))
    for row in steps:
        if not row["hold"] and row["scene"] == "alone":
            text = f"staging {row['staging']}, hold=False: a training loop loses less than {STALL} of the publish time"
            kept.append(Bar(text, row["part"], row["part"] < STALL))
    return kept


def report(name: str, result: dict[str, Any]) -> None:
    """Print it, and add the rows and bars to ``result``."""
    found, steps = rows(result), step_rows(result)
    kept = bars(name, found, steps)
    result["rows"], result["step_rows"] = found, steps
    result["bars"] = [{"bar": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept]
    card = result["card"]
    title = f"{card['name']}: {result['tensors']} tensors, {result['nbytes'] / 1e6:.0f} MB bf16"
    table: list[list[str] | None] = []
    for row in found:
        if table and table[-1] is not None and table[-1][0] != row["staging"]:
            table.append(None)
        ratio = "" if row["limit_ratio"] is None else f"{row['limit_ratio']:.2f}"
        cells = Spread(row["samples_s"]).cells()
        table.append([row["staging"], LABELS[row["what"]], *cells, f"{row['gb_s']:.1f} GB/s", ratio])
    show(title, ["staging", "", "median", "range", "speed", "of limit"], table)
    table = [
        [
            row["staging"],
            HOW[row["hold"]],
            "none" if row["scene"] == "alone" else "one",
            in_words(row["step_s"]),
            in_words(row["committed_s"]),
            in_words(row["lost_s"]),
            f"{row['part'] * 100:.1f} %",
        ]
        for row in steps
    ]
    columns = [
        "staging",
        "a training loop with",
        "targets on the GPU",
        "a step",
        "publish to commit",
        "all steps lost",
        "of that",
    ]
    show("Training steps meanwhile", columns, table)
    table = [_memory_row(staging, result) for staging in LIMIT_OF]
    columns = ["staging", "of trainer and target", "slots", "x weights", "on the card", "x weights", "first publish"]
    show("Memory beside the weights", columns, table, "\n".join(bar.line() for bar in kept))


def _memory_row(staging: str, result: Result) -> list[str]:
    taken, nbytes = result["staging"][staging], result["nbytes"]
    cells = (taken["slots_nbytes"], taken["gpu_nbytes"])
    ratios = [cell for value in cells for cell in (f"{value / MIB:.0f} MiB", f"{value / nbytes:.2f}")]
    return [staging, "both", *ratios, in_words(taken["cold_s"])]

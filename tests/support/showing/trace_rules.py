"""The rules of Chrome's Trace Event Format, as far as Perfetto needs them kept."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}
_NAMES = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def check_trace(path: Path) -> list[dict[str, Any]]:
    """Read a file of trace events and assert that it keeps the rules; its events."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = whole["traceEvents"]
    for one in events:
        assert _NEEDED[one["ph"]] <= one.keys(), one
        assert all(isinstance(one[key], int) and 0 <= one[key] < 2**53 for key in ("pid", "tid")), one
        if one["ph"] != "M":
            assert type(one["ts"]) is int, one
            assert 0 <= one["ts"] < 2**53, one
        else:
            assert _NAMES[one["name"]] in one["args"], one
        if one["ph"] == "i":
            assert one["s"] in ("g", "p", "t"), one
    _check_threads(events)
    _check_arrows(events)
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    used = {(one["pid"], one["tid"]) for one in events if one["ph"] != "M"}
    assert used <= named
    assert {pid for pid, _ in used} <= {one["pid"] for one in events if one["name"] == "process_name"}
    return events


def _check_threads(events: list[dict[str, Any]]) -> None:
    """Slices of a thread nest: one that begins in another one ends in it."""
    threads = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            assert type(one["dur"]) is int, one
            assert one["dur"] >= 0, one
            threads[one["pid"], one["tid"]].append((one["ts"], -one["dur"], one["name"]))
    for slices in threads.values():
        open_until: list[int] = []
        for start, minus, name in sorted(slices):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            end = start - minus
            assert not open_until or end <= open_until[-1], f"{name} begins in a slice and ends after it"
            open_until.append(end)


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """An arrow has two ends, the first no later, each on a slice."""
    ends: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for one in events:
        if one["ph"] in "sf":
            assert one["ph"] not in ends[one["id"]], f"arrow {one['id']} has an end twice"
            ends[one["id"]][one["ph"]] = one
    slices = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            slices[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for arrow, pair in ends.items():
        assert set(pair) == {"s", "f"}, f"arrow {arrow} has one end"
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for one in pair.values():
            thread = slices[one["pid"], one["tid"]]
            assert any(start <= one["ts"] <= end for start, end in thread), f"arrow {arrow} is on no slice"

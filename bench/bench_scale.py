"""What does a channel with a thousand members cost its coordinator?

    python bench/bench_scale.py [--quick] [--repetitions N]

A real coordinator in a process of its own, and 10, 100, 1,000 simulated members in
another one (``scale_members.py``): real sessions and messages, no torch and no bytes.
Measured at each size: joins; an epoch (a member joins, or leaves, until the last one
knows); a commit (``PublishBegin`` until the last member has ``Commit``, with eight
members on each host, who answer at once) and until all have loaded it; the
coordinator's CPU time for that, and when nothing happens but heartbeats; its memory.
Everything shares the machine's cores with the members, whose part is not small: times
are upper bounds.

Then the model of ``scale_model.py``: what it predicts for the largest size from the one
before, against what was measured there, and a sync to 1,000 replicas on 125 hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from bench.scale_model import PER_HOST, Rates, leaders_of, messages_of, messages_to_commit, model
from bench.support import Bar, Rank, Spread, busy_ratio, in_words, machine, rank, run_bench, show, write
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import apply_block, encode_block

SIZES = (10, 100, 1000)
QUICK_SIZES = (10, 100)
IDLE_S = 12.0
QUICK_IDLE_S = 3.0
CALM_S = 0.5
EPOCH_LIMIT_S = 0.5
COMMIT_LIMIT_S = 0.5
IDLE_LIMIT_RATIO = 0.1
LINKS = {"100 Mb/s": 12.5e6, "10 GbE": 1.25e9, "100 GbE": 12.5e9, "400 Gb/s": 50e9}
WEIGHTS = {"269 MB": 269_030_016, "16 GB": 16_000_000_000}
STEP_S = 3e-4
"""Assumed: what passing on one piece costs a leader beside its bytes (two threads wake
up, one message of the link)."""
TRIP_S = {"100 Mb/s": 0.05}
"""Assumed: the round trip of a link; of the others 0.1 ms."""
CHANGED = 0.0035
"""Elements that change from one version to the next, where deltas are pulled."""
COPIED_NBYTES = 1 << 26
MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it
Found = dict[str, Any]


async def measure(sizes: Sequence[int], repetitions: int, idle_s: float) -> list[Found]:
    """One coordinator and one crowd of members, which grows."""
    found = []
    async with rank("scale_coordinator", "coordinator") as coordinator, rank("scale_members", "members") as members:
        started = await coordinator.ask("start")
        await members.ask("start", endpoint=started["endpoint"], token=started["token"])
        empty = await coordinator.ask("usage")
        for size in sizes:
            found.append(await _measure_size(coordinator, members, size, repetitions, idle_s, empty["rss_nbytes"]))
        await members.ask("close")
    return found


async def _measure_size(
    coordinator: Rank, members: Rank, size: int, repetitions: int, idle_s: float, empty_nbytes: int
) -> Found:
    before = await coordinator.ask("usage")
    grown = await members.ask("grow", size=size)
    after = await coordinator.ask("usage")
    found: Found = {
        "targets": size,
        "leaders": leaders_of(size),
        "joins_per_s": grown["joined"] / grown["joins_s"],
        "join_cpu_s": (after["cpu_s"] - before["cpu_s"]) / grown["joined"],
        "joins_settled_s": grown["all_s"],
    }
    epochs: dict[str, list[float]] = {"join": [], "leave": []}
    for _ in range(repetitions):
        for what in ("leave", "join"):
            await asyncio.sleep(CALM_S)
            epochs[what].append((await members.ask(what))["seconds"])
    syncs = [await _publish(coordinator, members) for _ in range(repetitions + 1)]
    await asyncio.sleep(CALM_S)
    idle = [await coordinator.ask("usage")]
    await asyncio.sleep(idle_s)
    idle.append(await coordinator.ask("usage"))
    warm = syncs[1:]  # the first one carries the manifest
    return found | {
        "epoch_join": Spread(epochs["join"]).report(),
        "epoch_leave": Spread(epochs["leave"]).report(),
        "commit": Spread([one["commit_s"] for one in warm]).report(),
        "loaded": Spread([one["loaded_s"] for one in warm]).report(),
        "sync_cpu": Spread([one["cpu_s"] for one in warm]).report(),
        "first_commit_s": syncs[0]["commit_s"],
        "messages": warm[-1]["messages"],
        "said": warm[-1]["said"],
        "heard": warm[-1]["heard"],
        "idle_ratio": (idle[1]["stat_cpu_s"] - idle[0]["stat_cpu_s"]) / (idle[1]["at"] - idle[0]["at"]),
        "rss_nbytes": idle[1]["rss_nbytes"],
        "session_nbytes": (idle[1]["rss_nbytes"] - empty_nbytes) / (size + 1),
    }


async def _publish(coordinator: Rank, members: Rank) -> Found:
    await asyncio.sleep(CALM_S)
    before = await coordinator.ask("usage")
    sync = await members.ask("publish")
    after = await coordinator.ask("usage")
    asked = {"WatchLoaded", "WatchEnd", "Released"}  # the bench's own question, and memory of earlier versions
    counts = [count for part in ("said", "heard") for name, count in sync[part].items() if name not in asked]
    return {**sync, "cpu_s": after["cpu_s"] - before["cpu_s"], "messages": sum(counts)}


# ------------------------------------------------------------ the model


def copy_rates() -> tuple[float, float]:
    """Bytes per second of a copy in warm memory, and of making mapped memory
    readable."""
    source, target = bytearray(COPIED_NBYTES), bytearray(COPIED_NBYTES)
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, COPIED_NBYTES)
        with mmap.mmap(fd, COPIED_NBYTES) as writer:
            writer[:] = bytes(source)
        copies, maps = [], []
        for _ in range(5):
            began = time.perf_counter()
            target[:] = source
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            with mmap.mmap(fd, COPIED_NBYTES, prot=mmap.PROT_READ) as reader:
                reader.madvise(MADV_POPULATE_READ)
                maps.append(time.perf_counter() - began)
    finally:
        os.close(fd)
    return COPIED_NBYTES / Spread(copies).median, COPIED_NBYTES / Spread(maps).median


def delta_rates() -> tuple[float, float, float]:
    """Bytes of an image per second of a core of which deltas are made, and
    applied; their share."""
    random = np.random.default_rng(1)
    normal = random.standard_normal(BLOCK_NBYTES // 2, np.float32) * np.float32(0.02)
    base = (normal.view(np.uint32) >> 16).astype(np.uint16)
    new, out = base.copy(), np.empty_like(base)
    where = np.flatnonzero(random.random(len(base), np.float32) < CHANGED)
    new[where] += random.choice(np.array([1, 0xFFFF], np.uint16), len(where))
    made, applied, delta = [], [], b""
    for _ in range(5):
        began = time.process_time()
        delta = encode_block(base.view(np.uint8).data, new.view(np.uint8).data)
        made.append(time.process_time() - began)
        began = time.process_time()
        apply_block(base.view(np.uint8).data, delta, out.view(np.uint8).data)
        xxhash.xxh3_128_digest(out.data)
        applied.append(time.process_time() - began)
    return BLOCK_NBYTES / Spread(made).median, BLOCK_NBYTES / Spread(applied).median, len(delta) / BLOCK_NBYTES


def checked(found: Sequence[Found]) -> list[Found]:
    """For each size but the first: what the model says from the size before, and what
    it was."""
    rows: list[Found] = []
    for known, actual in itertools.pairwise(found):
        of, leaders = actual["targets"], actual["leaders"]
        cpu_ms = 1e3 * known["sync_cpu"]["median_s"] / messages_of(known["targets"], known["leaders"])
        time_ms = 1e3 * known["commit"]["median_s"] / messages_to_commit(known["targets"], known["leaders"])
        for what, predicted, measured in (
            ("messages of a sync", messages_of(of, leaders), actual["messages"]),
            ("CPU of a sync, ms", cpu_ms * messages_of(of, leaders), 1e3 * actual["sync_cpu"]["median_s"]),
            ("time to the commit, ms", time_ms * messages_to_commit(of, leaders), 1e3 * actual["commit"]["median_s"]),
        ):
            rows.append({"of": of, "what": what, "predicted": predicted, "measured": measured})
    return rows


def thousand(largest: Found) -> list[Found]:
    """A sync to 1,000 replicas on 125 hosts, by the figures of the largest size."""
    memory, mapping = copy_rates()
    encode, apply, delta = delta_rates()
    ways = {"lane": None, "pull": 1.0, f"pull, {CHANGED:.2%}": delta}
    message_s = largest["commit"]["median_s"] / messages_to_commit(largest["targets"], largest["leaders"])
    rows = []
    for weights, nbytes in WEIGHTS.items():
        for name, link in LINKS.items():
            rates = Rates(message_s, memory, mapping, link, STEP_S, encode, apply, TRIP_S.get(name, 1e-4))
            for way, share in ways.items():
                sync = model(nbytes, 1000, rates, share=share)
                rows.append(
                    {
                        "weights": weights,
                        "link": name,
                        "way": way,
                        "pack_s": sync.pack_s,
                        "coordinator_s": sync.coordinator_s,
                        "chain_s": sync.chain_s,
                        "link_alone_s": nbytes * (share or 1.0) / link,
                        "map_s": sync.map_s,
                        "total_s": sync.total_s,
                    }
                )
    return rows


# ------------------------------------------------------------ what is said


def bars(found: Sequence[Found]) -> list[Bar]:
    """Of the largest size."""
    last = found[-1]
    epoch = max(last["epoch_join"]["median_s"], last["epoch_leave"]["median_s"])
    commit, idle = last["commit"]["median_s"], last["idle_ratio"]
    size = f"{last['targets']:,} members"
    return [
        Bar(f"an epoch to {size}, s (limit {EPOCH_LIMIT_S})", epoch, epoch < EPOCH_LIMIT_S),
        Bar(f"a commit to {size}, s (limit {COMMIT_LIMIT_S})", commit, commit < COMMIT_LIMIT_S),
        Bar(f"idle cost of {size}, part of a core (limit {IDLE_LIMIT_RATIO})", idle, idle < IDLE_LIMIT_RATIO),
    ]


def report(found: Sequence[Found], predictions: Sequence[Found], syncs: Sequence[Found], kept: Sequence[Bar]) -> None:
    """The tables."""
    rows: list[list[str]] = []
    for one in found:
        times = [
            in_words(one[key]["median_s"]) for key in ("epoch_leave", "epoch_join", "commit", "loaded", "sync_cpu")
        ]
        memory = f"{one['session_nbytes'] / 1024:.0f} KiB"
        rows.append([f"{one['targets']:,}", f"{one['joins_per_s']:.0f}", *times, f"{one['idle_ratio']:.1%}", memory])
    heads = (
        "members",
        "joins/s",
        "epoch: leave",
        "join",
        "commit",
        "loaded by all",
        "CPU of a sync",
        "idle",
        "a session",
    )
    show("A coordinator and its members (medians)", heads, rows, "\n".join(bar.line() for bar in kept))
    growth: list[list[str]] = []
    for before, after in itertools.pairwise(found):
        for what, key in (("time to the commit", "commit"), ("CPU of a sync", "sync_cpu"), ("an epoch", "epoch_leave")):
            ratio = after[key]["median_s"] / before[key]["median_s"]
            growth.append([f"{before['targets']:,} to {after['targets']:,}", what, f"{ratio:.1f}"])
    show("Growth (members grow by 10)", ("members", "", "times"), growth)
    table: list[list[str]] = []
    for row in predictions:
        predicted, measured = row["predicted"], row["measured"]
        table.append(
            [f"{row['of']:,}", row["what"], f"{predicted:,.0f}", f"{measured:,.0f}", f"{measured / predicted:.2f}"]
        )
    show("The model, from the size before", ("members", "", "predicted", "measured", "ratio"), table)
    keys = ("pack_s", "coordinator_s", "chain_s", "link_alone_s", "map_s", "total_s")
    shown = [[row["weights"], row["link"], row["way"], *(in_words(row[key]) for key in keys)] for row in syncs]
    assumed = f"assumed: the link, and {in_words(STEP_S)} for each piece that is passed on; all else was measured here"
    parts = ("weights", "link", "way", "pack", "coordinator", "chain of 125", "(link alone)", "map", "total")
    show(f"A sync to 1,000 replicas, {PER_HOST} on each of 125 hosts", parts, shown, assumed)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 and 100 members only, less often")
    parser.add_argument("--repetitions", type=int, help="of each epoch and each commit (default 7; quick: 3)")
    options = parser.parse_args()
    sizes, idle_s = (QUICK_SIZES, QUICK_IDLE_S) if options.quick else (SIZES, IDLE_S)
    repetitions = options.repetitions or (3 if options.quick else 7)
    busy = await busy_ratio()
    found = await measure(sizes, repetitions, idle_s)
    predictions, syncs, kept = checked(found), thousand(found[-1]), bars(found)
    report(found, predictions, syncs, kept)
    write(
        "bench_scale",
        {
            "machine": machine(),
            "busy_before": busy,
            "repetitions": repetitions,
            "idle_s": idle_s,
            "sizes": found,
            "model": {"checked": predictions, "step_s": STEP_S, "thousand": syncs},
            "bars": [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in kept],
        },
    )


if __name__ == "__main__":
    run_bench(main())

"""How many bytes does an archive take, and how many does a reader read?

    python bench/bench_archive.py [--quick] [--versions N]
    .venv-engines/bin/python -m bench.bench_archive --trained [--versions N]
        [--model FOLDER]

269 MB of bfloat16 as 20 versions, each archived to a folder and read by a follower;
then by a reader that has nothing. In each step a random 1 % of the elements goes to the
next value above or below; with ``--trained`` AdamW at 5e-6 makes the steps, from the
checkpoint on (``delta_trained.py``). All bytes are shares of one whole. Requests are
those that S3 would get: all objects are sent and read in one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import replicas
from bench.shapes import FULL, SMALL, nbytes_of
from bench.support import Bar, machine, show, write
from replicas.archive import ArchiveKey, Version, Writer
from replicas.archive.keys import make_pem
from replicas.archive.store import Store
from replicas.core.base.manifest import Manifest, TensorSpec

VERSIONS, QUICK = 20, 6
RATE = 5e-6
STORED, FOLLOWED, JOINED, REQUESTS = 0.08, 0.006, 1.05, 3.0
Bytes = npt.NDArray[np.uint8]


def random_steps(nbytes: int) -> Iterator[Bytes]:
    """1 % of the elements, anywhere, by one step of their type."""
    random = np.random.default_rng(1)
    normal = random.standard_normal(nbytes // 2, np.float32) * np.float32(0.02)
    words = (normal.view(np.uint32) >> 16).astype(np.uint16)
    while True:
        yield words.copy().view(np.uint8)
        where = np.flatnonzero(random.random(len(words), np.float32) < 0.01)
        words.view(np.int16)[where] += random.choice(np.array([-1, 1], np.int16), len(where))


def trained_steps(folder: Path) -> Iterator[Bytes]:
    import torch

    from bench.delta_trained import THREADS, batches, bytes_of, loaded, step

    torch.set_num_threads(THREADS)
    model, source = loaded(folder), batches(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    while True:
        yield bytes_of(model)
        step(model, optimizer, next(source))


class Counted:
    """Counts the requests and bytes of all stores."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        read, put = Store.read, Store.put

        def reads(store: Store, name: str, *given: Any, **more: Any) -> Any:
            found = read(store, name, *given, **more)
            self.requests["read"] += 1
            self.nbytes["read"] += len(found[0]) or (given[1] if len(given) > 1 else 0)
            return found

        def puts(store: Store, name: str, data: Any, *given: Any, **more: Any) -> Any:
            self.requests["put"] += 1
            self.nbytes["put"] += memoryview(data).nbytes
            return put(store, name, data, *given, **more)

        Store.read, Store.put = reads, puts  # type: ignore[method-assign,assignment]  # counted

    def take(self, kind: str) -> tuple[int, int]:
        """Requests and bytes since the last call."""
        return self.requests.pop(kind, 0), self.nbytes.pop(kind, 0)


def measure(steps: Iterator[Bytes], versions: int, folder: str) -> tuple[list[dict[str, float]], float]:
    """A row for each version, and what a new reader reads in the end."""
    counted, key, url, rows = Counted(), ArchiveKey(make_pem()), f"file://{folder}", list[dict[str, float]]()
    writer = Writer(url, "policy", run="bench", key=key)
    follower = replicas.follow(url, "policy", key=key.public, timeout=60)
    counted.take("read")
    for number, data in zip(range(1, versions + 1), steps, strict=False):
        manifest = Manifest((TensorSpec("w", "bfloat16", (len(data) // 2,)),))
        image = np.concatenate([np.frombuffer(manifest.header, np.uint8), data])
        began = time.perf_counter()
        writer.write(Version(number, image.data, manifest))
        wrote = time.perf_counter()
        with next(follower) as update:
            assert update.version == number
        row = {"write_s": wrote - began, "read_s": time.perf_counter() - wrote}
        for kind in ("put", "read"):
            row[f"{kind}_requests"], nbytes = counted.take(kind)
            row[f"{kind}_share"] = nbytes / len(data)
        rows.append(row)
    with next(replicas.follow(url, "policy", key=key.public, timeout=60)) as update:
        assert update.version == versions
    return rows, counted.take("read")[1] / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="What an archive takes.")
    parser.add_argument("--quick", action="store_true", help=f"a ninth of the bytes, {QUICK} versions")
    parser.add_argument("--versions", type=int, default=None, help=f"default {VERSIONS}")
    parser.add_argument("--trained", action="store_true", help="steps of a model that is being trained, instead")
    parser.add_argument("--model", default=".venv-engines/model", help="trained: its folder (default: %(default)s)")
    options = parser.parse_args()
    count = options.versions or (QUICK if options.quick else VERSIONS)
    if options.trained and not Path(options.model, "config.json").is_file():
        print(f"left out: --trained needs a model, and {options.model} has none; name one by --model")
        return
    nbytes = nbytes_of(SMALL if options.quick else FULL)
    steps = trained_steps(Path(options.model)) if options.trained else random_steps(nbytes)
    with tempfile.TemporaryDirectory() as folder:
        rows, joined = measure(steps, count, folder)
    table: list[list[str] | None] = []
    for number, row in enumerate(rows, 1):
        shares, times = ([f"{row[f'{kind}_share']:.3%}" for kind in ("put", "read")], (row["write_s"], row["read_s"]))
        table.append([str(number), *shares, *(f"{one:.2f} s" for one in times)])
    show(f"An archive of {count} versions, of a whole", ["version", "stored", "read", "write", "read"], table)
    later = rows[1:]
    stored = sum(row["put_share"] for row in rows) / count
    followed = sum(row["read_share"] for row in later) / len(later)
    requests = max(sum(row[f"{kind}_requests"] for row in rows) / count for kind in ("put", "read"))
    bars = [
        Bar("requests of a version, at most", requests, requests <= REQUESTS),
        Bar("bytes that a new reader reads in the end, in wholes", joined, joined <= JOINED or not options.trained),
    ]
    if options.trained and count >= VERSIONS:  # of which it is promised
        bars += [
            Bar("bytes stored, of as many wholes", stored, stored <= STORED),
            Bar("bytes of a step for a follower, in % of a whole", 100 * followed, followed <= FOLLOWED),
        ]
    else:
        print(f"stored: {stored:.4f} of {count} wholes; a step for a follower: {followed:.3%} of a whole")
    for bar in bars:
        print(bar.line())
    kept = [{"text": bar.text, "figure": bar.figure, "kept": bar.kept} for bar in bars]
    write("bench_archive", {"machine": machine(), "quick": options.quick, "rows": rows, "joined": joined, "bars": kept})


if __name__ == "__main__":
    main()

"""What does a delta of a version cost, and how small is it?

    python bench/bench_delta.py [--quick] [--repetitions N]

269 MB of bfloat16 from a normal distribution, of which a random 0.35, 1 and 3 % go to
the next value above or below. One thread, block by block, all in memory that was
touched before. "entropy": of the places and the values, as if each element changed by
itself; no encoding of such changes is smaller. "copy" is that into a slot; "compare"
finds the lines that differ, for changes by tensor. Applied "elsewhere" includes the
copy of the base. The figures are those of one host: what it takes to be sent is for
bench_hosts.py to say.

``--trained``: of a model that is being trained, instead (``delta_trained.py``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bench.shapes import FULL, ITEM_NBYTES, SMALL, nbytes_of
from bench.support import Bar, Spread, machine, rotated, show, write
from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.delta import apply_block, encode_block
from replicas.memory.lines import LINE_NBYTES, Bytes, Lines
from replicas.weights.copies import streaming

RATIOS = {0.0035: 0.0029, 0.01: 0.0070, 0.03: 0.0172}
"""Which part of the elements changes, and the share of the bytes that is promised."""
TOLERANCE = 1.1
REPETITIONS, QUICK = 11, 3
STEP_NBYTES = 8 << 20


def memory(nbytes: int) -> Bytes:
    found = np.zeros(nbytes + LINE_NBYTES, np.uint8)
    start = -found.ctypes.data % LINE_NBYTES
    return found[start : start + nbytes]


class Scene:
    """A base, a version that differs from it, and what is made of them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._blocks = [slice(start, start + BLOCK_NBYTES) for start in range(0, nbytes, BLOCK_NBYTES)]
        self._random = np.random.default_rng(1)
        self.base, self.source, self.slot, self.out = (memory(nbytes) for _ in range(4))
        normal = self._random.standard_normal(nbytes // ITEM_NBYTES, np.float32) * np.float32(0.02)
        self.base.view(np.uint16)[:] = normal.view(np.uint32) >> 16
        self.deltas: list[bytes] = []
        self.entropy = 0.0

    def change(self, ratio: float) -> None:
        self.source[:] = self.base
        count = self.nbytes // ITEM_NBYTES
        where = np.flatnonzero(self._random.random(count, np.float32) < ratio)
        self.source.view(np.int16)[where] += self._random.choice(np.array([-1, 1], np.int16), len(where))
        xors = self.source.view(np.uint16)[where] ^ self.base.view(np.uint16)[where]
        _, counts = np.unique(xors, return_counts=True)
        bits = count * _entropy(np.array([ratio, 1 - ratio])) + len(where) * _entropy(counts / counts.sum())
        self.entropy = bits / 8 / self.nbytes
        self.out[:] = self.base

    def copy(self) -> None:
        for start in range(0, self.nbytes, STEP_NBYTES):
            to = np.array([self.slot.ctypes.data + start], np.uintp)
            source = np.array([self.source.ctypes.data + start], np.uintp)
            size = np.array([min(STEP_NBYTES, self.nbytes - start)], np.uintp)
            streaming.copy_runs(lambda: True, to, source, size, past_caches=True)

    def compare(self) -> None:
        Lines(self.slot, self.base).compare(0, self.nbytes)

    def encode(self) -> None:
        self.deltas = [encode_block(self.base[one].data, self.slot[one].data) for one in self._blocks]

    def apply_elsewhere(self) -> None:
        for one, delta in zip(self._blocks, self.deltas, strict=True):
            apply_block(self.base[one].data, delta, self.out[one].data)

    def apply_in_place(self) -> None:
        """The other way, too: what is applied twice leaves what was there."""
        for one, delta in zip(self._blocks, self.deltas, strict=True):
            apply_block(self.out[one].data, delta, self.out[one].data)

    def digest(self) -> None:
        for one in self._blocks:
            xxhash.xxh3_128_digest(self.out[one].data)

    def check(self) -> None:
        self.apply_elsewhere()
        assert np.array_equal(self.out, self.source)


def _entropy(parts: npt.NDArray[np.float64]) -> float:
    return -float((parts * np.log2(parts)).sum())


def measure(scene: Scene, repetitions: int) -> dict[str, Spread]:
    """CPU seconds of each step; they take turns."""
    scene.copy()
    scene.encode()
    scene.check()
    steps: dict[str, Callable[[], None]] = {
        "copy": scene.copy,
        "compare": scene.compare,
        "encode": scene.encode,
        "apply elsewhere": scene.apply_elsewhere,
        "apply in place": scene.apply_in_place,
        "digest": scene.digest,
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(repetitions):
        for name in rotated(list(steps), repetition):
            began = time.process_time()
            steps[name]()
            samples[name].append(time.process_time() - began)
    return {name: Spread(taken) for name, taken in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a delta of a version costs.")
    parser.add_argument("--quick", action="store_true", help=f"a ninth of the bytes, {QUICK} repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help=f"default {REPETITIONS}")
    parser.add_argument("--trained", action="store_true", help="deltas of a model that is being trained, instead")
    parser.add_argument("--steps", type=int, default=None, help="trained: how many")
    parser.add_argument("--model", default=".venv-engines/model", help="trained: its folder (default: %(default)s)")
    options = parser.parse_args()
    if options.trained:
        from bench.delta_trained import run_trained

        run_trained(options)
        return
    scene = Scene(nbytes_of(SMALL if options.quick else FULL))
    table: list[list[str] | None] = []
    rows: list[dict[str, Any]] = []
    bars: list[Bar] = []
    for ratio, promised in RATIOS.items():
        scene.change(ratio)
        found = measure(scene, options.repetitions or (QUICK if options.quick else REPETITIONS))
        share = sum(map(len, scene.deltas)) / scene.nbytes
        bars.append(Bar(f"bytes of a delta at {ratio:.2%}, in % of all", 100 * share, share <= TOLERANCE * promised))
        for number, (name, spread) in enumerate(found.items()):
            first = [f"{ratio:.2%}", f"{share:.3%}", f"{scene.entropy:.3%}"] if not number else ["", "", ""]
            table.append([*first, name, *spread.cells(found["copy"])])
            rows.append({"changed": ratio, "share": share, "entropy": scene.entropy, "what": name, **spread.report()})
        table.append(None)
    columns = ["changed", "delta", "entropy", "step", "CPU", "range", "x copy"]
    show(f"Deltas of {scene.nbytes / 1e6:.0f} MB of bfloat16, on one thread", columns, table)
    for bar in bars:
        print(bar.line())
    kept = [{"text": bar.text, "kept": bar.kept} for bar in bars]
    write("bench_delta", {"machine": machine(), "quick": options.quick, "rows": rows, "bars": kept})


if __name__ == "__main__":
    main()

"""Would huge pages make versions faster?

    python bench/bench_pages.py [--quick] [--repetitions N]

A slot is a memfd. MADV_COLLAPSE (Linux 6.1) turns its small pages into huge ones (2
MiB) without an administrator, also where the kernel's setting for shared memory is
"never", if the mapping begins at a multiple of 2 MiB. Two slots of 256 MiB, one of each
kind, take turns: the copy of a publish into it, its digest, the copy of a load out of
it, a pull into it from a socket, and a rank's new mapping of it, made present at once
as ours are. Beside them: what a collapse takes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from bench.support import Bar, Spread, busy_ratio, machine, rotated, run_bench, show, write

NBYTES = 256 << 20
HUGE_NBYTES = 2 << 20
MADV_POPULATE_READ, MADV_COLLAPSE = 22, 25
PROT, SHARED, FIXED, RESERVED = 3, 0x01, 0x10, 0x22
GAIN = 0.95
"""A way pays if it takes at most so much of the time."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _advise(address: int, advice: int) -> float:
    """Seconds that the advice took for the whole slot."""
    began = time.perf_counter()
    if _libc.madvise(address, NBYTES, advice):
        error = ctypes.get_errno()
        raise SystemExit(f"madvise({advice}) is refused here: {os.strerror(error)}; it takes Linux 6.1")
    return time.perf_counter() - began


class Slot:
    """Shared memory, all of it written once.

    :ivar collapse_s: what the huge pages took.
    """

    def __init__(self, *, huge: bool) -> None:
        self.fd = os.memfd_create("bench-pages")
        os.ftruncate(self.fd, NBYTES)
        self.address = self.map()
        self.view = (ctypes.c_uint8 * NBYTES).from_address(self.address)
        self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        self.tensor.zero_()
        self.collapse_s = _advise(self.address, MADV_COLLAPSE) if huge else 0.0

    def map(self) -> int:
        """The address of one more mapping, at a multiple of a huge page."""
        reserved = _libc.mmap(None, NBYTES + HUGE_NBYTES, 0, RESERVED, -1, 0)
        address = -(-reserved // HUGE_NBYTES) * HUGE_NBYTES
        return int(_libc.mmap(address, NBYTES, PROT, SHARED | FIXED, self.fd, 0))

    def pull(self, source: memoryview) -> None:
        here, there = socket.socketpair()
        with here, there:
            sender = threading.Thread(target=there.sendall, args=(source,))
            sender.start()
            view, got = memoryview(self.view).cast("B"), 0
            while got < NBYTES:
                got += here.recv_into(view[got:])
            sender.join()

    def map_again(self) -> None:
        address = self.map()
        _advise(address, MADV_POPULATE_READ)
        _libc.munmap(address, NBYTES)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


async def run(options: argparse.Namespace) -> None:
    repetitions = options.repetitions or (3 if options.quick else 9)
    busy = await busy_ratio()
    source = torch.randint(0, 255, (NBYTES,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    given = source.numpy().data.cast("B")
    slots = {"small": Slot(huge=False), "huge": Slot(huge=True)}
    ways: dict[str, Callable[[Slot], object]] = {
        "copy in": lambda slot: slot.tensor.copy_(source),
        "digest": lambda slot: xxhash.xxh3_128_digest(slot.view),
        "copy out": lambda slot: target.copy_(slot.tensor),
        "pull": lambda slot: slot.pull(given),
        "new mapping": Slot.map_again,
    }
    found: dict[str, dict[str, list[float]]] = {way: {kind: [] for kind in slots} for way in ways}
    for number in range(repetitions + 1):
        for way, do in ways.items():
            for kind in rotated([*slots], number):
                found[way][kind].append(_timed(lambda do=do, kind=kind: do(slots[kind])))  # type: ignore[misc]
    rows, bars = list[list[str]](), list[Bar]()
    for way, kinds in found.items():
        small, huge = (Spread(kinds[kind][1:]) for kind in ("small", "huge"))
        rows.append([way, *small.cells(), *huge.cells(small)])
        ratio = statistics.median(kinds["huge"][1:]) / statistics.median(kinds["small"][1:])
        bars.append(Bar(f"{way}: huge pages take at most {GAIN:g} of the time", ratio, ratio <= GAIN))
    collapse_s = slots["huge"].collapse_s
    rows.append(["the collapse", "", "", *Spread([collapse_s]).cells(), ""])
    lines = "\n".join(bar.line() for bar in bars)
    show("256 MiB in small and huge pages", ["", "small", "range", "huge", "range", "of small"], rows, lines)
    result: dict[str, Any] = {"machine": machine(), "busy_before": busy, "samples": found, "collapse_s": collapse_s}
    write("bench_pages", result)


def main() -> None:
    parser = argparse.ArgumentParser(description="Slots in small and huge pages.")
    parser.add_argument("--quick", action="store_true", help="3 repetitions")
    parser.add_argument("--repetitions", type=int, default=None, help="default 9")
    run_bench(run(parser.parse_args()))


if __name__ == "__main__":
    main()

"""The parts of the benchmarks that others rely on: the set of tensors, the figures made of samples, and what hits when."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import anyio
import pytest

from bench.bench_faults import Lines
from bench.processes import Progress, children_of, held, send
from bench.shapes import FULL, SMALL, nbytes_of, shapes
from bench.support import Spread, machine, rotated, threads_for


def test_the_set_of_tensors_is_the_real_models() -> None:
    full = list(shapes(FULL))
    assert len(full) == len({name for name, _ in full}) == 272
    assert full[0] == ("model.embed_tokens.weight", (49152, 576))
    assert full[-1] == ("model.norm.weight", (576,))
    assert nbytes_of(FULL) == 269_030_016
    assert [name for name, _ in shapes(SMALL)] == [name for name, _ in full]
    assert nbytes_of(SMALL) == pytest.approx(nbytes_of(FULL) / 9, rel=0.01)


def test_figures_of_samples() -> None:
    spread = Spread([0.3, 0.1, 0.0205])
    assert spread.report() == {"median_s": 0.1, "min_s": 0.0205, "max_s": 0.3, "samples_s": [0.3, 0.1, 0.0205]}
    assert spread.cells(Spread([0.05]), None) == ["100 ms", "20.5 ms - 300 ms", "2.00", ""]
    assert Spread([1.5]).cells() == ["1.50 s", "1.50 s - 1.50 s"]


def test_everyone_comes_first_in_turn() -> None:
    assert [rotated("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert all(facts[key] for key in ("cpu", "memory_nbytes", "kernel", "python", "torch"))
    assert threads_for(1) == facts["cores"]
    assert threads_for(10_000) == 1


def test_a_line_says_whether_its_bar_is_kept() -> None:
    lines = Lines()
    lines.add("2 members", "a barrier", [0.002])
    lines.add("2 members", "the next", [0.3, 0.5, 0.4], bar="< 100 ms", kept=False)
    lines.line()
    lines.add("30 MB", "kill -9", [0.5], bar="< 1 s", kept=True, beyond_s=0.25)
    assert lines.table == [
        ["2 members", "a barrier", "2.0 ms", "2.0 ms - 2.0 ms", "", "", ""],
        ["2 members", "the next", "400 ms", "300 ms - 500 ms", "", "< 100 ms", "NO"],
        None,
        ["30 MB", "kill -9", "500 ms", "500 ms - 500 ms", "250 ms", "< 1 s", "yes"],
    ]
    assert [row["kept"] for row in lines.rows] == [None, False, True]


@pytest.mark.anyio
async def test_a_hit_comes_when_so_many_bytes_have_been_written() -> None:
    code = "import os\nos.read(0, 1)\nfor _ in range(100): os.write(1, bytes(100))\nos.read(0, 1)"
    command = (sys.executable, "-c", code)
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.pid in children_of(os.getpid())
    with anyio.fail_after(20), held([process.pid]) as pidfds:
        progress = Progress(lambda: [process.pid])
        began = time.monotonic()
        process.stdin.write(b"x")
        hit = await progress.reaches(5000, lambda: send(pidfds, signal.SIGKILL))
        assert began < hit.at < time.monotonic()
        assert 5000 <= hit.nbytes <= 10_000
        assert await process.wait() == -signal.SIGKILL
        send(pidfds, signal.SIGKILL)  # nobody is there any more, and that is no error


@pytest.mark.anyio
async def test_a_hit_that_never_comes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="only 0 of 1 bytes"):
        await Progress(list).reaches(1, time.monotonic, timeout_s=0.0)

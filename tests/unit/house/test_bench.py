"""The parts of the benchmarks that others rely on: the set of tensors, the figures made
of samples, and what hits when."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from bench import bench_hold, gpu_report, sync_report
from bench.bench_faults import Lines
from bench.hold_scene import within
from bench.peers import FOLDER, python_with
from bench.processes import Progress, children_of, held, send
from bench.shapes import FULL, SETS, SMALL, moe, nbytes_of, nbytes_of_set, shapes
from bench.support import Bar, Spread, available_nbytes, machine, rotated, threads_for
from tests.gpu import prepare


def test_the_set_of_tensors_is_the_real_models() -> None:
    full = list(shapes(FULL))
    assert len(full) == len({name for name, _ in full}) == 272
    assert full[0] == ("model.embed_tokens.weight", (49152, 576))
    assert full[-1] == ("model.norm.weight", (576,))
    assert nbytes_of(FULL) == 269_030_016
    assert [name for name, _ in shapes(SMALL)] == [name for name, _ in full]
    assert nbytes_of(SMALL) == pytest.approx(nbytes_of(FULL) / 9, rel=0.01)


def test_the_other_sets() -> None:
    assert nbytes_of_set("smollm2") == nbytes_of(FULL)
    assert nbytes_of_set("few") == 1 << 30
    assert nbytes_of_set("many") == 100_000 * 256
    real = dict(moe(1))
    assert len(real) == 18_867
    assert sum(map(math.prod, real.values())) == pytest.approx(30.5e9, rel=0.01)
    for make in SETS.values():
        names = [name for name, _ in make()]
        assert len(names) == len(set(names))
    assert sum(1 for _ in SETS["many"]()) == 100_000


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


def test_memory_that_is_left(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    5 kB\n")
    assert available_nbytes(tmp_path / "meminfo") == 5 * 1024
    assert available_nbytes() > 0


def test_the_interpreter_of_a_peer(tmp_path: Path) -> None:
    assert python_with("msgspec", tmp_path) == sys.executable
    assert python_with("no_such_package", tmp_path) is None
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    (packages / "no_such_package").mkdir(parents=True)
    assert python_with("no_such_package", tmp_path) == str(tmp_path / "bin" / "python")


def test_peers_agree_with_the_project_about_what_both_need() -> None:
    def pins(path: Path) -> dict[str, str]:
        lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
        return dict(line.split("==") for line in lines if line)

    peers, project = pins(FOLDER / "peers.txt"), pins(FOLDER.parent / "constraints.txt")
    assert {"ray", "torchft", "safetensors"} <= set(peers)
    assert {name: project[name] for name in peers if name in project} == {
        name: pin for name, pin in peers.items() if name in project
    }


def sync_results() -> sync_report.Results:
    def of(readable: float, loaded: float) -> dict[str, list[float]]:
        return {"readable": [readable] * 3, "loaded": [loaded] * 3}

    return {
        targets: {
            "limit": {"copied": [0.05], "loaded": [0.1]},
            "replicas, read": {"held": [0.06], "readable": [0.05]},
            "replicas, load": {"held": [0.06], "loaded": [0.1]},
            "Gloo, flat": of(gloo, gloo),
            "Ray, put and get": of(0.1, 0.2),
            "Gloo, flat, with Ray up": of(0.4, 0.4),
        }
        for targets, gloo in ((1, 0.08), (3, 0.25))
    }


def test_ratios_of_a_sync() -> None:
    rows = {(row["targets"], row["contender"], row["reached"]): row for row in sync_report.rows(sync_results())}
    assert rows[3, "replicas, read", "readable"]["gloo_ratio"] == pytest.approx(5)
    assert rows[3, "replicas, load", "loaded"]["gloo_ratio"] == pytest.approx(2.5)
    assert rows[3, "replicas, load", "loaded"]["limit_ratio"] == pytest.approx(1)
    assert rows[3, "Ray, put and get", "loaded"]["gloo_ratio"] == pytest.approx(2)  # to the broadcast beside it
    assert "gloo_ratio" not in rows[3, "limit", "copied"]
    assert "limit_ratio" not in rows[3, "replicas, read", "readable"]


def test_bars_of_a_sync() -> None:
    bars = sync_report.bars(sync_results())
    assert [bar.figure for bar in bars] == pytest.approx([5, 1, 2.5, 0.8])
    assert [bar.kept for bar in bars] == [True, True, True, False]
    assert Bar("as fast as light", 0.5, False).line() == "NO  as fast as light: 0.50"


def test_bars_of_a_publish() -> None:
    samples = {"memcpy": [0.1], "loop": [0.2], "foreach": [0.15], "publish": [0.12]}
    rows = bench_hold.held_rows(3, samples, tensors=100)
    assert [row["copy_ratio"] for row in rows] == pytest.approx([1, 2, 1.5, 1.2])
    assert rows[-1]["each_s"] == pytest.approx(0.0012)
    (large,) = bench_hold.bars("few", rows)
    (small,) = bench_hold.bars("many", rows)
    assert [large.figure, small.figure] == pytest.approx([1.2, 0.6])
    assert large.kept
    assert small.kept


def test_steps_within_a_time() -> None:
    stamps = [0.0, 1.0, 3.0, 6.0, 7.0]
    assert within(stamps, 1.5, 4.0) == pytest.approx(2.5)
    assert within(stamps, 6.0, 6.0) == pytest.approx(1.0)  # nothing: the next step
    rows = bench_hold.step_rows(1, {"alone": [2.0], "commit": [3.0]}, {"alone": [9.0], "commit": [4.0]})
    assert [(row["what"], row["alone_ratio"], row["lasted_s"]) for row in rows] == [("alone", 1, 9), ("commit", 1.5, 4)]


def gpu_result() -> dict[str, Any]:
    def staging(held: float) -> dict[str, Any]:
        one = {"held": held, "returned": held, "committed": 4 * held, "load_s": 0.02, "arrived": 5 * held}
        held_up = [{"lost": held, "committed": 4 * held, "step": 0.01}]
        steps = {"alone True": held_up, "alone False": [{"lost": 0.004, "committed": 0.1, "step": 0.01}]}
        return {"rounds": [one] * 3, "steps": steps | {"target False": held_up}}

    limits = {"card": [0.01], "tensors": [0.02], "to host": [0.04], "to card": [0.03]}
    given = {"seconds": [0.02], "card": [0.01], "nbytes": 10**8}
    return {
        "nbytes": 10**9,
        "limits": limits,
        "hand over": given,
        "staging": {"device": staging(0.0124), "host": staging(0.08)},
    }


def test_ratios_of_the_gpu() -> None:
    rows = {(row["staging"], row["what"]): row for row in gpu_report.rows(gpu_result())}
    assert rows["", "hand over"]["limit_ratio"] == pytest.approx(0.5)
    assert rows["", "hand over"]["gb_s"] == pytest.approx(5)
    assert rows["device", "publish"]["limit_ratio"] == pytest.approx(0.8, rel=0.01)
    assert rows["host", "publish"]["limit_ratio"] == pytest.approx(0.5)
    assert rows["host", "load"]["limit_ratio"] == pytest.approx(1.5)
    assert rows["host", "committed"]["limit_ratio"] is None
    steps = gpu_report.step_rows(gpu_result())
    assert [(row["scene"], row["hold"]) for row in steps[:3]] == [("alone", True), ("alone", False), ("target", False)]
    assert [row["part"] for row in steps] == pytest.approx([0.25, 0.04, 0.25] * 2)


def test_bars_of_the_gpu() -> None:
    rows, steps = gpu_report.rows(gpu_result()), gpu_report.step_rows(gpu_result())
    bars = gpu_report.bars("few", rows, steps)
    assert [bar.figure for bar in bars] == pytest.approx([0.5, 0.806, 0.5, 0.5, 1.5, 0.04, 0.04], rel=0.01)
    assert [bar.kept for bar in bars] == [False, True, False, False, True, True, True]
    assert len(gpu_report.bars("smollm2", rows, steps)) == 2


def test_wheels_for_a_gpu_machine_are_of_the_tested_releases() -> None:
    pins = prepare.constraints()
    assert set(prepare.requirements()) <= set(pins)
    assert {"pytest", "msgspec", "xxhash"} <= set(prepare.requirements())
    assert not {"torch", "numpy"} & set(prepare.requirements())
    assert prepare.unmet([]) == prepare.requirements()


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

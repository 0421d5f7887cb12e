"""The parts of the benchmarks that others rely on: the set of tensors, which bars are
kept, and what hits when. (The other figures are shown by the run that makes them.)"""

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

from bench import gpu_report, sync_report
from bench.peers import FOLDER, python_with
from bench.processes import Progress, children_of, held, send
from bench.shapes import FULL, SETS, SMALL, moe, nbytes_of, nbytes_of_set, shapes
from bench.support import Bar
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


def test_bars_of_a_sync() -> None:
    bars = sync_report.bars(sync_results())
    assert [bar.figure for bar in bars] == pytest.approx([5, 1, 2.5, 0.8])
    assert [bar.kept for bar in bars] == [True, True, True, False]
    assert Bar("as fast as light", 0.5, False).line() == "NO  as fast as light: 0.50"


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

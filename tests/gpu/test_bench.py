"""The benchmark of the GPU, all of it, on the fake: `make gpu` runs the real one by
itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.card import REAL
from tests.support.root import ROOT


@pytest.mark.skipif(REAL, reason="`make gpu` runs it, with nobody else on the GPU")
@pytest.mark.timeout(240)
def test_the_whole_benchmark_runs() -> None:
    command = [sys.executable, "bench/bench_gpu.py", "--quick", "--repetitions", "1", "--only", "smollm2"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Training steps meanwhile" in done.stdout
    assert done.stdout.count("hold=False: a training loop loses less than 0.05 of the publish time") == 2
    assert "these figures mean nothing" in done.stdout


def test_it_says_so_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES" if REAL else "FAKE_FAULTS", "" if REAL else "absent")
    command = [sys.executable, "bench/bench_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "no GPU can be used here: bench_gpu measures nothing\n"), done.stderr

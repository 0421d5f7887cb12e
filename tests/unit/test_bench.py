"""The parts of the benchmarks that others rely on: the set of tensors, and the figures made of samples."""

from __future__ import annotations

import pytest

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

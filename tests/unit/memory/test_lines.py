"""Lines and elements that differ: what the C code finds is what numpy finds.

Covers: memory/lines.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.memory import lines
from replicas.memory.lines import LINE_NBYTES, Bytes, Lines, apply_xors, find_changed


@pytest.fixture(params=["C", "numpy"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(lines, "_library", None)
        elif lines._library is None:
            pytest.skip("not compiled")
        yield


def placed(nbytes: int, at: int = 0) -> Bytes:
    """Zeros, ``at`` bytes behind the start of a line."""
    memory = np.zeros(nbytes + 2 * LINE_NBYTES, np.uint8)
    start = -memory.ctypes.data % LINE_NBYTES + at
    return memory[start : start + nbytes]


def lines_of(found: Lines) -> list[int]:
    return np.flatnonzero(np.unpackbits(found.words.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("_way")
@given(
    nbytes=st.integers(0, 20_000),
    where=st.lists(st.integers(0, 19_999)),
    part=st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)),
    at=st.integers(0, 63),
    threads=st.integers(1, 3),
)
def test_each_line_that_differs_has_its_bit(
    nbytes: int, where: list[int], part: tuple[int, int], at: int, threads: int
) -> None:
    run, base = placed(nbytes), placed(nbytes, at)
    run[[one for one in where if one < nbytes]] = 1
    first, last = sorted(min(one, nbytes) for one in part)
    found = Lines(run, base)
    found.compare(first, last, threads)
    assert lines_of(found) == sorted({one // LINE_NBYTES for one in where if first <= one < last})
    found.compare(0, nbytes)
    assert lines_of(found) == sorted({one // LINE_NBYTES for one in where if one < nbytes})


@pytest.mark.usefixtures("_way")
@given(
    width=st.sampled_from((1, 2, 4, 8)),
    bounds=st.tuples(st.integers(0, 1250), st.integers(0, 1250)),
    where=st.lists(st.integers(0, 9_999)),
    with_bits=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_elements_that_differ_are_found_and_changed_back(
    width: int, bounds: tuple[int, int], where: list[int], with_bits: bool, seed: int
) -> None:
    run, base = placed(10_000), placed(10_000, 8)
    run[:] = base[:] = np.random.default_rng(seed).integers(0, 256, 10_000)
    run[where] ^= 1
    found = Lines(run, base)
    found.compare(0, 10_000)
    first, last = (one * 8 for one in sorted(bounds))
    expected = sorted({(one - first) // width for one in where if first <= one < last})
    words = found.words if with_bits else None
    changes = find_changed(run, base, words, first, last, width, len(expected))
    assert changes is not None
    assert changes[0].tolist() == expected
    if expected:
        assert find_changed(run, base, words, first, last, width, len(expected) - 1) is None
    outside = run.copy()
    apply_xors(run[first:last], *changes)
    assert np.array_equal(run[first:last], base[first:last])
    assert np.array_equal(np.delete(run, np.s_[first:last]), np.delete(outside, np.s_[first:last]))


@pytest.mark.skipif(lines._library is None, reason="numpy looks at all lines")
def test_only_lines_with_a_bit_are_looked_at() -> None:
    run, base = placed(6_000), placed(6_000)
    run[[10, 100, 5_000]] = 1
    changes = find_changed(run, base, np.array([0b10, 0], np.uint64), 0, 6_000, 1, 3)
    assert changes is not None
    assert changes[0].tolist() == [100]


def test_no_memory_beyond_the_runs_is_compared() -> None:
    run = placed(100)
    with pytest.raises(ValueError, match="does not fit"):
        Lines(run, placed(99))
    with pytest.raises(ValueError, match="does not fit"):
        Lines(placed(100, 1), run)
    with pytest.raises(ValueError, match="bytes 90 to 101 of 100"):
        Lines(run, placed(100)).compare(90, 101)

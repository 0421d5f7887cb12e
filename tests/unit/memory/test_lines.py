"""Lines and elements that differ: what the C code finds is what numpy finds.

Covers: memory/lines.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.memory import lines
from replicas.memory.lines import LINE_NBYTES, Bytes, Lines, change, changed
from replicas.weights.copies import streaming
from replicas.weights.copies.copying import Copier
from replicas.weights.copies.host_copies import HostCopies, Kinds, cuts_of


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
    changes = changed(run, base, words, first, last, width, len(expected))
    assert changes is not None
    assert changes[0].tolist() == expected
    if expected:
        assert changed(run, base, words, first, last, width, len(expected) - 1) is None
    outside = run.copy()
    change(run[first:last], *changes)
    assert np.array_equal(run[first:last], base[first:last])
    assert np.array_equal(np.delete(run, np.s_[first:last]), np.delete(outside, np.s_[first:last]))


def test_no_memory_beyond_the_runs_is_compared() -> None:
    run = placed(100)
    with pytest.raises(ValueError, match="no base"):
        Lines(run, placed(99))
    with pytest.raises(ValueError, match="no base"):
        Lines(placed(100, 1), run)
    with pytest.raises(ValueError, match="bytes 90 to 101 of 100"):
        Lines(run, placed(100)).compare(90, 101)


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_copied_is_compared_meanwhile(
    past_caches: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of any alignment, and what torch has to copy."""
    monkeypatch.setattr(streaming, "pays", lambda nbytes: past_caches)
    if not compiled:
        monkeypatch.setattr(streaming, "available", False)
        monkeypatch.setattr(lines, "_library", None)
    torch.manual_seed(1)
    tensors = [torch.randn(count).to(torch.bfloat16) for count in (3, 50_000, 31, 4096, 1)]
    tensors += [torch.randn(60, 50).to(torch.bfloat16).t(), torch.randn(700)]
    sizes = [2 * one.numel() for one in tensors]
    starts, ends = [sum(sizes[:number]) for number in range(len(sizes))], np.cumsum(sizes).tolist()
    slot, base = placed(ends[-1]), placed(ends[-1], 16)

    def copied(with_lines: Lines | None) -> None:
        views = [
            torch.from_numpy(slot[start:end]).view(torch.bfloat16).view(one.shape)
            for start, end, one in zip(starts, ends, tensors, strict=True)
        ]
        kinds = Kinds([one.shape for one in tensors], [one.dtype for one in tensors], [torch.bfloat16] * len(tensors))
        found = kinds.look(tensors)
        assert found is not None
        ours = np.array(starts, np.uintp) + np.uintp(slot.ctypes.data)
        copies = HostCopies(found, kinds, ours, starts, lambda: views, load=False, name=str)
        copies.lines = with_lines
        with Copier(torch.from_numpy(slot), helpers=1) as copier:
            copier.run_host(copies, lambda nbytes: cuts_of(starts, ends, kinds.shapes, 10_000))
            copier.finish()

    copied(None)
    base[:] = slot
    for one, number in ((1, 12_345), (1, 49_999), (4, 0), (6, 350)):
        tensors[one][number] += 1
    tensors[5][7, 7] += 1
    found = Lines(slot, base)
    copied(found)
    expected = np.unique(np.flatnonzero(slot != base) // LINE_NBYTES).tolist()
    assert lines_of(found) == expected
    assert len(expected) == 5

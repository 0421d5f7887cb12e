"""Layout of an operation's segments."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.core.base.dtypes import ITEM_NBYTES
from replicas.core.base.manifest import segment_layout
from replicas.errors import ManifestMismatch
from replicas.messages import Segment

segments = st.lists(
    st.builds(
        Segment, dtype=st.sampled_from(sorted(ITEM_NBYTES)), shape=st.lists(st.integers(0, 5), max_size=3).map(tuple)
    ),
    max_size=8,
)


def test_each_segment_starts_at_a_multiple_of_64() -> None:
    given = [Segment("bfloat16", (3,)), Segment("float32", (16,)), Segment("int8", ()), Segment("float64", (9,))]
    assert segment_layout(given) == ((0, 64, 128, 192), 320)


def test_no_segments_take_no_memory() -> None:
    assert segment_layout([]) == ((), 0)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ManifestMismatch, match="dtype 'float128' cannot be published"):
        segment_layout([Segment("float128", (1,))])


@settings(max_examples=15, deadline=None)
@given(segments)
def test_segments_are_in_order_aligned_and_apart(given: list[Segment]) -> None:
    offsets, nbytes = segment_layout(given)
    position = 0
    for offset, segment in zip(offsets, given, strict=True):
        assert offset >= position
        assert offset % 64 == 0
        position = offset + prod(segment.shape) * ITEM_NBYTES[segment.dtype]
    assert position <= nbytes
    assert nbytes % 64 == 0


@settings(max_examples=15, deadline=None)
@given(st.lists(segments, max_size=4))
def test_the_layout_of_all_participants_is_the_layouts_of_each_one_after_another(each: list[list[Segment]]) -> None:
    together, total = segment_layout([segment for one in each for segment in one])
    expected: list[int] = []
    start = 0
    for one in each:
        offsets, nbytes = segment_layout(one)
        expected += [start + offset for offset in offsets]
        start += nbytes
    assert list(together) == expected
    assert total == start

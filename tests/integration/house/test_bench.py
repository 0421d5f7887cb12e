"""Benchmarks that nothing else runs still measure the protocol of today."""

from __future__ import annotations

import pytest

from bench import bench_scale

pytestmark = pytest.mark.anyio


async def test_simulated_members_commit_and_the_model_counts_their_messages() -> None:
    found = await bench_scale.measure((3, 20), 1, 0.1)
    assert [one["targets"] for one in found] == [3, 20]
    messages = bench_scale.checked(found)[0]
    assert messages["what"] == "messages of a sync"
    assert abs(messages["measured"] - messages["predicted"]) <= 0.05 * messages["predicted"]

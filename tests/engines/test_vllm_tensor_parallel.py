"""A vLLM server of several workers: each is a rank of its replica."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.engines.world import running_world

WORKERS = 3
"""The model's number of heads is a multiple of it."""


@pytest.mark.long
def test_each_worker_takes_its_part_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    with running_world(tmp_path, "--tensor-parallel-size", str(WORKERS)) as world:
        receipt = world.publish(scale=1.0)
        world.wait_until_served(receipt["version"])
        assert "Paris" in world.answer()
        receipt = world.publish(scale=0.0)
        world.wait_until_served(receipt["version"])
        assert "Paris" not in world.answer()
        assert len(receipt["members"]) == 1 + WORKERS  # the follower, too
        before = world.processes()
        os.kill(before["worker1"], signal.SIGKILL)
        world.publish(scale=1.0)
        world.wait_until_restarted(before)
        assert "Paris" in world.answer()

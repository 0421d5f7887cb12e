"""What the fast tests share: settings that make them fast, and leave nothing to chance
(`make properties` does)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from replicas.testing import FakeRun

settings.register_profile("unit", max_examples=20, deadline=None, derandomize=True)
settings.load_profile("unit")

gc.disable()  # until all is imported: there is no garbage in it, and a lot to look through


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: torch alone makes every full collection slow."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def run() -> Iterator[FakeRun]:
    """A run of the channel "policy", from the group "trainer" to the group
    "rollout"."""
    from replicas.testing import FakeRun  # torch: a second, which most files do not need

    with FakeRun() as found:
        yield found

"""One supervised run with a real vLLM for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.world import TENSOR_PARALLEL, EngineWorld, running_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWorld]:
    """Each test leaves the server with the newest version, or on its way to it."""
    with running_world(tmp_path_factory.mktemp("vllm"), "--tensor-parallel-size", str(TENSOR_PARALLEL)) as world:
        yield world

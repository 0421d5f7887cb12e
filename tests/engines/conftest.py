"""One supervised run with a real vLLM for all tests of a session."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.engines.world import RUN, World
from tests.support.runs import running


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Each test leaves the server with the newest version, or on its way to it."""
    with running(tmp_path_factory.mktemp("vllm"), RUN) as run:
        yield World(run)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=60) == 0
        run.assert_nothing_left()

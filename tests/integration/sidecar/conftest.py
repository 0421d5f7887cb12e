"""A forkserver for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sidecars import shared_forkserver


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with shared_forkserver() as name:
        yield name

"""What pulls of a test run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.carrying import Threads


@pytest.fixture(params=["plain", "tls"])
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    found = Threads(encrypt=request.param == "tls")
    yield found
    found.end()

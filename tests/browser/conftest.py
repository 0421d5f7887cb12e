"""One Chromium for all tests of a session, and one loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.browser import Chromium, find_chromium

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def chromium(anyio_backend: str) -> AsyncIterator[Chromium]:
    if find_chromium() is None:
        pytest.fail("no Chromium is installed (Debian: apt-get install chromium); CHROMIUM=/path names one")
    async with Chromium.start() as browser:
        yield browser

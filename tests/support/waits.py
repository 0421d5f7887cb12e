"""Wait until something is true: on a thread, or on the test's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

__all__ = ["eventually", "wait_until"]

LONG_S = 45.0
"""As long as a machine may take that is busy with other people's programs."""


def eventually(condition: Callable[[], Any], what: str, *, timeout_s: float = LONG_S) -> Any:
    """The first true value of ``condition``, which is asked again and again."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


async def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = LONG_S) -> Any:
    """The same on a running loop, whose other tasks go on meanwhile."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (value := condition()):
        assert loop.time() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)
    return value

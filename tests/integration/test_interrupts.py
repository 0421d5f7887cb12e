"""An interrupt of the main thread at any line of a public call reaches the caller, and the channel goes on.

A sample of the lines and moments; all of them: ``INTERRUPTS=3000 pytest tests/integration/test_interrupts.py``, or
``python -m tests.support.interrupts``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.interrupts import DEEDS, Found, Scene, at_each_line, at_random, scene

TIMES = int(os.environ.get("INTERRUPTS", "0"))
LINES = None if TIMES else 25

pytestmark = [
    pytest.mark.timeout(0 if TIMES else 300),
    pytest.mark.skipif(
        threading.current_thread() is not threading.main_thread(), reason="handlers run in the main thread"
    ),
]


@pytest.fixture(scope="module")
def world() -> Iterator[Scene]:
    with scene() as found:
        yield found


def nothing_is_lost(found: Found) -> None:
    assert found.sent, "there was no interrupt"
    assert found.caught == found.sent, str(found)
    assert not found.lost, "\n".join(found.lost)


@pytest.mark.parametrize("deed", DEEDS)
def test_at_each_line(world: Scene, deed: str) -> None:
    nothing_is_lost(at_each_line(world, deed, most=LINES))


def test_at_random_moments(world: Scene) -> None:
    nothing_is_lost(at_random(world, TIMES or 40))

"""Random calls of the whole public API: each does what it says or raises a documented
error, and the channel goes on.

The calls are the same in every run; ``make properties`` draws other ones, by
PROPERTY_SEED and PROPERTY_TIMES (how many times as many).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.channel.calls import limit_s
from tests.support.root import ROOT

SEED = os.environ.get("PROPERTY_SEED", "0")
COUNT = 800 * int(os.environ.get("PROPERTY_TIMES", "1"))
EVERY = 3
"""The next version must be committed after so many calls."""


@pytest.mark.timeout(limit_s(COUNT) + 60)
def test_whatever_is_passed_only_that_call_fails() -> None:
    command = [sys.executable, "-m", "tests.support.channel.calls", str(COUNT), SEED, str(EVERY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(COUNT) + 30, check=False)
    assert not done.returncode, done.stdout + done.stderr[-10_000:]

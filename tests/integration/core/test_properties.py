"""The property tests of the core for longer: among the fast tests they run a few
examples only.

The examples are the same in every run; ``make properties`` looks for other ones, by
PROPERTY_SEED and PROPERTY_TIMES (how many times as many).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.properties import MACHINES, limit_s
from tests.support.root import ROOT

SEED = os.environ.get("PROPERTY_SEED", "")
TIMES = int(os.environ.get("PROPERTY_TIMES", "1"))
COUNTS = {"channel": 400, "lives": 100, "peers": 150, "raising_peers": 60}

pytestmark = pytest.mark.timeout(limit_s(max(COUNTS.values()) * TIMES) + 60)


@pytest.mark.parametrize("name", MACHINES)
def test_whatever_happens_the_invariants_hold(name: str) -> None:
    count = COUNTS[name] * TIMES
    command = [sys.executable, "-m", "tests.support.properties", name, str(count), *SEED.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(count) + 30, check=False)
    assert not done.returncode, done.stdout + done.stderr

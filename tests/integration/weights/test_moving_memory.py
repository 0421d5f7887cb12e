"""Another thread frees, swaps, resizes and replaces the storages of what is copied:
each tensor is copied as it was or as it is, or a typed error names it, and the process
lives.

At length: ``python -m tests.support.channel.moving all 10000 SEED``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from replicas.weights.copies import streaming
from tests.support.root import ROOT

SEED = os.environ.get("PROPERTY_SEED", "0")
TIMES = 25 * int(os.environ.get("PROPERTY_TIMES", "1"))
LIMIT_S = 240.0 + 8.0 * TIMES

pytestmark = [
    pytest.mark.timeout(LIMIT_S + 60.0),
    pytest.mark.skipif(
        not streaming.available, reason="without the C code torch copies, and nothing keeps memory there"
    ),
]


def test_memory_that_moves() -> None:
    command = [sys.executable, "-m", "tests.support.channel.moving", "all", str(TIMES), SEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert not done.returncode, done.stdout + done.stderr[-10_000:]

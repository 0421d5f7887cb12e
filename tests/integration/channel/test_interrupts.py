"""An interrupt of the main thread at any line of a public call reaches the caller, and
the channel goes on.

A sample of the lines and moments; all of them: ``INTERRUPTS=3000 pytest
tests/integration/channel/test_interrupts.py``, or ``python -m
tests.support.channel.interrupts``. Each in a process of its own, whose main thread
nobody else interrupts.

Covers: common/waits.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.channel.interrupts import DEEDS
from tests.support.root import ROOT

TIMES = int(os.environ.get("INTERRUPTS", "0"))
LIMIT_S = 240.0 + 10.0 * TIMES

pytestmark = pytest.mark.timeout(LIMIT_S + 60.0)


def harness(*arguments: str) -> None:
    command = [sys.executable, "-m", "tests.support.channel.interrupts", "--seed", "0", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("deed", DEEDS)
def test_at_each_line(deed: str) -> None:
    harness("--deeds", deed, "--times", "0", *([] if TIMES else ["--most", "25"]))


def test_at_random_moments() -> None:
    harness("--most", "0", "--times", str(TIMES or 40))

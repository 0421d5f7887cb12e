"""What readers see of the folder of ``replicas mirror``, between any two system calls
of its writer: 40 histories of runs, kills and full disks; more by ``make properties``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.mirrors.histories import EACH, FORBIDDEN, limit_s
from tests.support.root import ROOT

SEED = os.environ.get("PROPERTY_SEED", "1")
COUNT = 40 * int(os.environ.get("PROPERTY_TIMES", "1"))


def told(what: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.mirrors.histories", what, SEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s(COUNT) + 30, check=False)
    if done.returncode == FORBIDDEN:
        pytest.skip("this machine allows no process to be traced")
    assert not done.returncode, done.stdout + done.stderr
    parts = (part.split(" ", 1) for part in done.stdout.strip().split(", "))
    return {what: int(number.replace(",", "")) for number, what in parts}


@pytest.mark.timeout(limit_s(COUNT) + 60)
def test_latest_is_whole_each_time_that_it_is_read() -> None:
    found = told(str(COUNT))
    assert found["histories"] == COUNT
    assert min(found[what] for what in ("killed", "written", "refused", "second writers")) > COUNT / 10, found


def test_another_mirror_goes_on_after_an_end_at_any_system_call() -> None:
    found = told(EACH)
    assert found["kinds of writes"] == 3
    assert found["calls"] > 300

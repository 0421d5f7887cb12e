"""What the tests themselves go by."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.support.runs import shared_memory

SHM = Path("/dev/shm")


def test_segments_of_other_programs_are_nobodys_leftovers() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(60)
    nonce = secrets.token_hex(4)
    others = [f"psm_{nonce}", f"sem.mp-{nonce}", f"torch_{os.getpid()}_{nonce}_0"]
    left = [f"torch_{dead.pid}_{nonce}_0", f"replicas-{nonce}"]
    before = shared_memory()
    try:
        for name in others + left:
            (SHM / name).touch()
        assert shared_memory() - before == set(left)
    finally:
        for name in others + left:
            (SHM / name).unlink()

"""DTensors of a real 2 x 2 mesh: packed by parts, gathered by the leader, and loaded in
place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.root import ROOT


def test_four_ranks_pack_and_load_dtensors(tmp_path: Path) -> None:
    """What is checked is in ``tests/support/channel/dtensor_rank.py``."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.channel.dtensor_rank", str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        results = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [output for output, _ in results] == ["passed\n"] * 4, "\n".join(errors for _, errors in results)

"""``python -m tests.chaos.tree.tree_supervisor CLOCK CONFIG``: ``replicas run CONFIG``
with a wall clock that a test can set.

``CLOCK`` is a file with one number (a C double): by how many seconds the wall clock is
wrong. It is mapped, and read at each look at the clock, so that a jump takes effect at
once. The monotonic clock is as it is: nothing can set that.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path
from unittest import mock

from replicas.cli import main as cli

__all__ = ["main"]


def main() -> None:
    with Path(sys.argv[1]).open("rb") as file:
        clock = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    seconds, nanoseconds = time.time, time.time_ns

    def wrong_s() -> float:
        return float(struct.unpack_from("d", clock)[0])

    def wrong() -> float:
        return seconds() + wrong_s()

    def wrong_ns() -> int:
        return nanoseconds() + int(wrong_s() * 1e9)

    sys.argv = ["replicas.supervisor", *sys.argv[2:]]
    with mock.patch.object(time, "time", wrong), mock.patch.object(time, "time_ns", wrong_ns):
        sys.exit(cli.main(["run", *sys.argv[1:]]))


if __name__ == "__main__":
    main()

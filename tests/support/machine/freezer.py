"""A process that does not die of SIGKILL: it is in a frozen control group, as one in an
uninterruptible sleep (a dead network file system, a stuck driver)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waits import eventually

__all__ = ["freezes", "frozen"]

_FREEZER = Path("/sys/fs/cgroup/freezer")


def freezes() -> bool:
    """Whether there can be one here."""
    return os.access(_FREEZER / "cgroup.procs", os.W_OK)


@contextmanager
def frozen(pid: int) -> Iterator[int]:
    """The process takes a signal, SIGKILL also, when the block ends; its pid."""
    folder = _FREEZER / f"replicas-test-{pid}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(pid))
        (folder / "freezer.state").write_text("FROZEN")
        yield pid
    finally:
        (folder / "freezer.state").write_text("THAWED")
        eventually(lambda: not (folder / "cgroup.procs").read_text(), "the end of the process")
        folder.rmdir()

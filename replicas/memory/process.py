"""Which process this is, on its machine."""

from __future__ import annotations

import os
from pathlib import Path

from replicas.messages.identity import ProcessIdentity

__all__ = ["own_process"]


def own_process() -> ProcessIdentity:
    """What makes this process recognisable to others."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return ProcessIdentity(
        pid=os.getpid(),
        start_time=int(stat.rpartition(")")[2].split()[19]),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
    )

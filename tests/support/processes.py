"""The process table, read from /proc; and signals to one of its processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from replicas.linux.processes import MARK, marked, start_time

__all__ = ["children", "kill", "mark_of", "name_of", "parent_of", "parents", "sidecars_of", "start_time"]


def parent_of(pid: int) -> int:
    """0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def name_of(pid: int) -> str:
    """As ``ps`` shows it; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    """By a pidfd, which 0 has none: ``os.kill`` would hit all of our own group."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signum)
    finally:
        os.close(pidfd)


def parents() -> dict[int, int]:
    """The parent of every process there is."""
    return {int(path.name): parent_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}


def children(pid: int) -> list[int]:
    """The living children of a process."""
    return [child for child, parent in parents().items() if parent == pid and start_time(child) is not None]


def mark_of(pid: int) -> str:
    """The mark of its shim; empty when it has none, or is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    start = f"{MARK}=".encode()
    return next((entry.removeprefix(start).decode() for entry in entries if entry.startswith(start)), "")


def sidecars_of(rank: int) -> list[int]:
    """The sidecars, spare ones too, of all ranks under the shim of this one."""
    mark = mark_of(rank)
    there = marked(mark) if mark else []
    return [pid for pid in there if name_of(pid) in ("replica-sidecar", "replica-spare")]

"""Identify the machine and its namespaces: where pids and addresses are comparable."""

from __future__ import annotations

from pathlib import Path

__all__ = ["boot_id", "namespace"]


def boot_id() -> str:
    """Return the id of this boot of the machine; containers of one kernel share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def namespace(kind: str) -> int:
    """Return this process's namespace id of a kind, such as ``pid`` or ``net``."""
    return Path(f"/proc/self/ns/{kind}").stat().st_ino

"""Which machine this is, and which namespaces of it: where a pid, or an address, means
the same to two processes."""

from __future__ import annotations

from pathlib import Path

__all__ = ["boot_id", "namespace"]


def boot_id() -> str:
    """The machine, as long as it runs; containers of one kernel share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def namespace(kind: str) -> int:
    """This process's namespace of a kind, such as ``pid`` or ``net``."""
    return Path(f"/proc/self/ns/{kind}").stat().st_ino

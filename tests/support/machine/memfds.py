"""Shared memory of processes, as the kernel shows it: who has it open, who owns it, who
has it mapped, and how."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from replicas.linux.files import kernel_lines

__all__ = ["Memory", "mapped_anywhere", "memories", "ownerless"]

PREFIX = "/memfd:replicas-"


@dataclass
class Memory:
    """One memfd in one process.

    ``owned``: open for writing, as only its owner (and the owner's sidecars) have it.
    ``modes``: of its mappings, as in ``/proc/PID/maps``: ``rw-s`` the owner's, ``r--s``
    for reading only, ``rw-p`` copy-on-write.
    """

    inode: int
    name: str
    owned: bool = False
    descriptors: int = 0
    modes: list[str] = field(default_factory=list)


def memories(pid: int, name: str = "") -> dict[int, Memory]:
    """By inode, those whose name contains ``name``; nothing when the process is gone.
    Beacons are not counted."""
    found: dict[int, Memory] = {}
    try:
        _descriptors(Path(f"/proc/{pid}"), found)
        _mappings(Path(f"/proc/{pid}"), found)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {inode: one for inode, one in found.items() if name in one.name and "beacon" not in one.name}


def _descriptors(process: Path, found: dict[int, Memory]) -> None:
    for link in (process / "fd").iterdir():
        try:
            target = str(link.readlink())
            if not target.startswith(PREFIX):
                continue
            inode = link.stat().st_ino
            flags = (process / "fdinfo" / link.name).read_text().partition("flags:")[2].split()[0]
        except FileNotFoundError:
            continue  # closed meanwhile
        memory = found.setdefault(inode, _memory(inode, target))
        memory.descriptors += 1
        memory.owned |= int(flags, 8) & os.O_ACCMODE == os.O_RDWR


def _mappings(process: Path, found: dict[int, Memory]) -> None:
    for line in kernel_lines(process / "maps"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(PREFIX):
            inode = int(fields[4])
            found.setdefault(inode, _memory(inode, fields[5])).modes.append(fields[1])


def _memory(inode: int, target: str) -> Memory:
    return Memory(inode, target.removeprefix("/memfd:").removesuffix(" (deleted)"))


def ownerless(pids: Iterable[int]) -> dict[int, list[int]]:
    """Memory that some of these processes have, and whose owner is none of them: the
    processes, by inode."""
    users: dict[int, list[int]] = {}
    owned: set[int] = set()
    for pid in pids:
        for inode, memory in memories(pid).items():
            users.setdefault(inode, []).append(pid)
            if memory.owned:
                owned.add(inode)
    return {inode: found for inode, found in users.items() if inode not in owned}


def mapped_anywhere(inodes: Iterable[int]) -> dict[int, set[int]]:
    """Which of these memories any process of the machine still has: inodes, by pid."""
    wanted = set(inodes)
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid: left for pid in pids if (left := wanted & memories(pid).keys())}

"""Processes that have a memfd mapped, for logs and error texts."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from pathlib import Path

from replicas.linux.processes import process_name, processes


def mappers(inodes: Container[int]) -> dict[int, set[int]]:
    """Return, by pid, which of these memfds each process has mapped into its memory.

    Only processes that this user may look at. Reads the list of mappings of each
    process: a millisecond for a large one.

    :param inodes: of the memfds.
    """
    found: dict[int, set[int]] = {}
    for pid in processes():
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open("rb") as maps:  # another user's, or over
            mapped = {int(line.split(None, 5)[4]) for line in maps if b"/memfd:" in line}
            if ours := {inode for inode in mapped if inode in inodes}:
                found[pid] = ours
    return found


def named(pids: Iterable[int]) -> str:
    """Return a text such as "processes 12 (vllm), 34 (python3)" for these pids."""
    texts = [f"{pid} ({name})" if (name := process_name(pid)) else str(pid) for pid in sorted(pids)]
    return f"process{'' if len(texts) == 1 else 'es'} {', '.join(texts)}"

"""The decision log: one JSON line for each commit, on disk before anyone is told.

The file is only ever appended to and synced; a torn last line (the machine died while it was written) was never acted on
and is ignored. On start it gives each channel the floor of its version numbers.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec

from replicas.core.effects import CommitDecision

__all__ = ["DecisionLog"]


class DecisionLog:
    """``path`` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fd = -1
        self._size = 0
        self.last: dict[str, CommitDecision] = {}
        self.term = time.time_ns() // 1_000_000  # never that of an earlier coordinator, with or without a log
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        complete = 0
        if path.exists():
            data = path.read_bytes()
            complete = data.rfind(b"\n") + 1
            for line in data[:complete].splitlines():
                decision = msgspec.json.decode(line, type=CommitDecision)
                self.last[decision.channel] = decision
                self.term = max(self.term, decision.term + 1)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.truncate(self._fd, complete)
        self._size = complete

    def floor(self, channel: str) -> int:
        """The newest version number that was ever committed on the channel."""
        decision = self.last.get(channel)
        return decision.version if decision is not None else 0

    def append(self, decision: CommitDecision) -> None:
        """:raises OSError: the disk does not take it; the log is as it was, and the same decision may be tried again."""
        if self._fd >= 0:
            line = msgspec.json.encode(decision) + b"\n"
            try:
                if os.pwrite(self._fd, line, self._size) != len(line):
                    raise OSError(errno.ENOSPC, "only a part of the decision was written")
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(line)
        self.last[decision.channel] = decision

    def close(self, *, remove: bool = False) -> None:
        """``remove``: the run is over, and so are its decisions."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)

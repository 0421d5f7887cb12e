"""One log file, rotated by size, with an index of times. Standard library only.

``rank-0.log`` is the newest part; a full part becomes ``rank-0.log.1``, which becomes
``rank-0.log.2``, and so on up to ``keep``. A rank's log has an index
``rank-0.log.times``: a line ``OFFSET TIME`` (seconds since 1970) about every second
with output, so that readers find the lines since a time. The index is optional: if it
cannot be written, it is skipped until the next part.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from replicas.linux import private

_TIMES_INTERVAL_S = 1.0


class RotatedFile:
    """A rotated file with ``keep`` older parts. This object must be its only writer."""

    def __init__(self, path: Path, max_nbytes: int, keep: int, *, times: bool) -> None:
        self.path = path
        self._max_nbytes = max_nbytes
        self._keep = keep
        self._with_times = times
        self._file: int | None = None
        self._times: int | None = None
        self._noted_at = 0.0

    def append(self, lines: bytes) -> None:
        """Write all of ``lines``, in the next part if the file is full.

        :raises OSError: nothing was written.
        """
        size = self._open()
        if size and size + len(lines) > self._max_nbytes:
            self.rotate()
            size = self._open()
        if lines:
            self._note(size)
            self._write(lines, size)

    def _open(self) -> int:
        """Open the file at its end, and end a torn line; return its size in bytes."""
        if self._file is not None:
            return os.fstat(self._file).st_size
        self._file = _append_to(self.path)
        if self._with_times:
            with contextlib.suppress(OSError):  # the index is optional
                self._times = _append_to(_times_of(self.path))
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n", size)
            size += 1
        return size

    def _write(self, lines: bytes, size: int) -> None:
        assert self._file is not None
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def rotate(self) -> None:
        """Start the next part. Safe to repeat after a kill or failure at any point.

        Therefore, parts are moved only up to the first free number, and a part's index
        moves before the part itself.
        """
        self.close()
        free = (number for number in range(1, self._keep) if not self._part(number).exists())
        for number in range(next(free, self._keep), 0, -1):
            older = self._part(number)
            newer = self._part(number - 1)
            for old, new in ((_times_of(newer), _times_of(older)), (newer, older)):
                with contextlib.suppress(FileNotFoundError):
                    private.rename(old, new.name)
        if self._keep == 0:
            for path in (_times_of(self.path), self.path):
                private.remove(path)

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _note(self, size: int) -> None:
        now = time.time()
        if self._times is not None and not 0 <= now - self._noted_at < _TIMES_INTERVAL_S:
            self._noted_at = now
            try:
                os.write(self._times, f"{size} {now:.3f}\n".encode())
            except OSError:
                times, self._times = self._times, None
                _close(times)

    def close(self) -> None:
        for descriptor in (self._file, self._times):
            if descriptor is not None:
                _close(descriptor)
        self._file = self._times = None
        self._noted_at = 0.0


def _close(descriptor: int) -> None:
    """Close; ignore errors (on NFS, of earlier writes): it is closed anyway."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _append_to(path: Path) -> int:
    return private.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, make_folder=True)


def _times_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.times")


def remove_old_generations(folder: Path, keep: int) -> None:
    """Keep the logs of ``keep`` generations; ``folder`` (``gen-<n>``) is the newest."""
    newest = _generation(folder)
    for other in folder.parent.glob("gen-*"):
        if _generation(other) > newest - keep:
            continue
        private.remove_tree(other)  # on failure, the next generation tries again


def _generation(folder: Path) -> int:
    """Return the number of a generation's folder; a large one for other folders."""
    number = folder.name.removeprefix("gen-")
    return int(number) if number.isdecimal() else 1 << 62

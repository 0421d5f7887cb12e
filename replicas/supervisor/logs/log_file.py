"""One log file, rotated by size, with an index of times. Standard library only.

``rank-0.log`` is the newest part; a full part becomes ``rank-0.log.1``, which becomes
``rank-0.log.2``, and so on up to ``keep``. Each part has an index
``rank-0.log.times``: a line ``OFFSET TIME`` (seconds since 1970) about every second
with output, so that readers find the lines since a time. The index is optional: a line
of it that cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from replicas.linux import private

_TIMES_INTERVAL_S = 1.0


class RotatedFile:
    """A log file, rotated by size, with ``keep`` older parts.

    This object must be its only writer.
    """

    def __init__(self, path: Path, max_nbytes: int, keep: int) -> None:
        """Keep the arguments; open nothing before :meth:`append`.

        :param max_nbytes: size at which the file is full.
        :param keep: number of older parts.
        """
        self.path = path
        self._max_nbytes = max_nbytes
        self._keep = keep
        self._file: int | None = None
        self._noted_at = 0.0

    def append(self, lines: bytes) -> None:
        """Append ``lines`` to the file, which is rotated first if it is full. Blocks.

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
        """Open the file, unless it is open; end a last line that a crash has cut off.

        :return: its size in bytes.
        """
        if self._file is not None:
            return os.fstat(self._file).st_size
        self._file = _append_to(self.path)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._write(b"\n", size)
            size += 1
        return size

    def _write(self, lines: bytes, size: int) -> None:
        """Append the lines. After an OSError the file has its ``size`` again.

        :param size: present size of the file, in bytes.
        """
        assert self._file is not None
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def rotate(self) -> None:
        """Rename the file and its older parts by one number; drop the oldest.

        The next append starts a new file. Safe to repeat after a kill or failure at any
        point. Therefore, parts are moved only up to the first free number, and a part's
        index moves before the part itself.
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
        """Return the path of an older part, or that of the newest for 0."""
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _note(self, size: int) -> None:
        """Append ``size`` and the time to the index of times, at most once a second.

        :param size: offset in bytes at which the next lines will be.
        """
        now = time.time()
        if 0 <= now - self._noted_at < _TIMES_INTERVAL_S:
            return
        self._noted_at = now
        with contextlib.suppress(OSError), os.fdopen(_append_to(_times_of(self.path)), "ab", 0) as index:
            index.write(f"\n{size} {now:.3f}".encode())  # the line break first: it also ends a torn line

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on NFS, of earlier writes: it is closed anyway
                os.close(self._file)
        self._file = None
        self._noted_at = 0.0


def _append_to(path: Path) -> int:
    """Open a file for appending, made if missing with its folder; return the fd."""
    return private.open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, make_folder=True)


def _times_of(path: Path) -> Path:
    """Return the path of the index of times of a log."""
    return path.with_name(f"{path.name}.times")


def remove_old_generations(folder: Path, keep: int) -> None:
    """Remove the log folders of a replica's old generations. Blocks.

    :param folder: ``gen-<newest>``; the others are beside it.
    :param keep: how many of the newest stay.
    """
    newest = _generation(folder)
    for other in folder.parent.glob("gen-*"):
        if _generation(other) > newest - keep:
            continue
        private.remove_tree(other)  # on failure, the next generation tries again


def _generation(folder: Path) -> int:
    """Return the number in a folder's name ``gen-<number>``.

    A huge number for other folders, so that they are not removed as old.
    """
    number = folder.name.removeprefix("gen-")
    return int(number) if number.isdecimal() else 1 << 62

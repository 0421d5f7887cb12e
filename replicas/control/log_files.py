"""Read and follow a run's log files, selected by replica, rank and generation.

The files are ``logs/<group>/<replica>/gen-<g>/rank-<r>.log``; rotated parts are
``rank-<r>.log.1`` (the next older) and so on. Only the log pump writes them. Reading
relies on nothing but these names, so no supervisor has to run.

A :class:`LogFollower` holds each selected file open and reads appended lines, some from
each file in turn. At the end of a file it checks whether the name now refers to another
file: then the old file was renamed and has been read to its end, and the parts after it
are read in order. A file that has become shorter was emptied in place (by
``copytruncate``) and is read from its start. New generations are found by listing the
folders again. The standard library lacks inotify, so a follower polls every
:data:`POLL_S`.

``since`` uses the pump's index of times beside a log (``rank-<r>.log.times``: lines of
``OFFSET TIME``, one for about each second of output); without it, the file's
modification time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import anyio.to_thread
import msgspec

from replicas.common.foreign import visible
from replicas.common.sizes import list_text
from replicas.errors import UsageError

POLL_S = 0.2
BATCH_NBYTES = 256 * 1024
_READ_NBYTES = BATCH_NBYTES
_BLOCK_NBYTES = 64 * 1024
_LINE_NBYTES = (1 << 20) + 1024
"""Longer lines are cut here."""
_EACH_NBYTES = 64
"""Overhead of a line in memory and in messages."""
_RANK = re.compile(r"rank-(\d+)\.log")
_PART = re.compile(r"\.log\.\d+")
_TIME = re.compile(rb"^(\d+) (\d+\.\d+)$", re.MULTILINE)
"""A whole line of an index of times."""


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a rank's log. ``replica``: ``group/index``."""

    replica: str
    generation: int
    rank: int
    text: str


def origin(line: LogLine) -> str:
    """Return the text before a line where several ranks are shown:
    ``group/replica/rank| ``."""
    return f"{line.replica}/{line.rank}| "


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The lines to read. None selects all, but only the newest generation.

    :ivar target: ``group``, ``group/index`` or ``group/index/rank``.
    :ivar lines: number of last lines of each rank.
    :ivar since: seconds since 1970.
    """

    target: str | None = None
    rank: int | None = None
    generation: int | None = None
    lines: int | None = None
    since: float | None = None

    def takes(self, group: str, index: str, rank: int) -> bool:
        """Return True if the lines of this rank, of replica ``index``, are selected."""
        named = self.target in (None, group, f"{group}/{index}", f"{group}/{index}/{rank}")
        return named and self.rank in (None, rank)


def _parts(path: Path) -> list[Path]:
    """Return the rotated parts of a log, the oldest first, and then the log."""
    older = [other for other in _entries(path.parent) if _PART.fullmatch(other.name.removeprefix(path.stem))]
    return [*reversed(older), path]


def tail_offset(file: BinaryIO, lines: int) -> tuple[int, int]:
    """Read a file backwards, moving its position; return the offset in bytes of its
    last ``lines`` lines, and the number of those: fewer if the file has fewer."""
    nbytes = file.seek(0, os.SEEK_END)
    position, found = nbytes - 1, 0  # the last byte ends a line, or is in it
    while position > 0:
        size = end = min(_BLOCK_NBYTES, position)
        position -= size
        file.seek(position)
        block = file.read(size)
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == lines:
                return position + end + 1, found
    return 0, found + (nbytes > 0)


def offset_since(log: Path, since: float) -> int | None:
    """Return the offset in a log of the lines after the time ``since`` (since 1970), to
    about 1 s, by the index beside it. Return None if none is later, 0 without index."""
    try:
        found = log.stat()
        if found.st_mtime < since:
            return None
        index = log.with_name(f"{log.name}.times").read_bytes()
    except FileNotFoundError:
        return 0
    offset = [0, *(int(offset) for offset, at in _TIME.findall(index) if float(at) < since)][-1]
    return offset if offset <= found.st_size else 0  # it was truncated after that


class _Stream:
    """One rank's log in one generation, read in order across rotations; blocks."""

    def __init__(self, path: Path, replica: str, generation: int, rank: int) -> None:
        """Describe a log; open no file before :meth:`choose_start` or :meth:`read`.

        :param path: of the log, whose rotated parts are beside it.
        :param replica: ``group/index``.
        """
        self.path = path
        self.name = (replica, generation, rank)
        self._todo: list[Path] = []
        self._file: BinaryIO | None = None
        self._inode = (0, 0)
        self._rest = b""
        self._at_end = False

    def choose_start(self, selection: Selection, *, fresh: bool) -> None:
        """Open the log at the selection's first line; :meth:`read` begins there. A log
        that has appeared since the first poll (``fresh``) is opened at its start."""
        parts, offset = _parts(self.path), 0
        if not fresh and selection.since is not None:
            found = [(part, at) for part in parts if (at := offset_since(part, selection.since)) is not None]
            found = found or [(self.path, _size(self.path))]
            parts, offset = [part for part, _ in found], found[0][1]
        if not fresh and selection.lines is not None:
            parts, offset = _last_lines(parts, selection.lines, offset)
        self._todo = parts
        self._open(offset)

    def _open(self, offset: int = 0) -> bool:
        """Open the next part of the log that exists, and close the present one. Return
        False, with the present one still open, if no part is left.

        :param offset: in bytes, where reading begins.
        """
        while self._todo:
            path = self._todo.pop(0)
            try:
                file = path.open("rb")
            except FileNotFoundError:
                continue  # the oldest part was deleted, or the file is being renamed: the next poll finds it
            found = os.fstat(file.fileno())
            file.seek(offset)
            if self._file is not None:
                self._file.close()
            self._file, self._inode = file, (found.st_dev, found.st_ino)
            return True
        return False

    def read(self) -> list[bytes]:
        """Return new complete lines, at most a few hundred KiB, or an empty list.

        Open the next file of the log if the present one is at its end.
        """
        if self._file is None and not self._open():
            self._todo = _parts(self.path)
            self._at_end = True
            return []
        lines: list[bytes] = []
        while not lines:  # a chunk may be a part of a long line
            data = self._chunk()
            self._at_end = not data
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LINE_NBYTES:
                lines.append(self._rest)
                self._rest = b""
        return lines

    def _chunk(self) -> bytes:
        """Return the next bytes of the log, also from its next file, which is opened,
        or b"" if there are none yet."""
        while True:
            assert self._file is not None
            if data := self._file.read(_READ_NBYTES):
                return data
            if self._is_current():
                if os.fstat(self._file.fileno()).st_size >= self._file.tell():
                    return b""
                self._file.seek(0)  # logrotate's copytruncate has emptied it
                if self._rest:  # of a line that will not be completed
                    return b"\n"
                continue
            if data := self._file.read(_READ_NBYTES):  # written between the last read and the rename
                return data
            if not self._todo:
                self._todo = self._after()
            if not self._open():
                return b""

    def _is_current(self) -> bool:
        """Return True if the open file is the log itself, not a rotated part."""
        return not self._todo and _inode(self.path) in (None, self._inode)

    def _after(self) -> list[Path]:
        """Return the paths of the parts that follow the open one; of all parts if the
        open one was deleted."""
        parts = _parts(self.path)
        inodes = [_inode(part) for part in parts]
        return parts[inodes.index(self._inode) + 1 :] if self._inode in inodes else parts

    def is_over(self) -> bool:
        """Return True if the log's folder was removed, and all that was written has
        been read."""
        return self._at_end and not self.path.parent.exists()

    def close(self) -> bytes:
        """Close the file; return what was read of a last line without a line break yet
        (:meth:`read` has not returned it), or b""."""
        if self._file is not None:
            self._file.close()
        rest, self._rest = self._rest, b""
        return rest


def _inode(path: Path) -> tuple[int, int] | None:
    """Return (device, inode), which identify a file after a rename; None if missing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _size(path: Path) -> int:
    """Return the file's size in bytes; 0 if it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _last_lines(parts: list[Path], lines: int, least: int) -> tuple[list[Path], int]:
    """Return the parts of a log that have its last ``lines`` lines, and the offset of
    the first such line in the first part.

    :param parts: the oldest first.
    :param least: offset in ``parts[0]`` before which no line is taken.
    """
    if lines == 0:
        return parts[-1:], _size(parts[-1])
    taken: list[Path] = []
    offset = 0
    for part in reversed(parts):
        taken.insert(0, part)
        try:
            with part.open("rb") as file:
                offset, found = tail_offset(file, lines)
        except FileNotFoundError:
            taken.pop(0)
            continue
        lines -= found
        if lines <= 0:
            break
    return taken or parts[-1:], max(offset, least) if taken and taken[0] == parts[0] else offset


class LogReader(Protocol):
    """The selected logs, on this or other machines, in batches. For an event loop."""

    @property
    def many(self) -> bool:
        """True if the logs found so far are of several ranks; lines need origins."""
        ...

    async def poll(self) -> list[LogLine]:
        """Return the next new lines, or an empty list; the first call opens the files.

        :raises replicas.errors.UsageError: there are no such logs.
        """
        ...

    async def aclose(self) -> list[LogLine]:
        """Close the files. Return what the logs have after their last newlines: lines
        that were still being written, at most one for each log."""
        ...


class FolderReader:
    """Reads and follows the logs in one folder, for an event loop: in a thread."""

    def __init__(self, logs: Path, selection: Selection) -> None:
        """Read the selected files below the folder ``logs``; open none before
        :meth:`poll`."""
        self._follower = LogFollower(logs, selection)

    @property
    def many(self) -> bool:
        """True if the logs that were found are of several ranks."""
        return self._follower.many

    async def poll(self) -> list[LogLine]:
        """Return new lines, read in a thread, or an empty list."""
        return await anyio.to_thread.run_sync(self._follower.poll)

    async def aclose(self) -> list[LogLine]:
        """Close the files; return the unfinished last line of each log that has one."""
        return self._follower.close()


class LogFollower:
    """Reads the selected logs in batches. It blocks: not for an event loop.

    :param logs: the folder ``logs`` of a run (or ``logs.previous``).
    :raises replicas.errors.UsageError: at the first :meth:`poll`, if the selection has
        never logged anything.
    """

    def __init__(self, logs: Path, selection: Selection) -> None:
        """Keep the folder and the selection; open no file before :meth:`poll`."""
        self._logs = logs
        self._selection = selection
        self._streams: dict[Path, _Stream] = {}
        self._begun = False
        self._turn = 0

    def poll(self) -> list[LogLine]:
        """Return new lines, up to about 256 KiB, or an empty list; do not wait for any.
        Open logs that are new; close those that were deleted.

        :raises replicas.errors.UsageError: at the first call, if there are no such
            logs.
        """
        for path, replica, generation, rank in self._find():
            if path not in self._streams:
                stream = self._streams[path] = _Stream(path, replica, generation, rank)
                stream.choose_start(self._selection, fresh=self._begun)
        if not self._begun and not self._streams:
            raise self._nothing()
        self._begun = True
        over = [path for path, stream in self._streams.items() if stream.is_over()]
        found = _closed([self._streams.pop(path) for path in over])  # deleted generations
        streams = list(self._streams.values())
        nbytes = 0
        for _ in range(len(streams)):
            if nbytes >= BATCH_NBYTES:  # the next poll begins with the remaining streams
                break
            stream = streams[self._turn % len(streams)]
            self._turn += 1
            for text in stream.read():
                nbytes += len(text) + _EACH_NBYTES
                found.append(_line(stream, text))
        return found

    def close(self) -> list[LogLine]:
        """Close the files; return the unfinished last line of each log that has one."""
        return _closed(self._streams.values())

    @property
    def many(self) -> bool:
        """True if the logs that were found are of several ranks."""
        return len({(stream.name[0], stream.name[2]) for stream in self._streams.values()}) > 1

    def _find(self) -> Iterator[tuple[Path, str, int, int]]:
        """List the folders; yield path, replica, generation and rank of each selected
        log."""
        for group in sorted(_folders(self._logs)):
            for replica in _folders(group):
                for generation in self._generations(replica):
                    for path in _entries(replica / f"gen-{generation}"):
                        rank = _RANK.fullmatch(path.name)
                        if rank is not None and self._selection.takes(group.name, replica.name, int(rank[1])):
                            yield path, f"{group.name}/{replica.name}", generation, int(rank[1])

    def _generations(self, replica: Path) -> list[int]:
        """Return the generations to read in a replica's folder: the one that was asked
        for or, if none was, the newest at the first poll and all that follow it."""
        found = _generations(replica)
        if self._selection.generation is not None:
            return [number for number in found if number == self._selection.generation]
        if not self._begun:
            return found[-1:]
        known = [stream.name[1] for path, stream in self._streams.items() if path.parent.parent == replica]
        return [number for number in found if not known or number >= min(known)]

    def _nothing(self) -> UsageError:
        """Return (do not raise) the error that the selection has no log; its hint names
        the replicas that have one."""
        chosen = self._selection
        rank = f", rank {chosen.rank}" if chosen.rank is not None else ""
        generation = f", generation {chosen.generation}" if chosen.generation is not None else ""
        numbers = _generations(self._logs / chosen.target) if chosen.generation and chosen.target else []
        if numbers:
            hint = f"there are logs of: {chosen.target}, generations {numbers[0]} to {numbers[-1]}"
        elif known := _replicas(self._logs):
            hint = f"there are logs of: {known}"
        elif before := _replicas(self._logs.with_name("logs.previous")):
            hint = f"this start has written none yet; --previous shows the last one's, of: {before}"
        else:
            hint = "no program has written one here yet; external programs log elsewhere"
        text = f"there is no log of {chosen.target or 'this run'}{rank}{generation} in {self._logs}"
        return UsageError(text, hint=hint)


def _replicas(logs: Path) -> str:
    """Return the replicas that have a log in this folder, as text."""
    found = (f"{path.parent.name}/{path.name}" for group in _folders(logs) for path in _folders(group))
    return list_text(sorted(map(visible, found)), 8)


def _generations(replica: Path) -> list[int]:
    """Return the generations with a folder in a replica's folder, in order."""
    return sorted(int(path.name[4:]) for path in _folders(replica) if path.name[4:].isdecimal())


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder, by number."""
    return [entry for entry in _entries(path) if entry.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted so that numbers in names count; none if the
    folder is missing."""
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
    except FileNotFoundError:
        return []


def _closed(streams: Iterable[_Stream]) -> list[LogLine]:
    """Close these logs; return the unfinished last line of each that has one."""
    return [_line(stream, rest) for stream in streams if (rest := stream.close())]


def _line(stream: _Stream, text: bytes) -> LogLine:
    """Return ``text``, a line of this log, with its replica, generation and rank."""
    replica, generation, rank = stream.name
    return LogLine(replica=replica, generation=generation, rank=rank, text=text.decode(errors="replace"))

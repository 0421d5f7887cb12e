"""The decision log: one JSON line for each decision, synced before any commit is sent.

Lines are appended and synced. A torn last line (the machine died during the write) had
no effect yet and is ignored. A file larger than :data:`COMPACT_NBYTES` is replaced by a
new file with the fewest decisions that amount to the same. At start the log gives each
channel its ledger (:mod:`replicas.core.base.ledger`).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import time
from pathlib import Path

import msgspec

from replicas import errors
from replicas.common.decoding import MALFORMED
from replicas.core.base.ledger import Decision, Ledger, Past
from replicas.linux import private

COMPACT_NBYTES = 1 << 20


class DecisionLog:
    """The log, on disk, of each channel's decisions (a commit, a label, a lease, ...).

    The decisions are in memory only if ``path`` is None.

    :raises errors.WorldError: another coordinator has the file.
    """

    def __init__(self, path: Path | None) -> None:
        """Create or open the file ``path``, lock and read it; None keeps all in memory.

        The lock is held until :meth:`close`.

        :raises errors.UsageError: the folder or file is not private to this user.
        :raises errors.WorldError: a line is damaged, or another coordinator has the
            file.
        """
        self._path = path
        self._fd = -1
        self._size = 0
        self._named = False
        """True if the file's directory entry is known to survive a power cut."""
        self._ledgers: dict[str, Ledger] = {}
        """What is on disk, by channel."""
        self.term = time.time_ns() // 1_000_000  # differs from that of every earlier coordinator, also without a log
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        """Open and lock the file, read its decisions, and cut off a torn last line.

        :raises errors.UsageError: the folder or file is not private to this user.
        :raises errors.WorldError: a line is damaged, or another coordinator has the
            file.
        """
        self._fd = self._locked(path)
        try:
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            complete = data.rfind(b"\n") + 1
            for number, line in enumerate(data[:complete].splitlines(), 1):
                decision = _decoded(line, number, path)
                self._note(decision)
                self.term = max(self.term, decision.term + 1)  # the clock may have been set back
            os.ftruncate(self._fd, complete)
            self._size = complete
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def _locked(self, path: Path) -> int:
        """Create or open the file, and lock it; return its descriptor.

        The locked file is the one that is at ``path`` now: a file that was replaced
        before it was locked is closed, and the new one opened.

        :raises errors.UsageError: the folder or file is not private to this user.
        :raises errors.WorldError: another coordinator has it, or it cannot be locked.
        """
        while True:
            try:
                fd = private.open_file(path, os.O_RDWR | os.O_CREAT)
            except private.NotPrivate as error:
                text = f"the decision log {path} cannot be written: {error.strerror}: {error.filename}"
                raise errors.UsageError(text, hint=error.hint) from error
            try:
                self._lock(fd, path)
            except BaseException:
                os.close(fd)
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(fd)):  # it may have been replaced before it was locked
                    return fd
            os.close(fd)

    @staticmethod
    def _lock(fd: int, path: Path) -> None:
        """Lock an open file exclusively, without waiting.

        :param path: of the file, for errors.
        :raises errors.WorldError: another coordinator has the lock, or it cannot be
            locked.
        """
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise errors.WorldError(
                f"another coordinator uses the decision log {path}",
                hint="give each coordinator a state_dir of its own, or end the other one first",
            ) from exc
        except OSError as exc:
            raise errors.WorldError(
                f"the decision log {path} cannot be locked: {exc.strerror}", hint="name a state_dir on a local disk"
            ) from exc

    def _note(self, decision: Decision) -> None:
        """Apply a decision to the ledger (the versions and labels of its channel).

        The ledger is in memory; the decision must be on disk already.
        """
        self._ledgers.setdefault(decision.channel, Ledger()).apply(decision)

    def past(self, channel: str, epoch: int = 0) -> Past:
        """Return a copy of a channel's ledger (versions, labels), for its recovery.

        :param epoch: the last epoch in use under an earlier coordinator; returned as
            given.
        """
        return Past(copy.deepcopy(self._ledgers.get(channel, Ledger())), epoch)

    def append(self, decision: Decision) -> None:
        """Write one decision to the log, and wait until it is on the disk; blocks.

        Then add it to the ledger of its channel. Without a file only do the latter. A
        long file is compacted.

        :raises OSError: the write failed; the log is unchanged, and the same decision
            can be appended again.
        """
        if self._fd >= 0:
            line = msgspec.json.encode(decision) + b"\n"
            try:
                if not self._named and self._path is not None:
                    _sync_folder(self._path)
                    self._named = True
                if os.pwrite(self._fd, line, self._size) != len(line):
                    raise OSError(errno.ENOSPC, "only a part of the decision was written")
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._size)  # a part of a line may be there
                raise
            self._size += len(line)
        self._note(decision)
        if self._size > COMPACT_NBYTES:
            self._compact()

    def _compact(self) -> None:
        """Replace the file by a new one with the fewest decisions of the same effect.

        Blocks. The new one is locked and synced before. If that fails, keep the old one
        and raise nothing.
        """
        assert self._path is not None
        lines = b"".join(
            msgspec.json.encode(one) + b"\n" for known in self._ledgers.values() for one in known.decisions()
        )
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            fd = private.open_file(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        except OSError:
            return  # the long file stays valid; the next decision tries again
        try:
            self._lock(fd, beside)
            if os.pwrite(fd, lines, 0) != len(lines):
                raise OSError(errno.ENOSPC, "only a part was written")
            os.fdatasync(fd)
            private.rename(beside, self._path.name)
        except (OSError, errors.WorldError):  # without the lock another coordinator could take the new file
            os.close(fd)
            private.remove(beside)
            return
        os.close(self._fd)
        self._fd, self._size, self._named = fd, len(lines), False  # the new name has yet to be synced

    def close(self, *, remove: bool = False) -> None:
        """Close the log and release its lock. Without a file do nothing.

        :param remove: delete the file, because the run is over.
        """
        if remove and self._path is not None:
            private.remove(self._path)  # while locked: after unlock it may belong to another coordinator
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sync_folder(path: Path) -> None:
    """Wait until the entry of ``path`` in its folder is on the disk; blocks.

    Without it a power cut could bring back an older file of that name.

    :raises OSError: it cannot be synced.
    """
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that cannot sync folders order these writes themselves
            raise
    finally:
        os.close(fd)


def _decoded(line: bytes, number: int, path: Path) -> Decision:
    """Return the decision in one line of the log.

    :param number: of the line, from 1, for the error. :param path: of the log,
        likewise.
    :raises errors.WorldError: the line is damaged.
    """
    try:
        return msgspec.json.decode(line, type=Decision)
    except MALFORMED as exc:
        raise errors.WorldError(
            f"line {number} of the decision log {path} is damaged: {exc}",
            hint="restore the file, or move it away and publish with version= above every number that was used",
        ) from exc

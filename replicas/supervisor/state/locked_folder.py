"""A state folder that one process locks at a time, and shims that outlive the process.

::

    <folder>/lock   flock'ed by the process that has the folder, and by its shims
    <folder>/id     identity of the folder; in the environment of its processes

The shims of a killed process still hold its lock, but end on their own within
:data:`SETTLE_S`. Processes that hold the lock after that (a frozen shim) are killed, if
they certainly belong to a dead owner: each subclass finds them in its own way.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

from replicas import errors
from replicas.linux import locks, private
from replicas.linux.processes import start_time
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.run_state import machine

SETTLE_S = 8.0
"""How long processes of a dead owner may take to end on their own."""
SWEEP_S = 5.0
_LOOK_INTERVAL_S = 0.05
_IDENTITY = re.compile(rb"[0-9a-f]{32}")


class LockedFolder:
    """A state folder that one process at a time has, by a lock.

    :cvar patience_s: how long a dead owner's processes may take to die of SIGKILL.
    :cvar elsewhere: how the user names another folder.
    """

    patience_s: ClassVar[float]
    elsewhere: ClassVar[str]

    def __init__(self, path: Path) -> None:
        """Store the path; make and lock nothing."""
        self.path = path
        self.given_up = threading.Event()
        """Setting it ends the wait for the lock with a WorldError."""
        self._lock: int | None = None

    @property
    def lock(self) -> int:
        """Descriptor of the lock while it is held. Shims inherit it, and so hold it."""
        assert self._lock is not None
        return self._lock

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn an OSError of the block into a UsageError that names a remedy."""
        try:
            yield
        except OSError as error:
            inside = f": {error.filename}" if error.filename not in (None, str(self.path)) else ""
            text = f"cannot use the state folder {self.path}: {error.strerror or error}{inside}"
            mend = error.hint if isinstance(error, private.NotPrivate) else "make that possible"
            raise errors.UsageError(text, hint=f"{mend}, or {self.elsewhere}") from error

    def _lock_folder(self) -> None:
        """Make the folder if it is missing, and lock it. Blocks.

        A dead owner's processes have 8 s to end, then :attr:`patience_s` to die of
        SIGKILL.

        :raises OSError: the folder cannot be made or written.
        :raises replicas.errors.ReplicasError: a living process has the lock, a dead
            owner's processes do not die, or another thread has set the event
            ``given_up``.
        """
        lock = private.open_file(self.path / "lock", os.O_RDWR | os.O_CREAT, make_folder=True)
        try:
            self._wait_for(lock)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _wait_for(self, lock: int) -> None:
        """Wait until this descriptor has the lock; kill a dead owner's processes.

        Looks every 50 ms, in the thread of the caller.

        :param lock: descriptor of the lock file, not locked yet.
        :raises replicas.errors.ReplicasError: a living process has the lock, a dead
            owner's processes do not die, or another thread has set the event
            ``given_up``.
        """
        settled_at = time.monotonic() + SETTLE_S
        while not locks.hold_exclusive(lock):
            owner, late_s = Owner.of(lock), time.monotonic() - settled_at
            if owner.alive or (owner.elsewhere and late_s > 0):
                raise self._taken(owner)
            if late_s > self.patience_s:
                raise self._not_dying(owner, leftovers.lock_holders(self.path / "lock"))
            if late_s > 0:
                self._free(lock)
            if self.given_up.wait(_LOOK_INTERVAL_S):  # the kernel does not announce the end of a flock
                raise errors.WorldError(f"the start of the run in {self.path} was cancelled")

    def _free(self, lock: int) -> None:
        """Kill processes that hold the lock, if their owner is certainly dead.

        Called repeatedly while the lock is held, from :data:`SETTLE_S` on.

        :param lock: this process's descriptor of the lock file.
        """
        raise NotImplementedError

    def _taken(self, owner: Owner) -> errors.ReplicasError:
        """Return the error for a folder that a living process has locked.

        :param owner: the process that the lock file names.
        """
        raise NotImplementedError

    def _not_dying(self, owner: Owner, holders: list[int]) -> errors.ReplicasError:
        """Return the error for a dead owner's processes that survive SIGKILL.

        :param holders: pids of those that still hold the lock.
        """
        raise NotImplementedError

    def _unlock(self) -> None:
        """Close the descriptor of the lock, if it is open; shims may hold theirs."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def identity_of(folder: Path) -> str:
    """Return the id of this state folder, or "" if it has none.

    :raises OSError: it cannot be read.
    """
    try:
        found = private.read(folder / "id").strip()
    except FileNotFoundError:
        return ""
    return found.decode() if _IDENTITY.fullmatch(found) else ""


def give_identity(folder: Path) -> str:
    """Return the id of this state folder; make and write one if it has none.

    The caller has the folder's lock.
    """
    found = identity_of(folder)
    if not found:
        found = secrets.token_hex(16)
        private.replace(folder / "id", found.encode())
    return found


class Owner(NamedTuple):
    """The process that the lock file names; agents write no name.

    :ivar pid: ``unknown`` if no name is written yet, or only shims hold the lock.
    :ivar machine: where the pid is valid; empty in files of older releases.
    """

    pid: str = "unknown"
    start: str = ""
    machine: str = ""
    host: str = ""

    @classmethod
    def this(cls) -> Owner:
        """Return this process as the owner."""
        return cls(str(os.getpid()), str(start_time(os.getpid())), machine(), socket.gethostname() or "?")

    @classmethod
    def of(cls, lock: int) -> Owner:
        """Read the owner from the lock file; an unknown owner if no process is named.

        :param lock: descriptor of the lock file, whose position stays.
        """
        words = os.pread(lock, 512, 0).decode(errors="replace").split()
        if len(words) not in (2, 4) or not all(word.isdigit() for word in words[:2]):
            return cls()
        return cls(*words)

    def line(self) -> bytes:
        """Return the owner as the content of the lock file."""
        return " ".join(self).encode()

    @property
    def elsewhere(self) -> bool:
        """True if the owner is on another machine, or in another pid namespace."""
        return bool(self.machine) and self.machine != machine()

    @property
    def alive(self) -> bool:
        """True if the owner lives; False if it is dead, unknown, or elsewhere."""
        return bool(self.start) and not self.elsewhere and start_time(int(self.pid)) == int(self.start)

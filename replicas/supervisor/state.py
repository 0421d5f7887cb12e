"""The state folder of a run: its lock, the token, the endpoint file and the logs.

::

    <state_dir>/lock            flock'ed by the supervisor and, with it, by every shim; holds the supervisor's pid
    <state_dir>/token           0600; removed at the end
    <state_dir>/endpoint.json   where the control port is; removed at the end
    <state_dir>/logs/<group>/<replica>/gen-<g>/rank-<r>.log
    <state_dir>/logs.previous/  the logs of the run before
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import msgspec

from replicas import errors
from replicas.supervisor.processes import start_time

__all__ = ["AlreadySupervised", "StateDir"]

_SETTLE_S = 10.0
_SETTLE_INTERVAL_S = 0.05


class AlreadySupervised(errors.UsageError):
    """Another supervisor has this run."""

    default_hint = "stop that one, or give this run another name"


class StateDir:
    """The folder, from :meth:`acquire` to :meth:`release`."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self.logs = path / "logs"
        self.token_file = path / "token"
        self.endpoint_file = path / "endpoint.json"
        self._lock: int | None = None

    @property
    def lock(self) -> int:
        """Descriptor of the held lock; a shim inherits it, so that the run stays taken while one lives."""
        assert self._lock is not None
        return self._lock

    def acquire(self) -> None:
        """Take the run. Blocks up to 10 s while shims of a supervisor that is dead clean up behind it.

        :raises AlreadySupervised: another supervisor runs, or processes of a dead one are still there.
        :raises replicas.errors.UsageError: the folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.UsageError(
                f"cannot use the state folder {self.path}: {error.strerror}", hint="set run.state_dir in the config"
            ) from error
        try:
            self._take(lock)
        except BaseException:
            os.close(lock)
            raise
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {start_time(os.getpid())}".encode(), 0)
        self._lock = lock
        self._rotate()

    def _take(self, lock: int) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                owner, alive = _owner(lock)
                if alive:
                    raise AlreadySupervised(
                        f'run "{self.run}" is already supervised by process {owner} ({self.path / "lock"})'
                    ) from None
                if time.monotonic() > deadline:
                    raise AlreadySupervised(
                        f'processes of an earlier supervisor of run "{self.run}" (pid {owner}) are still alive',
                        hint="end them, or give this run another name",
                    ) from None
                time.sleep(_SETTLE_INTERVAL_S)  # nothing announces the end of a flock but taking it

    def _rotate(self) -> None:
        if self.logs.exists():
            previous = self.path / "logs.previous"
            shutil.rmtree(previous, ignore_errors=True)
            self.logs.rename(previous)
        self.logs.mkdir()

    def write(self, *, endpoint: str, token: str) -> None:
        """Publish where the control port is, and the token (mode 0600)."""
        descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(token)
        content = msgspec.json.encode({"endpoint": endpoint, "pid": os.getpid(), "run": self.run})
        scratch = self.endpoint_file.with_suffix(".new")
        scratch.write_bytes(content)
        scratch.rename(self.endpoint_file)

    def release(self) -> None:
        """Remove the token and the endpoint file and let the run go. The logs stay."""
        if self._lock is None:
            return
        self.token_file.unlink(missing_ok=True)
        self.endpoint_file.unlink(missing_ok=True)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)
        self._lock = None

    def log_dir(self, group: str, replica: int, generation: int) -> Path:
        return self.logs / group / str(replica) / f"gen-{generation}"


def _owner(lock: int) -> tuple[str, bool]:
    """Pid in the lock file, as text, and whether that very process is alive."""
    words = os.pread(lock, 64, 0).split()
    if len(words) != 2:
        return "unknown", True  # it has just been taken and not yet been signed
    alive = start_time(int(words[0])) == int(words[1])
    return words[0].decode(), alive

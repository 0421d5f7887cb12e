"""The locked state folder of an agent on a machine without a supervisor.

::

    <state_dir>/lock    flock'ed by the agent and its shims
    <state_dir>/id      identity of the folder; in the environment of its processes
    <state_dir>/token   token that its ranks show to the coordinator (mode 0600)
    <state_dir>/logs/   as in the state folder of a supervisor

An agent that follows a killed one waits for that one's shims to end, kills the slow and
frozen ones, and sweeps remaining processes by the folder's identity.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from replicas import errors
from replicas.common.logs import Log
from replicas.linux import locks, private
from replicas.linux.processes import command_line
from replicas.supervisor.cleanup.sweeping import Sweep, finder
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.locked_folder import SWEEP_S, LockedFolder, Owner, give_identity

log = Log("replicas.agent")

_SAY_INTERVAL_S = 60.0


class AgentFolder(LockedFolder):
    """The locked state folder of an agent on another machine than the supervisor's."""

    patience_s = 300.0
    elsewhere = "name another one with --state-dir"

    def __init__(self, path: Path) -> None:
        """Store the path; make and lock nothing before :meth:`acquire`."""
        super().__init__(path)
        self._made = False
        self._said_at = -math.inf

    def acquire(self) -> str:
        """Lock the folder, kill a dead agent's processes, and return the folder's id.

        Make the folder if needed. Blocks up to about 15 s; longer while shims of a dead
        agent do not die.

        :raises replicas.errors.UsageError: another agent has it, or it is unusable.
        :raises replicas.errors.WorldError: those shims have not died within 5 minutes.
        """
        with self._usable():
            self._made = not self.path.exists()
            self._lock_folder()
        identity = give_identity(self.path)
        leftovers.sweep(None, identity, SWEEP_S)
        private.make_folder(self.path / "logs")
        return identity

    def _free(self, lock: int) -> None:
        """Send SIGKILL to shims of a dead agent that hold the lock. Do not wait.

        The caller repeats this while the lock is held.

        :param lock: our descriptor of the lock file. If no holder is visible, try to
            lock it.
        :raises replicas.errors.UsageError: a living agent, or a process that is not
            visible from here, holds the lock.
        """
        holders = leftovers.lock_holders(self.path / "lock")
        orphans = [pid for pid in holders if leftovers.is_orphan(pid)]
        others = [command_line(pid) for pid in holders if pid not in orphans]
        if any(line and not line.startswith("[") for line in others) or not (holders or locks.hold_exclusive(lock)):
            raise self._taken(Owner())
        if orphans and time.monotonic() - self._said_at > _SAY_INTERVAL_S:
            self._said_at = time.monotonic()
            log.warning("killing processes of an earlier agent (shims) that still lock the state folder: %s", orphans)
        Sweep(finder(lambda: orphans, leftovers.is_orphan)).kill_once()

    def _taken(self, owner: Owner) -> errors.ReplicasError:
        """Return the error for a folder that a living agent has locked.

        :param owner: unused here: an agent's folder does not name its owner.
        """
        return errors.UsageError(f"another agent uses the state folder {self.path} already", hint=self.elsewhere)

    def _not_dying(self, owner: Owner, holders: list[int]) -> errors.ReplicasError:
        """Return the error for a dead agent's processes that survive SIGKILL.

        :param owner: unused here.
        :param holders: pids of those processes, which hold the lock.
        """
        return errors.WorldError(
            f"processes of an earlier agent in {self.path} do not die: {', '.join(map(str, holders))}",
            hint="restart the machine, or name another folder with --state-dir",
        )

    def release(self, *, failed: bool = False) -> None:
        """Remove the token file, and unlock the folder.

        :param failed: the agent's start failed: remove the folder too if
            :meth:`acquire` made it and no log is in it.
        """
        if failed and self._made and not any((self.path / "logs").glob("*")):
            private.remove_tree(self.path)
        with contextlib.suppress(OSError):  # e.g. the disk is read-only by now; the next agent replaces the token
            private.remove(self.path / "token")
        self._unlock()

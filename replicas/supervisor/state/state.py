"""The state folder of a run: lock, identity, token, endpoint, logs, state, leftovers.

::

    <state_dir>/lock             flock'ed by the supervisor and its shims; has its pid
    <state_dir>/id               identity of the folder; stays
    <state_dir>/state.json       state of the run (run_state.py); removed at the end
    <state_dir>/leases           agents that may run without a supervisor (leases.py);
                                 removed when no lease is left
    <state_dir>/events.jsonl     all events, of earlier runs too; and events.jsonl.1
    <state_dir>/decisions.jsonl  the decision log; removed at the end
    <state_dir>/key.pem          key and certificate of the control port; stays
    <state_dir>/token            mode 0600; removed at the end, a resumed run keeps it
                                 (and the others of token_files.py)
    <state_dir>/endpoint.json    address of the control port; removed at the end
    <state_dir>/logs/<group>/<replica>/gen-<g>/rank-<r>.log
    <state_dir>/logs.previous/   the logs of the previous run

The folder and all files made in it belong to the user alone
(:mod:`replicas.linux.private`): files that others have put there are neither trusted
nor written to. A folder that the operator has made may let others read. Its identity is
random, and in the environment of the run's processes. A path does not identify it:
containers that share their processes have the same paths, and a folder that was removed
and made again has the same path as before.

The lock gives a run to one supervisor (:mod:`replicas.supervisor.state.locked_folder`).
A process that holds it after a supervisor's death (a frozen shim) is swept like all
other leftovers, by record and mark.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

import replicas
from replicas import errors
from replicas.common.logs import Log
from replicas.control.exit_codes import PREEMPTED
from replicas.linux import private
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.leases import Lease, Leases
from replicas.supervisor.state.locked_folder import SWEEP_S, LockedFolder, Owner, give_identity
from replicas.supervisor.state.predecessor import Predecessor, find_predecessor
from replicas.supervisor.state.run_state import RunState, Saved
from replicas.supervisor.state.token_files import TokenFiles
from replicas.telemetry.event_log import EventLog, read
from replicas.telemetry.events import LeftoverFound, RunEnded, RunStarted, StateSetAside
from replicas.trust.tokens import Role, Tokens

log = Log("replicas.supervisor")


class AlreadySupervised(errors.UsageError):
    """Another supervisor has locked this run."""

    default_hint = "stop that supervisor, or give this run another name"


class StateDir(LockedFolder):
    """The locked state folder of a run: its id, saved state, tokens, events and logs.

    :param longest_lease_s: the config's longest lease, in seconds; 0 for no leases.
    """

    patience_s = 8.0
    elsewhere = "set run.state_dir in the config"

    def __init__(self, path: Path, run: str, *, longest_lease_s: float = 0.0) -> None:
        """Store the paths in the folder.

        Make, read and lock nothing before :meth:`acquire`.

        :param run: name of the run.
        :param longest_lease_s: the config's longest lease, in seconds; 0 for no leases.
        """
        super().__init__(path)
        self.run = run
        self.logs = path / "logs"
        self.token_file = path / "token"
        self.tokens = TokenFiles(path)
        self.endpoint_file = path / "endpoint.json"
        self.events_file = path / "events.jsonl"
        self.decisions_file = path / "decisions.jsonl"
        self.run_state = RunState(path / "state.json")
        self.leases = Leases(path / "leases")
        self.heritage = Predecessor()
        """Agents, shims and leases of an earlier supervisor, after :meth:`acquire`."""
        self._longest_lease_s = longest_lease_s
        self.saved: Saved | None = None
        """A dead supervisor's state to resume, or None, after :meth:`acquire`."""
        self.identity = ""
        """The id of the folder, after :meth:`acquire`."""
        self.token: str | None = None
        """The token of a run that is resumed, after :meth:`acquire`.

        Programs that other launchers have started still use it.
        """
        self.leftovers: list[LeftoverFound] = []
        """Processes that kept a dead supervisor's lock; :meth:`acquire` killed them."""
        self._left: Saved | None = None
        self._cut_short = False
        self._swept = False

    def acquire(self) -> None:
        """Lock the run, and read a dead supervisor's state into the attributes.

        Its living processes stay until :meth:`sweep`, except those that hold the lock.
        Blocks up to about 15 s, while shims of a dead supervisor clean up.

        :raises AlreadySupervised: another supervisor runs, or processes of a dead one
            survive SIGKILL.
        :raises replicas.errors.UsageError: the folder cannot be made or written.
        """
        with self._usable():
            if self.path.is_dir():
                private.close_to_others(self.path, once_ours="lock")
            self._swept = False
            self._lock_folder()
            with contextlib.ExitStack() as stack:
                stack.callback(self._unlock)
                self._open_state(self.lock)
                stack.pop_all()

    def check(self) -> None:
        """Raise UsageError if :meth:`acquire` could not use the folder; change nothing.

        Does not look whether the folder is locked.
        """
        with self._usable():
            private.check_folder(self.path, once_ours="lock")

    def _open_state(self, lock: int) -> None:
        """Read a dead supervisor's state, and prepare the folder for this process.

        Write this process into the lock file, find the agents and leases to wait for,
        restore the token, and move the logs of the previous run away. Kill no process.

        :param lock: descriptor of the lock file, locked.
        """
        crashed = bool(Owner.of(lock).start)
        self.leases.load()
        os.ftruncate(lock, 0)
        os.pwrite(lock, Owner.this().line(), 0)
        private.remove(self.endpoint_file)
        self.identity = give_identity(self.path)
        self._left = self.saved = self.run_state.load()
        crashed = crashed or self.run_state.set_aside is not None
        if self.saved is not None:
            # The run may have ended in order, and only its state was not removed.
            since = (record.event for record in read(self.events_file, self.saved.seq))
            if any(isinstance(event, RunEnded) and event.exit_code != PREEMPTED for event in since):
                self.saved, crashed = None, False
                private.remove(self.decisions_file)
        # Later starts that failed have cleared the lock file, but left the decisions.
        self._cut_short = crashed or self.decisions_file.exists()
        self.heritage = find_predecessor(self.saved, self.leases, crashed=crashed, longest_s=self._longest_lease_s)
        # Replace an unreadable file only now, when the leases to wait for are known.
        if not self.heritage.is_newest:
            unseen = [msgspec.structs.replace(one, unseen=True) for one in self.heritage.unseen]
            self.leases.raise_floor(unseen, used=self.saved.generations if self.saved is not None else 0)
        elif not self.leases.found:
            self.leases.write_starts()
        if self.resumed:
            with contextlib.suppress(FileNotFoundError):
                token = private.read(self.token_file).decode(errors="replace")
                self.token = token if token.isascii() and token.isprintable() and token else None
        if self.token is None:
            self.tokens.remove()
        goes_on = self.heritage.known is not None
        if not goes_on and self.logs.exists() and any(self.logs.iterdir()):  # a failed start leaves an empty folder
            previous = self.path / "logs.previous"
            private.remove_tree(previous)
            private.rename(self.logs, previous.name)
        private.make_folder(self.logs)

    def sweep(self, spare: Collection[int] = (), kept: Collection[str] = ()) -> list[LeftoverFound]:
        """Kill a dead supervisor's processes, except ``spare``. Blocks up to 5 s.

        To be called when the start cannot fail: a failed start kills no process. Return
        the processes, with ``swept`` False for those that are still there.

        :param spare: pids to leave alone.
        :param kept: marks of shims to keep, with their processes.
        """
        found = leftovers.sweep(self._left, self.identity, SWEEP_S, spare=spare, kept=kept)
        if self._left is not None and self.saved is None:
            self.run_state.remove()
        return found

    def _free(self, lock: int) -> None:
        """Kill, once, the processes that a dead supervisor's state names.

        Some of them hold the lock. Another supervisor may lock the folder at any
        moment: the state counts only if its writer is dead.

        :param lock: unused here.
        """
        saved = None if self._swept else self.run_state.peek()
        self._swept = True
        if saved is None or saved.supervisor is None or not saved.of_this_machine() or saved.supervisor.alive():
            return
        self.leftovers += leftovers.sweep(saved, "", SWEEP_S)

    def _taken(self, owner: Owner) -> AlreadySupervised:
        """Return the error for a folder that another supervisor has locked.

        :param owner: that supervisor, as the lock file names it.
        """
        lock = self.path / "lock"
        if owner.alive:
            return AlreadySupervised(f'run "{self.run}" is already supervised by process {owner.pid} ({lock})')
        return AlreadySupervised(
            f'run "{self.run}" is supervised by process {owner.pid} on host "{owner.host}", or processes of it '
            f"still run there ({lock} is shared with that host)",
            hint="stop that supervisor there, or give this run another name or another run.state_dir",
        )

    def _not_dying(self, owner: Owner, holders: list[int]) -> AlreadySupervised:
        """Return the error for a dead supervisor's processes that survive SIGKILL.

        :param owner: the dead supervisor. :param holders: pids of those processes.
        """
        return AlreadySupervised(
            f'processes of an earlier supervisor of run "{self.run}" (pid {owner.pid}) are still alive: '
            f"{', '.join(map(str, holders)) or 'not visible from here'}",
            hint="end them, or give this run another name",
        )

    @property
    def resumed(self) -> bool:
        """True if this run was under way before, even if its state is bad or lost.

        A run that ended in order is not resumed, even if it left a lease.
        """
        lost = self._cut_short and bool(self.heritage.unseen)
        return self.saved is not None or self.run_state.set_aside is not None or lost

    def open_events(self, max_nbytes: int) -> EventLog:
        """Open and return the run's event log, after a dead supervisor's events.

        Append events to it: RunStarted, a state that was set aside, and the processes
        that :meth:`acquire` has killed.

        :param max_nbytes: size at which the file of events is rotated.
        """
        saved = self.saved
        events = EventLog(
            self.events_file,
            max_nbytes=max_nbytes,
            tally=saved.tally if saved is not None else None,
            seq=saved.seq if saved is not None else 0 if self.resumed else None,
        )
        events.emit(RunStarted(run=self.run, pid=os.getpid(), version=replicas.__version__, resumed=self.resumed))
        if self.run_state.set_aside is not None:
            path, reason = self.run_state.set_aside
            events.emit(StateSetAside(path=str(path), reason=reason))
        for leftover in self.leftovers:
            events.emit(leftover)
        return events

    def write(self, *, endpoint: str, tokens: Tokens, socket: Path | None = None) -> None:
        """Write the files of tokens, and the addresses of control port and socket.

        :param endpoint: ``host:port`` of the control port.
        :param socket: path of the run's Unix socket.
        :raises replicas.errors.WorldError: writing failed.
        """
        where = {"endpoint": endpoint, "pid": os.getpid(), "run": self.run, "socket": str(socket or "")}
        with self._writing():
            self.tokens.write(tokens)
            private.replace(self.endpoint_file, msgspec.json.encode(where))

    def change_tokens(self, tokens: Tokens, role: Role, change: Callable[[Tokens], None]) -> None:
        """Apply ``change`` to the tokens: on disk first, and then in force.

        :param tokens: the tokens in force, which are changed in place.
        :param role: whose token changes.
        :param change: changes a copy of the tokens.
        :raises replicas.errors.WorldError: writing failed; no token has changed.
        """
        with self._writing():
            self.tokens.change(tokens, role, change)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError of the block into a WorldError with a remedy."""
        try:
            yield
        except OSError as error:
            raise errors.WorldError(
                f"cannot write to the state folder {self.path}: {error.strerror or error}",
                hint="make room on its disk, or set run.state_dir in the config",
            ) from error

    def release(self, *, ended: bool = False, left: tuple[Lease, ...] | None = None) -> None:
        """Remove the endpoint file, and the token if the run has ended; unlock.

        Does nothing if the folder is not locked.

        :param ended: True if the run ended in order, and the next start is a new run:
            remove its state, too. Otherwise (it could not be started, or was preempted)
            the next supervisor resumes from the state.
        :param left: leases under which replicas may run; None keeps those on disk.
        """
        if self._lock is None:
            return
        try:
            if ended and not left:
                self.leases.remove()
            elif left is not None:
                self._write_leases(left, ended=ended)
            if ended:
                self.run_state.remove()
            if self.run_state.peek() is None:  # no supervisor will resume it
                self.tokens.remove()
            private.remove(self.endpoint_file)
            os.ftruncate(self._lock, 0)
        finally:
            self._unlock()

    def _write_leases(self, left: tuple[Lease, ...], *, ended: bool) -> None:
        """Write these leases; log a warning if that fails.

        :param left: leases of agents that may still run.
        :param ended: True if the run ended in order: then also number all generations
            of later runs above those of this one.
        """
        try:
            if ended:
                self.leases.raise_floor(left)
            else:
                self.leases.write(left)
        except OSError as error:  # the next start then also waits for leases that are over
            log.warning("leaving %s, which may delay the next start: %s", self.leases.path, error.strerror or error)

    def log_dir(self, group: str, replica: int, generation: int) -> Path:
        """Return the path of a generation's folder of logs; it may not exist yet."""
        return self.logs / group / str(replica) / f"gen-{generation}"

"""The state of a run that survives its supervisor: ``<state_dir>/state.json``.

The file is replaced as a whole, always *before* the action: a restart is saved as spent
before the generation starts, the mark of a shim before the shim starts. So a supervisor
that is killed at any moment leaves a file that never allows too many restarts, and that
names every living shim.

The file exists while a run is under way; a run that ends in order removes it. A start
that finds a file resumes where the dead supervisor stopped: sizes, generations, budgets
(by the time of day, as a monotonic clock restarts with its machine), and the counters
up to an event whose successors are in ``events.jsonl``. Versions are in the decision
log, which has its own file and rules (:mod:`replicas.coordinator.decisions`).

A file of another schema, or a torn one, is moved to ``state.json.bad`` and reported; it
is never fatal. A full or failing disk is not fatal either: replicas run on, orders that
change the state are refused, and generations start when writing works again. The file
is not synced for every change: :mod:`replicas.supervisor.state.leases` detects a state
that is old after a crash of the machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from replicas.common.decoding import MALFORMED
from replicas.common.logs import Log
from replicas.common.reason import Reason
from replicas.core.lives.lifecycle import RestartReason
from replicas.core.lives.placement import Share
from replicas.linux import private
from replicas.linux.processes import boot_id, namespace, start_time
from replicas.telemetry.tally import Tally

log = Log("replicas.supervisor")

SCHEMA = 1
"""Raise it when a field changes its meaning, or a histogram of the tally its bounds."""


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process on the machine and boot that :attr:`Saved.machine` names."""

    pid: int
    start_time: int

    def alive(self) -> bool:
        """Return True if this very process lives; for records of this machine only."""
        return start_time(self.pid) == self.start_time


class ShimRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One shim that was started, or (``process`` None) was about to be.

    :ivar nonce: the mark in the environment of all its processes.
    :ivar agent: the node whose agent started it.
    :ivar gpus: its GPUs of that node; ``memory_nbytes``: its share of the memory.
    """

    nonce: str
    group: str
    replica: int
    generation: int
    node: int = 0
    process: ProcessRecord | None = None
    cgroup: str = ""
    agent: str = ""
    gpus: tuple[str, ...] = ()
    memory_nbytes: int = 0

    @property
    def share(self) -> Share:
        """The share (GPUs, memory) of its node that the shim's processes hold."""
        return Share(group=self.group, node=self.agent, gpus=self.gpus, memory_nbytes=self.memory_nbytes)


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The agent of a node.

    :ivar process: valid only on its machine.
    :ivar draining: True if the node is being drained, or is, and takes no replicas.
    :ivar scope: where its pids are valid (:func:`machine`).
    :ivar lease_s: how long it may run without a supervisor.
    :ivar elsewhere: marks of shims of an earlier agent with this name on another
        machine, whose lease may not be over yet.
    """

    node: str
    incarnation: str
    local: bool = False
    process: ProcessRecord | None = None
    draining: bool = False
    scope: str = ""
    lease_s: float = 0.0
    elsewhere: tuple[str, ...] = ()


class SavedRestart(msgspec.Struct, frozen=True):
    """One restart of a group's budget. ``at``: seconds since 1970."""

    at: float
    replica: int


class Cause(msgspec.Struct, frozen=True):
    """Why a generation ends; ``reason`` labels the restart that follows."""

    reason: RestartReason
    text: str


class SavedReplica(msgspec.Struct, frozen=True, kw_only=True):
    """The saved state of a replica.

    :ivar generation: the last one that was started, or was about to be.
    :ivar cycles: restarts in a row without progress.
    :ivar halted: True if it was stopped by hand, and rests until it is restarted.
    :ivar settled: ``finished``, ``failed`` or empty. A supervisor that adopts the run
        keeps it; otherwise all replicas start again.
    :ivar start: digest of its start settings.
    :ivar ending: why its generation was being ended, if another generation follows.
    """

    generation: int = 0
    restarts: dict[str, int] = {}
    cycles: int = 0
    last_exit: str = ""
    halted: bool = False
    settled: Literal["", "finished", "failed"] = ""
    start: str = ""
    ending: Cause | None = None


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The saved state of a group.

    :ivar spent: the restarts in the budget's window.
    :ivar configured: the config's number of replicas. A config with another number
        overrides ``size``.
    """

    size: int
    configured: int = 0
    replicas: dict[int, SavedReplica] = {}
    spent: tuple[SavedRestart, ...] = ()

    @property
    def once_removed(self) -> SavedGroup:
        """The state to keep of a removed group: only its numbers of generations.

        So a later group of its name has new folders of logs.
        """
        used = {index: SavedReplica(generation=one.generation) for index, one in self.replicas.items()}
        return SavedGroup(size=0, replicas=used)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One saved state of a run.

    :ivar machine: where the process records are valid (:func:`machine`).
    :ivar supervisor: the process that wrote it.
    :ivar seq: number of the last event that ``tally`` has counted.
    :ivar helpers: processes of the run that belong to no replica, such as the store.
    :ivar agents: agents of the run's nodes.
    :ivar port: the control port, at which members and agents look for a supervisor.
    :ivar draining: why the whole run was being drained; empty if it was not.
    :ivar starts: number of started generations, as in the file of leases.
    """

    schema: int = SCHEMA
    run: str
    machine: str = ""
    supervisor: ProcessRecord | None = None
    at: float = 0.0
    seq: int = 0
    tally: Tally = msgspec.field(default_factory=Tally)
    groups: dict[str, SavedGroup] = {}
    shims: tuple[ShimRecord, ...] = ()
    helpers: tuple[ProcessRecord, ...] = ()
    agents: tuple[AgentRecord, ...] = ()
    port: int = 0
    draining: str = ""
    starts: int = 0

    def of_this_machine(self) -> bool:
        """Return True if its process records are valid: same boot and namespace."""
        return self.machine == machine()

    @property
    def generations(self) -> int:
        """The highest number of a generation of any replica; 0 if there is none."""
        return max((one.generation for group in self.groups.values() for one in group.replicas.values()), default=0)

    @property
    def agent(self) -> ProcessRecord | None:
        """The process of this machine's agent, or None if it does not live."""
        records = [one.process for one in self.agents if one.local and one.scope == machine()]
        return next((one for one in records if one is not None and one.alive()), None)


class _Head(msgspec.Struct):
    schema: int


class RunState:
    """``<state_dir>/state.json``, for the supervisor that holds the run's lock."""

    def __init__(self, path: Path) -> None:
        """Store the path of the file; read and write nothing."""
        self.path = path
        self.set_aside: tuple[Path, str] | None = None
        """New path of an unusable file that :meth:`load` has moved, and the reason."""
        self._problem = ""

    @property
    def problem(self) -> Reason | None:
        """Why the last write failed, for people, or None if it worked."""
        return f"{self.path}: {self._problem}" if self._problem else None

    def peek(self) -> Saved | None:
        """Read the state without the run's lock; return None if it is not valid.

        Changes nothing, unlike :meth:`load`.
        """
        try:
            return decode(private.read(self.path))
        except (OSError, ValueError):
            return None

    def load(self) -> Saved | None:
        """Return the state that a dead supervisor left; None without a valid file.

        A file that is not valid is renamed, logged, and noted in :attr:`set_aside`.
        """
        try:
            return decode(private.read(self.path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        bad = self.path.with_name(f"{self.path.name}.bad")
        log.error("moving the unusable state file %s to %s: %s", self.path, bad.name, reason)
        private.rename(self.path, bad.name)
        self.set_aside = bad, reason
        return None

    def save(self, saved: Saved, *, sync: bool = False) -> bool:
        """Replace the state file. Return False if writing fails; the run continues.

        A failure is logged, once for each reason, and kept as :attr:`problem`. Blocks.

        :param sync: also sync the disk, so that the state survives a crash of the
            machine.
        """
        try:
            private.replace(self.path, msgspec.json.encode(saved), sync=sync)
        except OSError as error:
            words = error.strerror or str(error)
            if words != self._problem:
                self._problem = words
                log.error("starting no replica until the run's state can be written to %s: %s", self.path, words)
            return False
        if self._problem:
            log.warning("starting replicas again: the run's state can be written to %s", self.path)
        self._problem = ""
        return True

    def remove(self) -> None:
        """Remove the state file, and a half-written new one."""
        private.remove(self.path)
        private.remove(self.path.with_name(f"{self.path.name}.new"))


def decode(data: bytes) -> Saved:
    """Decode the content of a state file.

    :raises ValueError: it is not a state of this schema.
    """
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
    except MALFORMED as error:
        raise ValueError(f"it is torn or not a state: {error}") from None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {schema}, this version knows {SCHEMA}")
    try:
        return msgspec.json.decode(data, type=Saved)
    except MALFORMED as error:
        raise ValueError(f"it is damaged: {error}") from None


def machine() -> str:
    """Return the scope in which a pid is valid: the boot and the pid namespace."""
    return f"{boot_id()}/{namespace('pid')}"


def this_process() -> ProcessRecord:
    """Return the record (pid and start time) of this process."""
    found = process_record(os.getpid())
    assert found is not None
    return found


def process_record(pid: int) -> ProcessRecord | None:
    """Return pid and start time of a process, or None if it is gone."""
    started = start_time(pid)
    return None if started is None else ProcessRecord(pid, started)

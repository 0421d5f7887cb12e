"""The checks of a machine for ``replicas doctor``, for the command and for agents.

They look for leftovers of dead runs, GPUs, limits and disk space, and change nothing.
Each check yields :class:`Finding` values: *ok*, a *note* (allowed, but worth knowing),
or a *problem* with its remedy.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, Self

import msgspec

from replicas.common.sizes import size_text
from replicas.config.structs import Config, LogsConfig
from replicas.linux import cgroups
from replicas.linux.files import kernel_lines
from replicas.linux.needs import CALLS, missing
from replicas.linux.processes import descendants
from replicas.linux.smi import gpu_processes
from replicas.supervisor.agent.machine import Machine, inspect_machine
from replicas.supervisor.state import leftovers
from replicas.supervisor.state.locked_folder import identity_of
from replicas.supervisor.state.run_state import RunState

_SMI_TIMEOUT_S = 5.0
_DISK_NBYTES = 1 << 30
_FILES_BASE, _FILES_EACH = 256, 16
"""Descriptors of a supervisor or agent: a base, and more for each replica and rank.

The base is for a supervisor's pages and the sessions of ranks elsewhere.
"""
_PROCESSES_EACH = 16


class Finding(msgspec.Struct, frozen=True):
    """Result of one check of a machine by ``replicas doctor``.

    :ivar about: name of the check.
    :ivar remedy: for a problem or a note.
    :ivar node: name of the node; empty for the machine of the caller.
    """

    about: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""
    node: str = ""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Needs of a run on one machine: its replicas plus ranks, and bytes of logs."""

    processes: int = 0
    log_nbytes: int = 0

    @classmethod
    def of(cls, logs: LogsConfig, *, replicas: int, ranks: int) -> Self:
        """Return the demand (processes, bytes of logs) of replicas on one machine.

        :param logs: how large logs may grow, and how many generations of them are kept.
        :param replicas: how many; each has one shim here.
        :param ranks: how many, in all of them.
        """
        each = logs.keep_generations * (logs.keep + 1) * logs.max_nbytes
        return cls(processes=replicas + ranks, log_nbytes=2 * ranks * each)  # of this run and the previous one

    @classmethod
    def of_all(cls, config: Config) -> Self:
        """Return the demand (processes, bytes of logs) if all groups run here."""
        groups = config.groups.values()
        ranks = sum(group.replicas * group.world_size for group in groups)
        return cls.of(config.logs, replicas=sum(group.replicas for group in groups), ranks=ranks)


def family(*roots: int) -> frozenset[int]:
    """Return these processes and all of their descendants, by pid; skip pid 0."""
    return frozenset(pid for root in roots if root for pid in (root, *descendants(root)))


def examine_node(state_dir: Path, supervisor: int, demand: Demand) -> tuple[Finding, ...]:
    """Return the findings of an agent on its machine. Blocks; seconds with GPUs.

    :param state_dir: the agent's state folder.
    :param supervisor: pid of the supervisor; 0 if it is on another machine.
    :param demand: the needs of the run on this machine.
    """
    try:
        return tuple(examine_machine(inspect_machine(), state_dir, family(os.getpid(), supervisor), demand))
    except OSError as error:
        text = f"this node's machine cannot be examined: {error}"
        return (Finding("node", "problem", text, "make that possible, or run `replicas doctor` there"),)


def examine_machine(
    machine: Machine, state_dir: Path | None, ours: Collection[int], demand: Demand
) -> Iterator[Finding]:
    """Yield the findings of all checks that need no config. Change nothing.

    :param state_dir: a state folder, searched for leftovers and free space; None to
        skip these checks.
    :param ours: pids of the run's processes; empty if it does not run.
    :param demand: the needs of the run on this machine.
    """
    if state_dir is not None:
        yield from _leftovers(state_dir, ours)
    yield from _gpus(machine, ours)
    yield from _limits(machine, demand)
    if state_dir is not None:
        yield from _disk(state_dir, demand)


def _leftovers(state_dir: Path, ours: Collection[int]) -> Iterator[Finding]:
    """Yield a problem for each living process of a dead run in this state folder.

    Yield one ok if there is none.

    :param ours: pids of the living run, which are left out.
    """
    found = leftovers.find(RunState(state_dir / "state.json").peek(), identity_of(state_dir))
    remedy = "none needed: the next start of this run kills this process"
    if ours:
        found = [one for one in found if one.pid not in ours]  # a run without a state file finds itself
        remedy = "end this process by hand: an earlier supervisor or agent of this run has left it"
    for one in found:
        whose = f" of {one.group}/{one.replica}, generation {one.generation}" if one.group else ""
        text = f"process {one.pid}{whose} (found by its {one.how}): {one.command}"
        yield Finding("leftovers", "problem", text, remedy)
    if not found:
        yield Finding("leftovers", "ok", "no process of a dead supervisor of this run")


def _gpus(machine: Machine, ours: Collection[int]) -> Iterator[Finding]:
    """Yield findings on the GPUs and the processes that use them. Blocks up to 5 s.

    :param ours: pids of this run, whose use of a GPU is ok.
    """
    if not machine.gpus:
        yield Finding("gpus", "ok", f"none ({machine.gpus_from or 'no driver'})")
        return
    yield Finding("gpus", "ok", f"{len(machine.gpus)}, says {machine.gpus_from}")
    try:
        holders = gpu_processes(_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("gpus", "note", f"their processes cannot be listed: {error}")
        return
    for pid, gpu, used, command in holders:
        whose = "this run's" if pid in ours else "not of this run"
        text = f"{used} MiB on {gpu} are held by process {pid} ({whose}): {command}"
        yield Finding("gpus", "ok" if pid in ours else "note", text)


def _limits(machine: Machine, demand: Demand) -> Iterator[Finding]:
    """Yield findings on limits of files and processes, and on kernel features.

    :param demand: the needs of the run on this machine. A finding is a problem if a
        limit is too low for them.
    """
    many = demand.processes
    yield _limit("open files", resource.RLIMIT_NOFILE, _FILES_BASE + _FILES_EACH * many, "-n")
    yield _limit("processes", resource.RLIMIT_NPROC, _PROCESSES_EACH * many, "-u")
    if (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        text = f"files of {size_text(most)} allowed, and memory for weights counts as a file"
        yield Finding("limits", "note", text, "ulimit -f unlimited")
    lacks = list(missing())
    for one in lacks:
        yield Finding("limits", "problem", one.what, one.remedy)
    if not lacks:
        yield Finding("limits", "ok", f"{', '.join(CALLS)} work")
    try:
        yield Finding("limits", "ok", f"control groups can be made in {cgroups.find_own()}")
    except OSError as error:
        text = f"control groups cannot be made ({error.strerror}); processes of a replica are found by other means"
        yield Finding("limits", "note", text)
    if machine.limits_refused:
        yield Finding("limits", "note", f"memory and max_processes cannot be enforced: {machine.limits_refused}")
    else:
        yield Finding("limits", "ok", "memory and max_processes can be enforced")
    yield Finding("limits", "ok", f"{size_text(_available_nbytes())} of memory are free")


def _limit(name: str, which: int, needed: int, option: str) -> Finding:
    """Check a resource limit of this process, and return the finding.

    :param name: of the resource, for people.
    :param which: its number, one of ``resource.RLIMIT_*``.
    :param needed: the soft limit that suffices.
    :param option: of ``ulimit``, for the remedy.
    """
    soft, hard = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        many = "any number of" if soft == resource.RLIM_INFINITY else str(soft)
        return Finding("limits", "ok", f"{many} {name} allowed")
    remedy = f"ulimit {option} {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = f"raise the hard limit ({hard}) in limits.conf or the systemd unit"
    return Finding("limits", "problem", f"{soft} {name} allowed, {needed} may be needed", remedy)


def _available_nbytes() -> int:
    """Return the available memory of the machine, or 0 if unknown."""
    for line in kernel_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _disk(state_dir: Path, demand: Demand) -> Iterator[Finding]:
    """Yield findings on the space for logs where the state folder is or will be.

    :param demand: has the most bytes that the run's logs may take.
    """
    folder = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding(
            "disk", "problem", f"{folder} cannot be written", "name another state folder, or change its owner"
        )
    elif free < _DISK_NBYTES:
        text = f"{size_text(free)} are free for logs in {folder}"
        yield Finding("disk", "problem", text, "make room, or name another state folder")
    else:
        yield Finding("disk", "ok", f"{size_text(free)} are free for logs in {folder}")
    if demand.log_nbytes > free:
        text = f"all logs together may take up to {size_text(demand.log_nbytes)}, and {size_text(free)} are free in {folder}"
        remedy = "lower logs.max_size, logs.keep or logs.keep_generations, or make room; ranks run on without it"
        yield Finding("disk", "note", text, remedy)

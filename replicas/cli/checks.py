"""The checks of ``replicas doctor``: leftovers of dead runs, ports, GPUs, limits, disk.

Nothing is changed, and no supervisor has to run. Each check gives :class:`Finding`
values: *ok*, a *note* (allowed, but worth knowing), or a *problem* with its remedy.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from replicas import errors
from replicas.cli.find_run import ENDPOINT_FILE, NotTrusted, read_endpoint, trusted
from replicas.cli.render import size_text
from replicas.config.structs import Config
from replicas.control.socket import SOCKET_FILE
from replicas.linux import cgroups
from replicas.linux.processes import descendants, start_time
from replicas.linux.smi import gpu_processes
from replicas.linux.sockets import listeners
from replicas.supervisor.cleanup import leftovers
from replicas.supervisor.cleanup.inventory import Belongings
from replicas.supervisor.cleanup.still_held import held
from replicas.supervisor.fleet.resources import Machine, look, notes, problems
from replicas.supervisor.state.run_state import RunState
from replicas.supervisor.state.state import identity_of
from replicas.trust.tokens import OPERATOR_FILE

__all__ = ["Finding", "examine"]

_SMI_TIMEOUT_S = 5.0
_DISK_NBYTES = 1 << 30
_FILES_BASE, _FILES_EACH = 256, 16
"""Descriptors of a supervisor: a base, and more for each replica and rank.

The base is for its pages and the sessions of ranks elsewhere.
"""
_PROCESSES_EACH = 16


class Finding(msgspec.Struct, frozen=True):
    """Result of a check. ``about``: which check. ``remedy``: for a problem."""

    about: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def examine(config: Config | None, state_dir: Path | None) -> Iterator[Finding]:
    """Run all checks, from the run to the machine. Blocks: with GPUs some seconds.

    :param config: of the run, if known. :param state_dir: of the run, if it has one.
    """
    machine = look()
    supervisor = None
    if state_dir is not None:
        try:
            trusted(state_dir)
        except NotTrusted as error:
            yield Finding("run", "problem", error.message, "run this as its owner, or remove it")
            state_dir = None
    if state_dir is not None:
        supervisor = _supervisor(state_dir)
        yield _run(state_dir, supervisor)
        yield from _leftovers(state_dir, supervisor)
    if config is not None:
        yield from _plan(config, machine)
        yield from _ports(config, supervisor)
    yield from _gpus(machine, supervisor)
    yield from _limits(config, machine)
    if state_dir is not None:
        yield from _disk(state_dir, config)


def _supervisor(state_dir: Path) -> int | None:
    try:
        pid = read_endpoint(state_dir).pid
    except errors.Disconnected:
        return None
    holders = leftovers.lock_holders(state_dir / "lock") if (state_dir / "lock").exists() else []
    return pid if pid in holders and start_time(pid) is not None else None


def _run(state_dir: Path, supervisor: int | None) -> Finding:
    if supervisor is not None:
        return Finding("run", "ok", f"supervised by process {supervisor}, state in {state_dir}")
    stale = [name for name in (ENDPOINT_FILE, "token", OPERATOR_FILE, SOCKET_FILE) if (state_dir / name).exists()]
    if not stale:
        return Finding("run", "ok", f"not running, state in {state_dir}")
    text = f"its supervisor was killed; it left {', '.join(stale)} in {state_dir}"
    return Finding("run", "note", f"{text}: the next start replaces them and goes on")


def _leftovers(state_dir: Path, supervisor: int | None) -> Iterator[Finding]:
    found = leftovers.find(RunState(state_dir / "state.json").peek(), identity_of(state_dir))
    remedy = "the next start of this run kills it"
    if supervisor is not None:
        ours = set(descendants(supervisor))  # the state file, which names them, may never have been written
        found = [one for one in found if one.pid not in ours]
        remedy = "it is of an earlier supervisor of this run; end it by hand"
    for one in found:
        whose = f" of {one.group}/{one.replica}, generation {one.generation}" if one.group else ""
        text = f"process {one.pid}{whose} (found by its {one.how}): {one.command}"
        yield Finding("leftovers", "problem", text, remedy)
    if not found:
        yield Finding("leftovers", "ok", "no process of a dead supervisor of this run")


def _plan(config: Config, machine: Machine) -> Iterator[Finding]:
    found = problems(config, machine)
    for problem in found:
        yield Finding("plan", "problem", problem, "change the config, or the machine")
    for note in notes(config, machine):
        yield Finding("plan", "note", note)
    if not found:
        gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
        has = f"{gpus}, {machine.cpus} CPUs and {size_text(machine.memory_nbytes)} for this process"
        yield Finding("plan", "ok", f"it fits this machine, which has {has}")


def _ports(config: Config, supervisor: int | None) -> Iterator[Finding]:
    wanted = [
        ("control.listen", config.control.host, config.control.port),
        ("store", config.store.bind, config.store.port),
    ]
    listening = [one for one, _ in listeners()]
    ours = () if supervisor is None else tuple(f"process {pid} (" for pid in (supervisor, *descendants(supervisor)))
    for key, host, port in wanted:
        found = [held([Belongings(ports=(one,))]) for one in listening if one.port == port]
        holders = [one[0].holder if one else "a process that has just ended" for one in found]
        if not port:
            yield Finding("ports", "ok", f"{key}: any free one")
        elif not holders:
            yield Finding("ports", "ok", f"{key}: {host}:{port} is free")
        elif all(holder.startswith(ours) for holder in holders):
            yield Finding("ports", "ok", f"{key}: {host}:{port} is this run's")
        else:
            text = f"{key}: {host}:{port} is held by {', '.join(sorted(set(holders)))}"
            yield Finding("ports", "problem", text, "end that process, or choose another port (0: any free one)")


def _gpus(machine: Machine, supervisor: int | None) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("gpus", "ok", f"none ({machine.gpus_from or 'no driver'})")
        return
    yield Finding("gpus", "ok", f"{len(machine.gpus)}, says {machine.gpus_from}")
    ours = set(descendants(supervisor)) if supervisor is not None else set()
    try:
        holders = gpu_processes(_SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("gpus", "note", f"who uses them cannot be told: {error}")
        return
    for pid, gpu, used, command in holders:
        whose = "this run's" if pid in ours else "not of this run"
        text = f"{used} MiB on {gpu}: process {pid}, {whose}: {command}"
        yield Finding("gpus", "ok" if pid in ours else "note", text)


def _limits(config: Config | None, machine: Machine) -> Iterator[Finding]:
    groups = config.groups.values() if config is not None else ()
    many = sum(group.replicas * (1 + group.world_size) for group in groups)
    yield _limit("open files", resource.RLIMIT_NOFILE, _FILES_BASE + _FILES_EACH * many, "-n")
    yield _limit("processes", resource.RLIMIT_NPROC, _PROCESSES_EACH * many, "-u")
    for name, test, remedy in (
        ("pidfd_open", partial(os.pidfd_open, os.getpid()), "a kernel from 5.3 on, or a container that allows it"),
        ("memfd_create", partial(os.memfd_create, "replicas-doctor"), "a container that allows it"),
    ):
        try:
            os.close(test())
        except OSError as error:
            yield Finding("limits", "problem", f"{name} is refused: {error.strerror}", remedy)
        else:
            yield Finding("limits", "ok", f"{name} works")
    try:
        yield Finding("limits", "ok", f"control groups can be made in {cgroups.find_own()}")
    except OSError as error:
        text = f"no control groups: {error.strerror}; what a replica leaves is found by descent and by its mark"
        yield Finding("limits", "note", text)
    if machine.limits_refused:
        yield Finding("limits", "note", f"memory and max_processes cannot be enforced: {machine.limits_refused}")
    else:
        yield Finding("limits", "ok", "memory and max_processes can be enforced")
    yield Finding("limits", "ok", f"{size_text(_available_nbytes())} of memory are free")


def _limit(name: str, which: int, needed: int, option: str) -> Finding:
    soft, hard = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        many = "any number of" if soft == resource.RLIM_INFINITY else str(soft)
        return Finding("limits", "ok", f"{many} {name} allowed")
    remedy = f"ulimit {option} {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = f"raise the hard limit ({hard}) in limits.conf or the systemd unit"
    return Finding("limits", "problem", f"{soft} {name} allowed, {needed} may be needed", remedy)


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _disk(state_dir: Path, config: Config | None) -> Iterator[Finding]:
    folder = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "problem", f"{folder} cannot be written", "set run.state_dir, or change its owner")
    elif free < _DISK_NBYTES:
        text = f"{size_text(free)} are free for logs in {folder}"
        yield Finding("disk", "problem", text, "make room, or set run.state_dir")
    else:
        yield Finding("disk", "ok", f"{size_text(free)} are free for logs in {folder}")
    groups = () if config is None else config.groups.values()
    each = 0 if config is None else config.logs.keep_generations * (config.logs.keep + 1) * config.logs.max_nbytes
    most = 2 * sum(group.replicas * group.world_size for group in groups) * each  # of this run and the previous one
    if most > free:
        text = f"all logs together may take up to {size_text(most)}, and {size_text(free)} are free in {folder}"
        remedy = "lower logs.max_size, logs.keep or logs.keep_generations, or make room; ranks go on when it is full"
        yield Finding("disk", "note", text, remedy)

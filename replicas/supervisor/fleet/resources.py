"""Assign GPUs and CPU threads to replicas, and check that a plan fits the machine.

Theory of operation
===================

A *plan* is what a config asks for. :func:`problems` compares it with a
:class:`~replicas.supervisor.fleet.machine.Machine`. Groups may run at the same time
unless one starts after the other has finished (``depends_on = ["other:finished"]``,
directly or through others), so the greatest sum over such groups counts. A plan
that does not fit is refused by ``replicas check``, at the start, and by a reload; a
scale by the supervisor.

:class:`Resources` is the ledger of the GPUs. A replica takes all its GPUs before it
starts, or waits in ``pending``; it keeps them across restarts, and releases them when
it has settled (finished, failed, or scaled away) and no process of it is left. In a run
in which any group asks for GPUs, a group that does not ask sees none: so no GPU has two
owners. Every rank of a node sees all GPUs of its node, in order: rank ``LOCAL_RANK``
has those from ``LOCAL_RANK * gpus`` on.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicas import errors
from replicas.config.structs import Config, GroupConfig
from replicas.supervisor.fleet.machine import Machine, look
from replicas.supervisor.fleet.overlaps import Moment, peak

__all__ = ["Resources", "check_plan", "gpus_of", "machine_for", "notes", "problems", "refuse_unfit"]

_GIB = 1 << 30


def machine_for(config: Config) -> Machine:
    """Look up this machine, with GPUs only if the config asks for some.

    Blocks, for up to some seconds where it asks for GPUs.
    """
    return look(gpus=any(group.resources.gpus for group in config.groups.values()))


def check_plan(config: Config) -> list[str]:
    """Check a plan for ``replicas check``. Blocks, as :func:`machine_for` does.

    :return: notes on the plan.
    :raises replicas.errors.BadConfig: it does not fit this machine.
    """
    machine = machine_for(config)
    refuse_unfit(config, machine)
    return notes(config, machine)


def refuse_unfit(config: Config, machine: Machine) -> None:
    """Check a plan.

    :raises replicas.errors.BadConfig: it does not fit this machine.
    """
    found = problems(config, machine)
    if found:
        raise errors.BadConfig(found, source=str(config.source or "config"))


def problems(config: Config, machine: Machine) -> list[str]:
    """Why the plan does not fit, one line each; empty: it fits."""
    found = [*_gpu_problems(config, machine), *_memory_problems(config, machine)]
    for group in config.groups.values():
        place = f"groups.{group.name}.resources"
        threads = group.resources.cpu_threads
        if threads is not None and threads > machine.cpus:
            found.append(f"{place}.cpu_threads: {threads} for each rank, but this process may use {machine.cpus} CPUs")
        for key, limit in (("memory", group.resources.memory_nbytes), ("max_processes", group.resources.max_processes)):
            if limit is not None and machine.limits_refused:
                found.append(f"{place}.{key}: no limit can be set here: {machine.limits_refused}")
    return found


def notes(config: Config, machine: Machine) -> list[str]:
    """Remarks on a plan that fits, such as more CPU threads than CPUs."""
    threads = {
        group.name: group.replicas * group.world_size * group.resources.cpu_threads
        for group in config.groups.values()
        if group.resources.cpu_threads is not None
    }
    total, names = _peak(config, threads)
    if total <= machine.cpus:
        return []
    return [f"{total} CPU threads at once ({', '.join(names)}) share {machine.cpus} CPUs"]


def _gpu_problems(config: Config, machine: Machine) -> list[str]:
    total, names = _peak(config, {group.name: group.replicas * gpus_of(group) for group in config.groups.values()})
    if total <= len(machine.gpus):
        return []
    shares = ", ".join(f"{name}: {_product(config.groups[name])}" for name in names)
    has = f"this machine has {len(machine.gpus)}" + (f" ({machine.gpus_from})" if machine.gpus_from else "")
    return [f"groups.{names[0]}.resources.gpus: {total} GPUs are asked for at once ({shares}), but {has}"]


def _product(group: GroupConfig) -> str:
    parts = (group.replicas, group.world_size, group.resources.gpus or 0)
    words = (f"{parts[0]} replicas", f"{parts[1]} ranks", str(parts[2]))
    return " x ".join(word for part, word in zip(parts, words, strict=True) if part != 1 or word == str(part))


def _memory_problems(config: Config, machine: Machine) -> list[str]:
    memory = {group.name: group.replicas * (group.resources.memory_nbytes or 0) for group in config.groups.values()}
    total, names = _peak(config, memory)
    if total <= machine.memory_nbytes:
        return []
    asked = f"{total / _GIB:.1f} GiB at once ({', '.join(names)})"
    return [f"groups.{names[0]}.resources.memory: {asked}, but this machine has {machine.memory_nbytes / _GIB:.1f} GiB"]


def _peak(config: Config, weights: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """The greatest sum of weights of groups that may run at once, and those groups."""
    there = [name for name in config.groups if weights.get(name)]
    apart = set(there) if not _waits(config) else peak(there, weights, _steps(config))
    chosen = tuple(name for name in there if name in apart)
    return sum(weights[name] for name in chosen), chosen


def _waits(config: Config) -> bool:
    return any(
        dependency.condition == "finished" for group in config.groups.values() for dependency in group.depends_on
    )


def _steps(config: Config) -> dict[Moment, list[Moment]]:
    """The moments directly after each: own end after start, start after its needs."""
    after: dict[Moment, list[Moment]] = {}
    for name, group in config.groups.items():
        after.setdefault(("start", name), []).append(("end", name))
        for dependency in group.depends_on:
            before: Moment = ("end" if dependency.condition == "finished" else "start", dependency.group)
            after.setdefault(before, []).append(("start", name))
    return after


def gpus_of(group: GroupConfig) -> int:
    """GPUs of one replica."""
    return (group.resources.gpus or 0) * group.world_size


class Resources:
    """The ledger of a run's GPUs, and the environment of each replica's share."""

    def __init__(self) -> None:
        self.machine = Machine()
        self._held: dict[tuple[str, int], tuple[str, ...]] = {}
        self._managed = False

    def plan(self, config: Config, machine: Machine) -> None:
        """Take a config that fits; replicas keep what they hold until its release."""
        self.machine = machine
        self._managed = any(group.resources.gpus for group in config.groups.values())

    @property
    def free(self) -> tuple[str, ...]:
        taken = {gpu for gpus in self._held.values() for gpu in gpus}
        return tuple(gpu for gpu in self.machine.gpus if gpu not in taken)

    def held(self, group: str, index: int) -> tuple[str, ...]:
        """The GPUs of a replica."""
        return self._held.get((group, index), ())

    def take(self, group: GroupConfig, index: int) -> str:
        """Give the replica its GPUs, all or none; safe to call again.

        :return: what it lacks, in words; empty: it has its GPUs now.
        """
        need = gpus_of(group)
        if len(self.held(group.name, index)) == need:
            return ""
        self.release(group.name, index)
        free = self.free
        if need > len(free):
            return f"{need} GPU{'s' if need != 1 else ''} ({len(free)} free)"
        self._held[group.name, index] = free[:need]
        return ""

    def release(self, group: str, index: int) -> None:
        """Free the GPUs of a replica that has settled and has no process left."""
        self._held.pop((group, index), None)

    def environment(self, group: GroupConfig, index: int, node: int = 0) -> dict[str, str]:
        """Variables for the processes of one node, which override all others."""
        variables: dict[str, str] = {}
        if self._managed:
            share = (group.resources.gpus or 0) * group.nproc_per_node
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(
                self.held(group.name, index)[node * share : (node + 1) * share]
            )
            if self.machine.gpu_order:
                variables["CUDA_DEVICE_ORDER"] = self.machine.gpu_order
        if group.resources.cpu_threads is not None:
            variables["OMP_NUM_THREADS"] = str(group.resources.cpu_threads)
        return variables

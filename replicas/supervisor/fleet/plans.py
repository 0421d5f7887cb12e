"""Check that a plan fits a machine.

A *plan* is what a config asks for. :func:`problems` compares it with a
:class:`Machine`. Groups may run at the same time
unless one starts after the other has finished (``depends_on = ["other:finished"]``,
directly or through others), so the greatest sum over such groups counts. A plan
that does not fit is refused by ``replicas check``, at the start, and by a reload; a
scale by the supervisor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from replicas import errors
from replicas.config.structs import Config, GroupConfig
from replicas.config.values import is_loopback
from replicas.supervisor.agent.machine import Machine, look
from replicas.supervisor.state.run_state import SavedGroup

_GIB = 1 << 30
_Moment = tuple[Literal["start", "end"], str]
_Node = _Moment | Literal["source", "sink"]


def machine_for(config: Config) -> Machine:
    """This machine, with GPUs (which takes some seconds) only if they are wanted."""
    return look(gpus=any(group.resources.gpus for group in config.groups.values()))


def refuse_unfit(config: Config, machine: Machine) -> None:
    """:raises replicas.errors.BadConfig: the plan does not fit this machine.

    Where other machines may join, what does not fit waits for them.
    """
    found = [] if may_grow(config) else problems(config, machine)
    if found:
        raise errors.BadConfig(found, source=str(config.source or "config"))


def may_grow(config: Config) -> bool:
    """Whether agents on other machines can join the run."""
    return not config.cluster.local or not is_loopback(config.control.host)


def problems(config: Config, machine: Machine) -> list[str]:
    found: list[str] = []
    total, names = _peak(config, {group.name: group.replicas * _gpus_of(group) for group in config.groups.values()})
    if total > len(machine.gpus):
        shares = ", ".join(f"{name}: {_product(config.groups[name])}" for name in names)
        has = f"this machine has {len(machine.gpus)}" + (f" ({machine.gpus_from})" if machine.gpus_from else "")
        found.append(f"groups.{names[0]}.resources.gpus: {total} GPUs are asked for at once ({shares}), but {has}")
    memory = {group.name: group.replicas * (group.resources.memory_nbytes or 0) for group in config.groups.values()}
    total, names = _peak(config, memory)
    if total > machine.memory_nbytes:
        asked = f"{total / _GIB:.1f} GiB at once ({', '.join(names)})"
        has = f"{machine.memory_nbytes / _GIB:.1f} GiB"
        found.append(f"groups.{names[0]}.resources.memory: {asked}, but this machine has {has}")
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
    if may_grow(config):
        found = [*problems(config, machine), *_too_large_parts(config, machine)]
        return [f"{problem}; it waits for agents on other machines" for problem in found]
    threads = {
        group.name: group.replicas * group.world_size * (group.resources.cpu_threads or 0)
        for group in config.groups.values()
    }
    total, names = _peak(config, threads)
    if total <= machine.cpus:
        return []
    return [f"{total} CPU threads at once ({', '.join(names)}) share {machine.cpus} CPUs"]


def _too_large_parts(config: Config, machine: Machine) -> Iterator[str]:
    """Groups that a node like this machine takes no part of, for its few CPUs."""
    for group in config.groups.values():
        threads, ranks = group.resources.cpu_threads or 0, group.nproc_per_node
        if threads <= machine.cpus < threads * ranks:
            place = f"groups.{group.name}.resources.cpu_threads"
            yield f"{place}: {threads} for each of {ranks} ranks, but this machine has {machine.cpus} CPUs"


def _product(group: GroupConfig) -> str:
    parts = (group.replicas, group.world_size, group.resources.gpus or 0)
    words = (f"{parts[0]} replicas", f"{parts[1]} ranks", str(parts[2]))
    return " x ".join(word for part, word in zip(parts, words, strict=True) if part != 1 or word == str(part))


def _gpus_of(group: GroupConfig) -> int:
    return (group.resources.gpus or 0) * group.world_size


def with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    groups = {
        name: msgspec.structs.replace(group, replicas=sizes.get(name, group.replicas))
        for name, group in config.groups.items()
    }
    return msgspec.structs.replace(config, groups=groups)


def fitting(
    saved: Mapping[str, SavedGroup], config: Config, machine: Machine, say: Callable[[str], None]
) -> dict[str, SavedGroup]:
    """A dead supervisor's groups; sizes that do not fit (any more) are the config's."""
    sizes = {
        name: saved[name].size
        for name, group in config.groups.items()
        if name in saved and saved[name].configured == group.replicas
    }
    found = [] if may_grow(config) else problems(with_sizes(config, sizes), machine)
    if not found:
        return dict(saved)
    say(f"the groups were scaled to what does not fit here; they have their sizes of the config: {'; '.join(found)}")
    return {
        name: msgspec.structs.replace(one, size=one.configured) if name in sizes else one for name, one in saved.items()
    }


def _peak(config: Config, weights: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """The greatest sum of weights of groups that may run at once, and those groups.

    Two groups never run at the same time if one starts after the other has ended. That
    is a partial order, and the set is its heaviest *antichain*. By Dilworth's theorem a
    minimum cut yields it, in the network with these edges:

    * source -> end of g, with the weight of g as capacity;
    * start of g -> sink, with the weight of g as capacity;
    * each moment -> each later moment, with unbounded capacity.

    No moment on the near side of the cut has a later one on the far side, so it costs
    the weight of all groups less that of the groups whose start is far and whose end is
    near: those have no order between them. The cheapest cut leaves the heaviest such
    set, in polynomial time; trying all sets would double the time with each group.
    """
    there = [name for name in config.groups if weights.get(name)]
    rest: dict[_Node, dict[_Node, int]] = {"source": {}, "sink": {}}
    unbounded = sum(weights[name] for name in there) + 1

    def widen(one: _Node, other: _Node, width: int) -> None:
        rest.setdefault(one, {})[other] = width
        rest.setdefault(other, {}).setdefault(one, 0)

    for name, group in config.groups.items():
        widen(("start", name), ("end", name), unbounded)
        for dependency in group.depends_on:
            before: _Moment = ("end" if dependency.condition == "finished" else "start", dependency.group)
            widen(before, ("start", name), unbounded)
    for name in there:
        widen("source", ("end", name), weights[name])
        widen(("start", name), "sink", weights[name])
    while "sink" in (came := _reached(rest)):
        way: list[tuple[_Node, _Node]] = []
        node: _Node = "sink"
        while node != "source":
            way.append((came[node], node))
            node = came[node]
        width = min(rest[one][other] for one, other in way)
        for one, other in way:
            rest[one][other] -= width
            rest[other][one] += width
    chosen = tuple(name for name in there if ("end", name) in came and ("start", name) not in came)
    return sum(weights[name] for name in chosen), chosen


def _reached(rest: Mapping[_Node, Mapping[_Node, int]]) -> dict[_Node, _Node]:
    """Moments that the source reaches, each with its predecessor on a shortest path."""
    came: dict[_Node, _Node] = {"source": "source"}
    todo = deque[_Node](["source"])
    while todo and "sink" not in came:
        one = todo.popleft()
        for other, width in rest[one].items():
            if width and other not in came:
                came[other] = one
                todo.append(other)
    return came

"""Check that a plan fits a machine.

A *plan* is a config's demand, which :func:`problems` compares with a :class:`Machine`.
Groups may run at the same time unless one starts after the other has finished
(``depends_on = ["other:finished"]``, directly or through others), so the greatest sum
over such groups counts. A plan that does not fit is refused by ``replicas check``, at
the start, by a reload, and by a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from replicas import errors
from replicas.common.sizes import size_text
from replicas.config.structs import Config, GroupConfig
from replicas.config.values import is_loopback
from replicas.core.lives.ordering import start_levels
from replicas.supervisor.agent.machine import Machine, inspect_machine
from replicas.supervisor.state.run_state import SavedGroup

_Graph = Mapping[str, set[str]]


def machine_for(config: Config) -> Machine:
    """Inspect this machine, and return its resources. Blocks.

    Looks for GPUs, which can take seconds, only if a group asks for them.
    """
    return inspect_machine(gpus=any(group.resources.gpus for group in config.groups.values()))


def refuse_unfit(config: Config, machine: Machine) -> None:
    """Raise BadConfig if the replicas of the config do not fit this machine.

    Do nothing if other machines may join: replicas then wait for them.
    """
    found = [] if may_grow(config) else problems(config, machine)
    if found:
        raise errors.BadConfig(found, source=str(config.source or "config"))


def may_grow(config: Config) -> bool:
    """Return True if agents on other machines can join the run."""
    return not config.cluster.local or not is_loopback(config.control.host)


def problems(config: Config, machine: Machine) -> list[str]:
    """Return why the config's replicas do not fit the machine; [] if they fit.

    Each in words, with the key of the config.
    """
    found: list[str] = []
    gpus = {one.name: one.replicas * one.world_size * (one.resources.gpus or 0) for one in config.groups.values()}
    total, names = _peak(config, gpus)
    if total > len(machine.gpus):
        shares = ", ".join(f"{name}: {_product(config.groups[name])}" for name in names)
        has = f"this machine has {len(machine.gpus)}" + (f" ({machine.gpus_from})" if machine.gpus_from else "")
        found.append(f"groups.{names[0]}.resources.gpus: {total} GPUs are needed at once ({shares}), but {has}")
    memory = {group.name: group.replicas * (group.resources.memory_nbytes or 0) for group in config.groups.values()}
    total, names = _peak(config, memory)
    if total > machine.memory_nbytes:
        asked, has = f"{size_text(total)} for all replicas of {', '.join(names)}", size_text(machine.memory_nbytes)
        found.append(f"groups.{names[0]}.resources.memory: {asked}, but this machine has {has}")
    for group in config.groups.values():
        place = f"groups.{group.name}.resources"
        threads = group.resources.cpu_threads
        if threads is not None and threads > machine.cpus:
            found.append(f"{place}.cpu_threads: {threads} for each rank, but this process may use {machine.cpus} CPUs")
        for key, limit in (("memory", group.resources.memory_nbytes), ("max_processes", group.resources.max_processes)):
            if limit is not None and machine.limits_refused:
                found.append(f"{place}.{key}: this limit cannot be enforced here ({machine.limits_refused})")
    return found


def notes(config: Config, machine: Machine) -> list[str]:
    """Return remarks on a plan that is not refused, in words; [] for none.

    They say what must wait for other machines, or shares CPUs.
    """
    if may_grow(config):
        found = [*problems(config, machine), *_too_large_parts(config, machine)]
        return [f"{problem}; the run waits for agents on other machines" for problem in found]
    threads = {
        group.name: group.replicas * group.world_size * (group.resources.cpu_threads or 0)
        for group in config.groups.values()
    }
    total, names = _peak(config, threads)
    if total <= machine.cpus:
        return []
    return [f"all replicas of {', '.join(names)} together have {total} CPU threads, which share {machine.cpus} CPUs"]


def _too_large_parts(config: Config, machine: Machine) -> Iterator[str]:
    """Yield a remark for each group whose parts need more CPUs than the machine has."""
    for group in config.groups.values():
        threads, ranks = group.resources.cpu_threads or 0, group.nproc_per_node
        if threads <= machine.cpus < threads * ranks:
            place = f"groups.{group.name}.resources.cpu_threads"
            yield f"{place}: {threads} for each of {ranks} ranks, but this machine has {machine.cpus} CPUs"


def _product(group: GroupConfig) -> str:
    """Return how the group's number of GPUs is computed: "2 replicas x 4 ranks x 1"."""
    parts = (group.replicas, group.world_size, group.resources.gpus or 0)
    words = (f"{parts[0]} replicas", f"{parts[1]} ranks", str(parts[2]))
    return " x ".join(word for part, word in zip(parts, words, strict=True) if part != 1 or word == str(part))


def with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the config with these sizes of groups; other groups keep theirs."""
    groups = {
        name: msgspec.structs.replace(group, replicas=sizes.get(name, group.replicas))
        for name, group in config.groups.items()
    }
    return msgspec.structs.replace(config, groups=groups)


def fitting(
    saved: Mapping[str, SavedGroup], config: Config, machine: Machine, say: Callable[[str], None]
) -> dict[str, SavedGroup]:
    """Return the groups that an earlier supervisor saved, with sizes that fit.

    If the saved sizes do not fit this machine, they are replaced by the config's, and
    ``say`` is called with a line for people.

    :param saved: the state of its groups, by name.
    """
    sizes = {
        name: saved[name].size
        for name, group in config.groups.items()
        if name in saved and saved[name].configured == group.replicas
    }
    found = [] if may_grow(config) else problems(with_sizes(config, sizes), machine)
    if not found:
        return dict(saved)
    say(f"using the group sizes of the config, as those that were saved do not fit this machine: {'; '.join(found)}")
    return {
        name: msgspec.structs.replace(one, size=one.configured) if name in sizes else one for name, one in saved.items()
    }


def _peak(config: Config, weights: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """Return the greatest sum of weights of groups that may run at once, and those.

    Two groups never run at the same time if one starts after the end of the other. The
    sum is never too small. It may be too large, by a group or more, only if four groups
    wait in the shape of an N (c for a and b, d only for b).

    :param weights: what each group needs of a resource, by name.
    :returns: the sum, and the names of the groups.
    """
    ended = over_before(config.groups)
    there = {name for name in config.groups if weights.get(name)}
    apart = {one: {other for other in there if one in ended[other] or other in ended[one]} for one in there}
    chosen = _heaviest(there, apart, weights)
    return sum(weights[name] for name in chosen), tuple(name for name in config.groups if name in chosen)


def over_before(groups: Mapping[str, GroupConfig]) -> dict[str, frozenset[str]]:
    """Return, by name of a group, the groups that have finished before it starts."""
    found: dict[str, frozenset[str]] = {}
    for name in (name for names in start_levels(groups) for name in names):
        before = groups[name].depends_on
        done = frozenset(one.group for one in before if one.condition == "finished")
        found[name] = done.union(*(found[one.group] for one in before))
    return found


def _heaviest(names: set[str], apart: _Graph, weights: Mapping[str, int]) -> set[str]:
    """Return the heaviest set of groups that may all run at once.

    In rare cases (:func:`_peak`) it is a larger set, of which some never run at once.

    :param names: the groups to choose from.
    :param apart: for each group, the groups that never run at the same time as it.
    :param weights: of the groups.
    """

    def weight(some: set[str]) -> int:
        """Return the sum of the weights of the groups ``some``."""
        return sum(weights[name] for name in some)

    together = {name: names - apart[name] - {name} for name in names}
    unrelated, taking_turns = _parts(names, apart), _parts(names, together)
    if len(unrelated) > 1:
        return set().union(*(_heaviest(part, apart, weights) for part in unrelated))
    if len(taking_turns) > 1:
        return max((_heaviest(part, apart, weights) for part in taking_turns), key=weight)
    return max(({name} | together[name] for name in sorted(names)), key=weight, default=set())


def _parts(names: set[str], graph: _Graph) -> list[set[str]]:
    """Return the connected components of a graph, restricted to ``names``.

    :param graph: the neighbours of each name.
    """
    left, found = set(names), list[set[str]]()
    while left:
        part, todo = set[str](), {min(left)}
        while todo:
            part |= todo
            todo = set().union(*(graph[name] & names for name in todo)) - part
        left -= part
        found.append(part)
    return found

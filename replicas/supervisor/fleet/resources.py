"""Find this machine's resources, check that a plan fits, and assign GPUs to replicas.

:func:`look` finds GPUs, CPUs and memory without torch and without a GPU context.

A *plan* is what a config asks for. :func:`problems` compares it with a
:class:`Machine`. Groups may run at the same time
unless one starts after the other has finished (``depends_on = ["other:finished"]``,
directly or through others), so the greatest sum over such groups counts. A plan
that does not fit is refused by ``replicas check``, at the start, and by a reload; a
scale by the supervisor.

:class:`Resources` is the ledger of the nodes that agents offer, this machine among them
(:mod:`replicas.core.lives.placement` chooses). A replica takes a place, with GPUs, for
each of its parts before it starts, or waits in ``pending``; it keeps them across
restarts while their nodes are there, and releases them when it has settled (finished,
failed, or scaled away) and no process of it is left. In a run in which any group asks
for GPUs, a group that does not ask sees none: so no GPU has two owners. Every rank of a
part sees all GPUs of the part, in order: rank ``LOCAL_RANK`` has those from
``LOCAL_RANK * gpus`` on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec

from replicas import errors
from replicas.config.structs import Config, GroupConfig
from replicas.config.values import is_loopback
from replicas.core.lives.placement import Need, Offer, Share, place
from replicas.linux import smi
from replicas.linux.cgroups import LIMITS, find_own, own_group
from replicas.linux.files import kernel_lines
from replicas.linux.helpers import interpreter
from replicas.supervisor.state.run_state import SavedGroup

_REMEDY = "start it as root or under systemd with Delegate=yes, or remove the limit"
_NVML_S = 20.0
NAME_MAX = 63
_NO_GPUS = ("", "-1", "NoDevFiles")
_GIB = 1 << 30
_LISTED = 8
_Moment = tuple[Literal["start", "end"], str]
_Node = _Moment | Literal["source", "sink"]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine has for a run.

    :ivar gpus: names for ``CUDA_VISIBLE_DEVICES``.
    :ivar gpus_from: source of the names, or why there are none.
    :ivar gpu_order: the ``CUDA_DEVICE_ORDER`` that they need; empty: the present one.
    :ivar limits_refused: why memory and processes cannot be limited; empty: they can.
    """

    gpus: tuple[str, ...] = ()
    gpus_from: str = ""
    gpu_order: str = ""
    cpus: int = 1
    memory_nbytes: int = 0
    limits_refused: str = ""


def look(*, gpus: bool = True, environ: Mapping[str, str] | None = None) -> Machine:
    """This machine, bounded by CPU set, cgroups and ``CUDA_VISIBLE_DEVICES``.

    :param gpus: look for GPUs, which may take a second, and 20 s if the driver hangs.
    """
    names: tuple[str, ...] = ()
    gpus_from = order = ""
    if gpus:
        visible = visible_gpus(os.environ if environ is None else environ)
        names, gpus_from, order = _nvml_gpus() if visible is None else (visible, "CUDA_VISIBLE_DEVICES", "")
    cpus = len(os.sched_getaffinity(0))
    for text in _cgroup_texts("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    try:
        own = find_own()
        controllers = kernel_lines(own / "cgroup.controllers")[0].split()
        missing = [name for name in LIMITS if name not in controllers]
        refused = f"{own} has no controller {' or '.join(missing)}; {_REMEDY}" if missing else ""
    except OSError as error:
        refused = f"{error.strerror}; {_REMEDY}"
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        gpus=names,
        gpus_from=gpus_from,
        gpu_order=order,
        cpus=cpus,
        memory_nbytes=min([memory_nbytes, *(int(text) for text in _cgroup_texts("memory.max") if text != "max")]),
        limits_refused=refused,
    )


def node_name() -> str:
    """This machine's name as a node, of letters, digits, ``-``, ``_`` and ``.``."""
    found = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:NAME_MAX].strip(".-_")
    return found or "local"


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs in ``CUDA_VISIBLE_DEVICES`` (indices or UUIDs); None: it is not set."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    gpus: list[str] = []
    for word in text.split(","):
        if word.strip() in _NO_GPUS:  # CUDA stops here, too
            break
        gpus.append(word.strip())
    return tuple(dict.fromkeys(gpus))


def _nvml_gpus() -> tuple[tuple[str, ...], str, str]:
    """GPU indices in the order of the PCI bus, which is NVML's."""
    try:
        ctypes.CDLL(smi.NVML)  # loading it does not call the driver
    except OSError as error:
        return (), f"no NVIDIA driver: {error}", ""
    count, why = nvml_count([interpreter(), "-I", "-S", smi.__file__], _NVML_S)
    if count is None:
        return (), f"NVML says: {why}", ""
    return tuple(map(str, range(count))), "NVML", "PCI_BUS_ID"


def nvml_count(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """The number that ``command`` prints, or None and why. Blocks for ``timeout_s``."""
    try:
        code, text = smi.ask(command, timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"nothing within {timeout_s:g} s: the driver hangs"
    words = text.strip()
    if code == 0 and words.isdecimal():
        return int(words), ""
    return None, words or f"nothing; it ended with {code}"


def _cgroup_texts(name: str) -> Iterator[str]:
    try:
        own = own_group()
    except OSError:
        return
    for folder in (own, *own.parents):
        with contextlib.suppress(OSError):  # the root has no limits, and a controller that is off has no file
            yield kernel_lines(folder / name)[0]


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


class Resources:
    """The ledger of a run's nodes and GPUs, and the environment of each part's share.

    :param local: name of the node of this machine, which is always offered unless the
        config says otherwise.
    """

    def __init__(self, local: str = "local") -> None:
        self.local = local
        self.machine = Machine()
        """This machine."""
        self._machines: dict[str, Machine] = {local: self.machine}
        self._offers: dict[str, Offer] = {local: Offer(node=local)}
        self._held: dict[tuple[str, int], tuple[Share, ...]] = {}
        self._ending: dict[str, Share] = {}
        """Of processes that end, and belong to no replica."""
        self._managed = False
        self._grows = False
        self._min_nodes = 0
        """How many nodes must be there before the first share is taken."""
        self._asked = self._taken = False
        """Whether a share was asked for, and taken."""
        self.expected: tuple[str, ...] = ()
        """How the names of nodes begin that are to join at the start, where known."""

    def plan(self, config: Config, machine: Machine) -> None:
        """Take a config that fits; replicas keep what they hold until its release."""
        self.machine, self._grows = machine, may_grow(config)
        self._managed = any(group.resources.gpus for group in config.groups.values())
        self._min_nodes = 0 if self._taken else config.cluster.min_nodes
        if config.cluster.local:
            there = self._offers.get(self.local)
            self.offer(self.local, machine, config.cluster.labels, open=there is None or there.open)
        else:
            self.withdraw(self.local)

    # ------------------------------------------------------------ nodes

    def offer(self, node: str, machine: Machine, labels: Mapping[str, str], *, open: bool = True) -> None:
        """Add a node, or change what it offers; ``open``: it takes new replicas.

        The ranks of a run that has this machine only share its CPUs, however many.
        """
        self._machines[node] = machine
        self._offers[node] = Offer(
            node=node,
            gpus=machine.gpus,
            cpus=machine.cpus if self._grows or node != self.local else None,
            memory_nbytes=machine.memory_nbytes,
            labels=labels,
            open=open,
        )

    def open(self, node: str, is_open: bool) -> None:
        """Let a node that is offered take new replicas, or none."""
        if (there := self._offers.get(node)) is not None:
            self._offers[node] = msgspec.structs.replace(there, open=is_open)

    def labels(self, node: str) -> Mapping[str, str]:
        """The labels of a node; none: it is not offered."""
        there = self._offers.get(node)
        return there.labels if there is not None else {}

    def withdraw(self, node: str) -> None:
        """Remove a node; replicas keep what they hold of it until its release."""
        self._offers.pop(node, None)
        self._machines.pop(node, None)

    def node(self, group: str, index: int, part: int) -> str:
        """The node of this part of a replica; KeyError: it holds none."""
        return self._held[group, index][part].node

    def on(self, node: str) -> list[tuple[str, int]]:
        """Group and index of the replicas with a part on the node."""
        return sorted(key for key, shares in self._held.items() if any(share.node == node for share in shares))

    # ------------------------------------------------------------ shares

    @property
    def free(self) -> tuple[str, ...]:
        """GPUs of this machine that no replica holds."""
        return self.free_on(self.local)

    def free_on(self, node: str) -> tuple[str, ...]:
        """GPUs of a node that no replica holds."""
        shares = [share for share in self._taken_shares() if share.node == node]
        taken = {gpu for share in shares for gpu in share.gpus}
        machine = self._machines.get(node)
        return tuple(gpu for gpu in machine.gpus if gpu not in taken) if machine is not None else ()

    def _taken_shares(self) -> list[Share]:
        return [*(share for held in self._held.values() for share in held), *self._ending.values()]

    def held(self, group: str, index: int) -> tuple[str, ...]:
        return tuple(gpu for share in self._held.get((group, index), ()) for gpu in share.gpus)

    def nodes_of(self, group: str, index: int) -> tuple[str, ...]:
        """The node of each part of a replica; none: it holds no share."""
        return tuple(share.node for share in self._held.get((group, index), ()))

    @property
    def short(self) -> bool:
        """Whether replicas wait for nodes that are to join before the first start."""
        return self._asked and len(self._offers) < self._min_nodes

    def take(self, group: GroupConfig, index: int) -> str:
        """Give the replica a place for each part; return what it lacks, in words.

        It keeps its places while their nodes are there, open and as it needs them.
        """
        if group.external:
            return ""
        self._asked = True
        if self.short:
            return f"{self._min_nodes} nodes ({len(self._offers)} there)"
        self._taken, self._min_nodes = True, 0
        need, key = need_of(group), (group.name, index)
        held = self._held.pop(key, ())
        if held and self._still_good(need, held):
            self._held[key] = held
            return ""
        found = place(need, list(self._offers.values()), self._taken_shares())
        if isinstance(found, str):
            return found
        self._held[key] = found
        return ""

    def too_few(self, within_s: float) -> errors.WorldError:
        """The error for nodes that have not joined in time."""
        there = sorted(self._offers)
        missing = [one for one in self.expected if not any(f"{node}-".startswith(f"{one}-") for node in there)]
        which = f", without {_listed(missing)}" if missing else f": {_listed(there)}" if there else ""
        return errors.WorldError(
            f"{len(there)} of {self._min_nodes} nodes (cluster.min_nodes) joined within {within_s:g} s{which}",
            hint="see what the agents of the others say; lower cluster.min_nodes, or raise cluster.join_timeout",
        )

    def keep(self, group: GroupConfig, index: int, shares: tuple[Share, ...]) -> None:
        """Note what a replica holds that an earlier supervisor has started."""
        self._taken, self._min_nodes = True, 0
        self._held[group.name, index] = shares

    def hold(self, name: str, share: Share) -> Callable[[], None]:
        """Hold a share for processes that belong to no replica any more; the result
        frees it."""
        self._ending[name] = share

        def let_go() -> None:
            self._ending.pop(name, None)

        return let_go

    def shares(self, group: str, index: int) -> tuple[Share, ...]:
        return self._held.get((group, index), ())

    def _still_good(self, need: Need, held: tuple[Share, ...]) -> bool:
        def good(share: Share) -> bool:
            offer = self._offers.get(share.node)
            fits = len(share.gpus) == need.gpus and share.memory_nbytes == (need.memory_nbytes or 0)
            return fits and offer is not None and offer.open and need.accepts(offer)

        return len(held) == need.parts and all(good(share) for share in held)

    def misplaced(self, group: GroupConfig, index: int) -> bool:
        """Whether it holds a place on a node that it would not be given any more."""
        need, offers = need_of(group), (self._offers.get(share.node) for share in self.shares(group.name, index))
        return any(offer is not None and not need.accepts(offer) for offer in offers)

    def release(self, group: str, index: int) -> None:
        """Free the share of a replica that has settled and has no process left."""
        self._held.pop((group, index), None)

    def environment(self, group: GroupConfig, index: int, node: int = 0) -> dict[str, str]:
        """Variables for the processes of one part, which override all others."""
        variables: dict[str, str] = {}
        if self._managed:
            shares = self._held.get((group.name, index), ())
            share = shares[node] if node < len(shares) else None
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus if share is not None else ())
            machine = self._machines.get(share.node if share is not None else self.local, self.machine)
            if machine.gpu_order:
                variables["CUDA_DEVICE_ORDER"] = machine.gpu_order
        if group.resources.cpu_threads is not None:
            variables["OMP_NUM_THREADS"] = str(group.resources.cpu_threads)
        return variables


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def need_of(group: GroupConfig) -> Need:
    """What each part of a replica of the group needs of its node."""
    return Need(
        group=group.name,
        parts=group.nnodes,
        gpus=(group.resources.gpus or 0) * group.nproc_per_node,
        cpus=(group.resources.cpu_threads or 0) * group.nproc_per_node,
        memory_nbytes=group.resources.memory_nbytes,
        labels=group.placement.labels,
        spread=group.placement.spread,
        per_node=group.placement.per_node,
    )

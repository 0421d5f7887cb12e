"""Run a whole config on Ray: ``replicas ray CONFIG``.

Ray provides machines; the supervisor, which runs in the driver, has policy, restarts
and state. Each node of each replica has a bundle of a placement group, with the CPUs,
GPUs and memory that the replica needs there, and in it an actor that owns an agent
(:mod:`replicas.integrations.ray_agent`)::

    driver: supervisor ◄─────── agent ◄─ actor in a bundle
                        joins            Ray finds, and finds again, the place

An actor that ends is replaced in the same bundle, which Ray moves when its node has
died. The agent's node is named after the bundle and the machine: an agent on another
machine is another node, as it cannot end processes that may still run on the first.

A group that grows gets another placement group, so that Ray's autoscaler sees the
demand; a group that shrinks ends idle bundles, and a placement group with its last
bundle. A bundle that ends for another reason, such as a drain of its node, is replaced.
If a reload changes the bundles of a group, its replicas first leave all old ones: Ray
may not have room for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from typing import Any

import ray
from msgspec.structs import replace
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replicas import errors
from replicas.common.foreign import one_line
from replicas.config.structs import Config, GroupConfig
from replicas.core.lives.lifecycle import Transition
from replicas.integrations.ray_agent import RayAgent
from replicas.supervisor.operator import supervise
from replicas.supervisor.scheduler_hooks import SchedulerHooks, invitation, on_cluster
from replicas.supervisor.supervisor import Supervisor
from replicas.telemetry.events import Reloaded, Scaled

__all__ = ["adapt_config", "bundle", "run", "slots"]

log = logging.getLogger("replicas.integrations.ray")

GROUP_LABEL = "group"
_AGAIN_S = 1.0
_TOKEN = (
    "if it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file with it (~/.ray/auth_token)"
)


def run(config: Config, *, address: str | None = None) -> int:
    """Run ``config`` to its end on a Ray cluster; return the exit code. At the end,
    also after an error, disconnect from Ray, which ends all actors and placement
    groups.

    :param address: address of the cluster; default: that of ``RAY_ADDRESS``, which
        ``ray job submit`` sets, or the cluster on this machine.
    :raises replicas.errors.UsageError: no cluster is found, or it runs another Ray.
    """
    _connect(address or os.environ.get("RAY_ADDRESS") or "auto")
    try:
        host = ray.util.get_node_ip_address()
        bundles: list[_Bundles] = []

        def opened(supervisor: Supervisor) -> None:
            """As the supervisor has started: request the first bundles, and begin to
            adjust them."""
            bundles.append(_Bundles(supervisor))
            bundles[0].request_bundles()

        surroundings = SchedulerHooks(adapt=lambda one: adapt_config(one, host), opened=opened, nodes=slots(config))
        return supervise(config, surroundings)
    finally:
        ray.shutdown()  # also ends all actors and placement groups


def _connect(address: str) -> None:
    """Connect this process to a cluster. With a wrong token Ray finds no cluster, after
    20 s.

    :raises replicas.errors.UsageError: no cluster is found, or it refuses this process.
    """
    try:
        ray.init(address=address, configure_logging=False)
    except ConnectionError as error:
        hint = f"start one with `ray start --head`, or name it with --address; {_TOKEN}"
        raise errors.UsageError(f"no Ray cluster: {_words(error)}", hint=hint) from error
    except ray.exceptions.AuthenticationError as error:
        raise errors.UsageError(f"the Ray cluster refuses this program: {_words(error, 1)}", hint=_TOKEN) from error
    except (RuntimeError, ValueError) as error:  # another release of Ray or Python; invalid address
        raise errors.UsageError(
            f"the Ray cluster cannot be used: {_words(error)}",
            hint="install its releases of Ray and Python here, and name it as HOST:PORT with --address",
        ) from error


def _words(error: Exception, lines: int | None = None) -> str:
    """Return an error of Ray as one line, or its type if it has no text.

    :param lines: number of its first lines that are used; None: all.
    """
    return one_line("\n".join(str(error).strip().splitlines()[:lines])) or type(error).__name__


def adapt_config(config: Config, host: str) -> Config:
    """Return a copy of the config for Ray: each node of a replica runs on an agent of
    its own, and agents connect to ``host``."""
    groups = {name: _in_bundles(group) for name, group in config.groups.items()}
    return on_cluster(replace(config, groups=groups), host, len(slots(config)))


def slots(config: Config) -> tuple[str, ...]:
    """Return the names of the bundles (resources of one node) with which a run begins:
    ``GROUP-0``, ``GROUP-1``, one for each node of each replica."""
    ours = [group for group in config.groups.values() if not group.external]
    return tuple(f"{group.name}-{number}" for group in ours for number in range(group.replicas * group.nnodes))


def _in_bundles(group: GroupConfig) -> GroupConfig:
    """Return a copy of the group's config for Ray: each node of a replica on an agent
    of its own, with the group's label."""
    if group.external:
        return group
    placement = group.placement
    return replace(
        group, placement=replace(placement, labels={**placement.labels, GROUP_LABEL: group.name}, per_node=1)
    )


def bundle(group: GroupConfig) -> dict[str, float]:
    """Return the resources that one node of a replica requests from Ray: number of CPUs
    and GPUs, and ``memory`` in bytes."""
    resources, ranks = group.resources, group.nproc_per_node
    wanted: dict[str, float] = {"CPU": float(ranks * (resources.cpu_threads or 1))}
    if resources.gpus:
        wanted["GPU"] = float(ranks * resources.gpus)
    if resources.memory_nbytes is not None:
        wanted["memory"] = float(resources.memory_nbytes)
    return wanted


def _bundle_request(group: GroupConfig) -> tuple[dict[str, float], dict[str, str]]:
    """Return the resources and labels that a group's bundles are requested with. When a
    reload of the config changes them, :meth:`_Bundles._adjust` replaces the bundles."""
    return bundle(group), dict(group.placement.labels)


class _Bundle:
    """A bundle of a placement group (Ray's resources for one node), and the task that
    keeps an agent (which runs replicas) in it."""

    def __init__(self, place: Any, index: int, name: str, group: GroupConfig) -> None:
        """Describe one bundle (resources of one node, for one agent); start nothing.

        :param place: Ray's placement group. :param index: of the bundle in it.
        :param name: ``GROUP-NUMBER``, with which the name of its node begins.
        :param group: config of the group whose replicas it is for.
        """
        self.place, self.index, self.name, self.group = place, index, name, group
        self.keeper: asyncio.Task[None] | None = None
        self.retired = False
        """Set when its group needs other bundles: no more agents are started here."""

    def holds(self, node: str) -> bool:
        """Return True if the node of this name was started in the bundle."""
        return node.rpartition("-")[0] == self.name


class _Bundles:
    """Ray's bundles (each the resources of one node) for the replicas of a run. Used on
    the supervisor's event loop only."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Keep the supervisor whose groups need bundles; request nothing yet."""
        self._supervisor = supervisor
        self._slots: dict[str, list[_Bundle]] = defaultdict(list)
        self._numbers: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_groups = False

    def request_bundles(self) -> None:
        """Request the config's bundles from Ray, without a wait, and start the task
        that adjusts them to the groups."""
        for group in self._supervisor.config.groups.values():
            if not group.external and group.replicas:
                self._add(group, group.replicas * group.nnodes)
        self._spawn(self._follow())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """Run a coroutine as a task that this object keeps; return the task."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Forget a task that has ended, and log its error, if any; called as the task's
        done callback."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("no longer adjusting the Ray bundles of the run, after a bug; please report this", exc_info=error)

    async def _follow(self) -> None:
        """Adjust the bundles at each change of a group or replica; return when the
        supervisor's events end."""
        async for record in self._supervisor.events(self._supervisor.last_event):
            if isinstance(record.event, Scaled | Reloaded | Transition):  # a replica that has ended leaves its bundle
                self._has_groups = True
                self._adjust()

    def _adjust(self) -> None:
        """Request, retire or drain bundles until each group has the number and kind it
        needs; do nothing while the run drains. Start tasks for what takes time, and do
        not wait."""
        supervisor = self._supervisor
        if not self._has_groups or supervisor.fleet.draining or supervisor.fleet.over.is_set():
            return
        groups = supervisor.config.groups
        sizes = {group.name: group.size for group in supervisor.status().groups}
        for name in {*groups, *self._slots}:
            group = groups.get(name)
            external = group is not None and group.external
            wanted = 0 if group is None or external else sizes.get(name, 0) * group.nnodes
            if group is not None:
                self._retire(
                    [
                        one
                        for one in self._slots[name]
                        if not one.retired and _bundle_request(one.group) != _bundle_request(group)
                    ]
                )
            slots = [one for one in self._slots[name] if not one.retired]
            if group is not None and len(slots) < wanted:
                self._add(group, wanted - len(slots))
            elif len(slots) > wanted:
                self._shrink(slots, len(slots) - wanted)

    def _retire(self, slots: list[_Bundle]) -> None:
        """Start no more agents in these bundles: start tasks that drain their nodes,
        and cancel the task of, and drop, a bundle without a node."""
        nodes = [one.name for one in self._supervisor.status().nodes if one.state in ("up", "away", "draining")]
        for slot in slots:
            slot.retired = True
            joined = [node for node in nodes if slot.holds(node)]
            for node in joined:
                self._spawn(self._drain(node))
            if not joined and slot.keeper is not None:  # it waits for resources, or its agent is lost
                slot.keeper.cancel()
                self._drop(slot)

    async def _drain(self, node: str) -> None:
        """Ask the supervisor to drain a node, and wait: its replicas end, then its
        agent. An error is only printed as a line of the run."""
        try:
            await self._supervisor.drain_node(node)
        except errors.ReplicasError as error:  # the drain was undone, or the node has a new agent
            self._supervisor.say(str(error))

    def _add(self, group: GroupConfig, count: int) -> None:
        """Request ``count`` more bundles for the group in one new placement group, and
        start the tasks that keep an agent in each; do not wait for resources."""
        labels = {name: value for name, value in group.placement.labels.items() if name != GROUP_LABEL}
        place = placement_group(
            [bundle(group)] * count,
            strategy="SPREAD" if group.placement.spread else "PACK",
            bundle_label_selector=[labels] * count if labels else None,
        )
        for index in range(count):
            number = self._numbers.get(group.name, 0)
            self._numbers[group.name] = number + 1
            slot = _Bundle(place, index, f"{group.name}-{number}", group)
            self._slots[group.name].append(slot)
            slot.keeper = self._spawn(self._keep(slot))

    async def _keep(self, slot: _Bundle) -> None:
        """Task of one bundle: run an agent in it, as a Ray actor, and start another
        when it fails. Return, and drop the bundle, when an agent ends with 0 or the
        bundle is retired."""
        supervisor, group = self._supervisor, slot.group
        wanted = bundle(group)
        strategy = PlacementGroupSchedulingStrategy(slot.place, placement_group_bundle_index=slot.index)
        folder = str(supervisor.config.run.state_dir / "nodes")
        while not slot.retired:
            actor = (
                ray.remote(RayAgent)
                .options(
                    num_cpus=wanted["CPU"],
                    num_gpus=wanted.get("GPU", 0),
                    memory=wanted.get("memory"),
                    scheduling_strategy=strategy,
                )
                .remote()
            )
            try:
                code = await actor.serve.remote(invitation(supervisor), slot.name, dict(group.placement.labels), folder)
            except ray.exceptions.RayError as error:
                supervisor.say(f"restarting the agent in bundle {slot.name}, which is lost: {_words(error, lines=1)}")
            else:
                if code == 0:
                    break
                supervisor.say(f"the agent in bundle {slot.name} ended with {code}; starting another")
            finally:
                with contextlib.suppress(ray.exceptions.RayError):  # dead already, or with the job
                    ray.kill(actor)
            await asyncio.sleep(_AGAIN_S)
        self._drop(slot)
        self._adjust()  # its group may still need a bundle

    def _drop(self, slot: _Bundle) -> None:
        """Forget a bundle; with its last bundle remove the placement group from Ray."""
        self._slots[slot.group.name].remove(slot)
        if not any(one.place is slot.place for slots in self._slots.values() for one in slots):
            remove_placement_group(slot.place)

    def _shrink(self, slots: list[_Bundle], surplus: int) -> None:
        """Start tasks that drain up to ``surplus`` nodes in the bundles ``slots``, of
        those without a replica; nodes that drain already count."""
        nodes = [one for one in self._supervisor.status().nodes if any(slot.holds(one.name) for slot in slots)]
        surplus -= sum(one.state == "draining" for one in nodes)
        idle = [one.name for one in nodes if one.state == "up" and not one.replicas]
        for node in idle[: max(0, surplus)]:
            self._spawn(self._drain(node))

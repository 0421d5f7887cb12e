"""The processes that a supervisor takes over from an earlier one, or must wait for.

The state names the agents and shims that may be alive, if it is the newest state: of
this release, with as many starts as the file of leases, written in this boot of the
machine. Under a lease that no such state describes, any replica may run: no replica is
started anywhere until the agent has reported its shims, or the lease is over.

Agents of the supervisor's own machine are visible only from the same boot and pid
namespace; the sweep ends all that a dead one has left. From elsewhere (another
container, another machine with this disk) it is unknown whether they live, and their
leases count like those of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from replicas.linux.processes import boot_id
from replicas.supervisor.state.leases import Lease, Leases
from replicas.supervisor.state.run_state import AgentRecord, ProcessRecord, Saved, ShimRecord, machine


class Predecessor(NamedTuple):
    """Agents, shims and leases of an earlier supervisor.

    :ivar agents: nodes to expect, and ``shims`` on them.
    :ivar known: the living agent of this machine.
    :ivar leases: all leases that may still hold.
    :ivar unseen: the part of ``leases`` under which any replica may run.
    :ivar is_newest: True if the state is the newest, so that its numbers count.
    """

    agents: tuple[AgentRecord, ...] = ()
    shims: tuple[ShimRecord, ...] = ()
    known: ProcessRecord | None = None
    leases: tuple[Lease, ...] = ()
    unseen: tuple[Lease, ...] = ()
    is_newest: bool = True


def find_predecessor(saved: Saved | None, leases: Leases, *, crashed: bool, longest_s: float) -> Predecessor:
    """Return the agents, shims and leases of an earlier supervisor.

    Reads only ``/proc``, to see which processes live; changes nothing.

    :param saved: the state that the earlier supervisor left, if any.
    :param leases: the file of leases, loaded.
    :param crashed: True if an earlier supervisor has not ended in order.
    :param longest_s: the config's longest lease, used for unknown leases; 0 if the
        config has no leases.
    """
    sure = _is_newest(saved, leases) if saved is not None else not (crashed or leases.records or leases.damaged)
    records: Sequence[Lease] = leases.records
    if not (leases.found or sure) and longest_s:
        records = (Lease(unseen=True),)
    left = [one if one.lease_s else replace(one, lease_s=longest_s) for one in records if not _is_swept(one)]
    unnoted_s = 0.0 if leases.found else longest_s  # an earlier release has recorded none
    agents = [_with_lease(one, left, unnoted_s) for one in saved.agents] if saved is not None else []
    agents = [one for one in agents if not one.local or (_lives(one.process) if _is_here(one.scope) else one.lease_s)]
    known = [one.process for one in left if one.local and _is_here(one.scope)]
    known += [one.process for one in agents if one.local and _is_here(one.scope)]
    return Predecessor(
        agents=tuple(agents),
        shims=saved.shims if saved is not None else (),
        known=next(iter(known), None),
        leases=tuple(left),
        unseen=tuple(one for one in left if one.unseen or not sure),
        is_newest=sure,
    )


def _is_newest(saved: Saved, leases: Leases) -> bool:
    """Return True if this state is certainly the last that was written.

    It is not, for example, if a crash of the machine lost a later one.
    """
    if not leases.found:  # an earlier release writes no leases
        return not leases.damaged and not saved.starts
    return saved.starts >= leases.starts and saved.machine.partition("/")[0] == boot_id()


def _is_here(scope: str) -> bool:
    """Return True if pids of this scope are valid for this process.

    :param scope: a boot id and pid namespace, from :func:`machine`.
    """
    return scope == machine()


def _lives(process: ProcessRecord | None) -> bool:
    """Return True if this is a record of a process that is alive here."""
    return process is not None and process.alive()


def _is_swept(lease: Lease) -> bool:
    """Return True if no process can be left under this lease after the start.

    The agent was on this machine and is dead, so its processes are killed at the start.
    """
    return lease.local and _is_here(lease.scope) and not _lives(lease.process)


def _with_lease(agent: AgentRecord, leases: Sequence[Lease], unnoted_s: float) -> AgentRecord:
    """Return the record of an agent, with its longest lease as ``lease_s`` (seconds).

    :param leases: those that may still hold, of all agents.
    :param unnoted_s: the lease to assume for this machine's agent if ``leases`` has
        none.
    """
    granted = [one.lease_s for one in leases if one.node == agent.node]
    return replace(agent, lease_s=max(granted, default=unnoted_s if agent.local else agent.lease_s))

"""Wait for processes of earlier supervisors before starting replicas.

Replicas wait for two things:

* an *unseen* lease: no saved state says which processes run under it
  (:mod:`replicas.supervisor.state.predecessor`). No replica starts until its agent has
  joined and reported its shims, or the lease is over;
* a *stranger*: a shim that an agent has and that belongs to no replica. It is ended;
  until then its replica does not start, and its node takes no other.

This module also grants leases: each is on disk before its agent gets a Welcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from replicas.common.logs import Log
from replicas.common.reason import Reason
from replicas.core.lives.lease_times import lost_after_s
from replicas.messages.bounds import REPLICAS_MAX
from replicas.supervisor.fleet.handle import ShimHandle
from replicas.supervisor.state.leases import Lease, Leases
from replicas.supervisor.wire.part_state import PartState

log = Log("replicas.supervisor")

_UNKNOWN = "unknown nodes"


class PredecessorWaits:
    """Leases of agents, and shims of no replica (strangers), for which starts wait. A
    lease says how long an agent may run without a supervisor.

    It is *unseen* while no agent has reported which shims run under it.

    :param file: the leases on disk.
    """

    def __init__(self, file: Leases) -> None:
        """Begin with nothing to wait for; read and write nothing yet.

        :param file: the leases on disk.
        """
        self._file = file
        self._leases: dict[str, Lease] = {}
        """Leases that are not over, by the incarnation of the agent."""
        self._unseen: dict[str, float] = {}
        """When the unseen ones of these are over."""
        self._strangers: dict[str, tuple[tuple[str, int], ShimHandle]] = {}
        self._generations: dict[tuple[str, int], int] = {}

    # ------------------------------------------------------------ leases

    def inherit(self, leases: Iterable[Lease], unseen: Collection[Lease], now: float) -> None:
        """Add the leases that earlier supervisors granted, and write all to disk.

        An error of the disk is only logged.

        :param unseen: those of ``leases`` for which no replica may start until they
            end.
        :param now: seconds of the loop's clock, as in all methods.
        """
        for number, lease in enumerate(leases):
            key = lease.incarnation or f"line {number}"
            self._leases[key] = msgspec.structs.replace(lease, unseen=lease in unseen)
            if lease in unseen:
                self._unseen[key] = now + lost_after_s(lease.lease_s)
        self._write_leases()

    def grant(self, lease: Lease) -> Reason | None:
        """Write the lease of a joining agent to disk with fsync, if it has one.

        A lease is how long the agent may run without a supervisor. An agent with
        ``lease_s`` 0 ends with this supervisor: write no lease for it, but mark an
        unseen lease of its process as seen.

        :returns: the problem of the disk in words, or None if the agent may join.
        """
        if not lease.lease_s:
            self._note_seen(lease.incarnation)
            return None
        changed = {**self._leases, lease.incarnation: lease}
        try:
            self._file.write(tuple(changed.values()))
        except OSError as error:
            return error.strerror or str(error)
        self._leases = changed
        self._unseen.pop(lease.incarnation, None)
        return None

    def _note_seen(self, incarnation: str) -> None:
        """Mark an agent's unseen lease, if any, as seen, and write that to disk.

        Its agent has reported which shims run under it.

        :param incarnation: id of the agent's process.
        """
        if self._unseen.pop(incarnation, None) is not None:
            self._leases[incarnation] = msgspec.structs.replace(self._leases[incarnation], unseen=False)
            self._write_leases()

    def end(self, node: str, *, but: str = "") -> None:
        """Forget a node's leases, and write the rest to disk: its processes are gone.

        Unseen leases stay, and so does that of the agent with the incarnation ``but``.
        """
        over = [key for key, one in self._leases.items() if one.node == node and key not in (but, *self._unseen)]
        for key in over:
            del self._leases[key]
        if over:
            self._write_leases()

    def tick(self, now: float) -> bool:
        """Forget unseen leases that are over. Return True if no other is left then.

        Return False if this call forgets none. Unseen: no state says what runs under
        the lease, so all replicas wait for its end.
        """
        over = [key for key, until in self._unseen.items() if now > until]
        for key in over:
            del self._unseen[key], self._leases[key]
        if over:
            self._write_leases()
        return bool(over) and not self._unseen

    def left(self, nodes: Collection[str]) -> tuple[Lease, ...]:
        """Return the leases to leave on disk at the end of the run; change nothing.

        Those of ``nodes``, which have processes left, and the unseen ones; all are
        marked as unseen, so that the next supervisor waits for them.
        """
        kept = (one for key, one in self._leases.items() if one.node in nodes or key in self._unseen)
        return tuple(msgspec.structs.replace(one, unseen=True) for one in kept)

    def _write_leases(self) -> None:
        """Write all leases to disk; only log an error."""
        try:
            self._file.write(tuple(self._leases.values()))
        except OSError as error:  # the file names too many, which costs the next supervisor a wait
            log.warning("going on without saving which nodes have agents: %s", error.strerror or error)

    # ------------------------------------------------------------ strangers

    def stranger(self, state: PartState, handle: ShimHandle) -> None:
        """Record a shim that belongs to no replica, until its processes are gone.

        Until then :meth:`blocks` delays the replica that has the shim's group and
        index. The caller orders the end of the shim.

        :param state: as its agent reported it. :param handle: shows when they are gone.
        """
        key = (state.group, state.replica)
        if key in self._generations or len(self._generations) < REPLICAS_MAX:
            self._generations[key] = max(self._generations.get(key, 0), state.generation)
        self._strangers[state.nonce] = key, handle

    def strangers_on(self, node: str) -> bool:
        """Return True if the node has a living shim that belongs to no replica.

        The caller places no replica on such a node.
        """
        self._forget_gone()
        return any(handle.node == node for _, handle in self._strangers.values())

    def generation(self, group: str, replica: int) -> int:
        """Return the highest number that an earlier generation of a replica may have.

        It may come from a lost state or a stranger, which the replica does not know.
        The replica's next generation must have a higher number.
        """
        return max(self._file.floor, self._generations.get((group, replica), 0))

    def _forget_gone(self) -> None:
        """Forget strangers (shims of no replica) whose processes are gone."""
        self._strangers = {nonce: one for nonce, one in self._strangers.items() if not one[1].state.gone}

    # ------------------------------------------------------------ questions

    def nodes(self) -> tuple[str, ...]:
        """Return the names of nodes whose leases keep all replicas waiting.

        The name "" is an unknown node.
        """
        return tuple(dict.fromkeys(self._leases[key].node for key in self._unseen))

    def blocks(self, group: str, replica: int, now: float) -> Reason | None:
        """Return what this replica's start waits for, or None.

        It is the text after "waits", such as ``up to 12 s for old processes on node
        gpu2 to end``.
        """
        if self._unseen:
            return f"up to {max(0.0, max(self._unseen.values()) - now):.0f} s for {words(self.nodes())} to end"
        self._forget_gone()
        for key, handle in self._strangers.values():
            if key == (group, replica):
                return f"for an earlier generation to end on node {handle.node}"
        return None


def words(nodes: Sequence[str]) -> str:
    """Return words for what may run on these nodes: ``old processes on nodes a, b``.

    An empty node name means an unknown node.
    """
    known = [one for one in nodes if one]
    if not known:
        return f"old processes on {_UNKNOWN}"
    what = "old processes on node" if len(known) == 1 else "old processes on nodes"
    return f"{what} {', '.join(known)}{f' and {_UNKNOWN}' if len(known) < len(nodes) else ''}"

"""Operations that failed twice with all their peers alive: pairs are probed, and the culprits quarantined.

The operation is parked meanwhile (:attr:`replicas.core.operations.Operations.on_stuck`). When the pairs have been tried, the
culprits are out of it, and it is run again over the others; without a culprit it is run once more. It is probed for once:
the next time that it fails twice, it ends with the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from replicas import errors
from replicas.core.identity import Member
from replicas.core.lanes import Lane
from replicas.core.operations import Operation
from replicas.core.probes import Probe

if TYPE_CHECKING:
    from replicas.core.channel import ChannelState

__all__ = ["StuckOperations"]


class StuckOperations:
    """Of one channel of peers."""

    def __init__(self, channel: ChannelState) -> None:
        self._channel = channel
        self._probes: dict[str, tuple[Operation, Probe]] = {}
        self._probed: set[str] = set()
        channel.operations.on_stuck = self.take

    def take(self, operation: Operation, error: errors.ReplicasError, now: float) -> bool:
        """Find out whom it is up to; False when that has been tried, or there is nobody to tell apart."""
        if isinstance(error, errors.InternalError) or operation.ref in self._probed or len(operation.participants) < 2:
            return False
        self._probed.add(operation.ref)

        def end(culprits: Mapping[Member, str], at: float) -> None:
            self._ended(operation, culprits, at)

        backend = self._channel.operations.backend_of(operation)
        probe = Probe(self._channel, operation.participants, backend, now, end)
        if not probe.over:
            self._probes[operation.ref] = (operation, probe)
        return not probe.over

    def _ended(self, operation: Operation, culprits: Mapping[Member, str], now: float) -> None:
        self._probes.pop(operation.ref, None)
        for member, why in culprits.items():
            self._channel.quarantine(member, why, now)
        if operation in self._channel.operations.running:
            self._channel.operations.resume(operation, now)

    def lane_formed(self, lane: Lane, now: float) -> None:
        for _, probe in list(self._probes.values()):
            probe.formed(lane, now)

    def lane_failed(self, lane: Lane, error: errors.ReplicasError, now: float) -> None:
        for _, probe in list(self._probes.values()):
            probe.failed(lane, error, now)

    def lost(self, member: Member, now: float) -> None:
        for _, probe in list(self._probes.values()):
            probe.lost(member, now)

    def tick(self, now: float) -> None:
        """Time passes; operations that have ended are forgotten."""
        running = {operation.ref for operation in self._channel.operations.running}
        self._probed &= running
        for ref, (_, probe) in list(self._probes.items()):
            if ref not in running:
                probe.abandon()
                del self._probes[ref]
            else:
                probe.tick(now)

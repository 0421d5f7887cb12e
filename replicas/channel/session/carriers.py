"""This member's transfer server (*carrier*): started ahead of use, replaced if it dies.

The channels of a process share one; each transfer has its own secret. The member
reports the carrier's port to the coordinator whenever it changes, and to each new
coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from replicas import errors
from replicas.carry.rank_side import Carrier
from replicas.channel.session.hub import Hub, Part
from replicas.common.logs import Log
from replicas.messages import CarrierUp, LaneAhead

logger = Log("replicas.channel")


class Carriers(Part):
    """Starts this member's transfer server (carrier), and reports its port.

    :param prepare: forks a spare sidecar, where versions go over process groups
        instead.
    """

    def __init__(self, hub: Hub, prepare: Callable[[], None]) -> None:
        """Start no process before it is needed.

        :param prepare: called instead of starting a carrier where versions go over
            process groups; forks a spare sidecar (process that runs one such group).
        """
        self._hub = hub
        self._prepare_lanes = prepare
        self._told: Carrier | None = None

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {LaneAhead: self._handle_lane_ahead}

    def new_term(self) -> None:
        """Send the port of the running carrier, if any, to a restarted coordinator."""
        if self._told is not None and self._told.usable:
            self._announce(self._told)

    def _handle_lane_ahead(self, message: LaneAhead) -> None:
        """Handle LaneAhead: bytes will probably go to or from other hosts soon.

        Start the process that does so, without waiting for it: the carrier (a transfer
        server) or, on a channel that uses process groups, a spare sidecar. Start none
        on a source's rank that sends no bytes. Note that the channel has several hosts.
        """
        self._hub.several_hosts = True
        settings = self._hub.settings
        if settings.role == "source" and settings.source_ranks != "all" and not self._hub.leader:
            return  # this rank sends no bytes
        if settings.pulls:
            self._hub.spawn(self._prepare(), "carrier")
        else:
            self._prepare_lanes()

    async def _prepare(self) -> None:
        """Start the carrier (transfer server) ahead of its use; only log a failure."""
        try:
            await self.get()
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            logger.warning("channel %s: trying again to start a transfer process (carrier): %s", self._hub.name, error)

    async def get(self) -> Carrier:
        """Return the carrier (transfer server) of this process, once it listens.

        Starts the process if none runs; the channels of this process share it. Reports
        its port to the coordinator if this channel has not done so.

        :raises replicas.carry.rank_side.CarrierDied: it could not be started.
        """
        hub = self._hub
        carrier = await hub.loop.carrier(hub.address, hub.settings.carry_port, encrypt=hub.settings.encrypt)
        if carrier is not self._told:
            self._announce(carrier)
        return carrier

    def _announce(self, carrier: Carrier) -> None:
        """Send the port of a running carrier to the coordinator; remember the carrier.

        If it is another one than before, also have its death reported.
        """
        if carrier is not self._told:
            carrier.ends.append(partial(self._hub.call, self._ended, carrier))
        self._told = carrier
        self._hub.send(CarrierUp(carrier.port, carrier.certificate_hash))

    def _ended(self, carrier: Carrier) -> None:
        """Tell the coordinator (as port 0) that ``carrier`` died; forget it.

        The next :meth:`get` starts another. Does nothing for a carrier that is not the
        one reported last, or if the channel is over.
        """
        if carrier is self._told and self._hub.over is None:
            self._told = None
            self._hub.send(CarrierUp(0))

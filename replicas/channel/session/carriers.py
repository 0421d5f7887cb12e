"""This member's carrier: started before it is needed, replaced when it has died.

Channels of one process share it: a transfer is told apart by its secret. The
coordinator is told where it listens each time that changes, and each new coordinator.
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
    """:param prepare: gets lanes ready, where versions do not come through carriers."""

    def __init__(self, hub: Hub, prepare: Callable[[], None]) -> None:
        self._hub = hub
        self._prepare_lanes = prepare
        self._told: Carrier | None = None

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {LaneAhead: self._ahead}

    def new_term(self) -> None:
        if self._told is not None and self._told.usable:
            self._tell(self._told)

    def _ahead(self, message: LaneAhead) -> None:
        self._hub.several_hosts = True
        settings = self._hub.settings
        if settings.role == "source" and settings.source_ranks != "all" and not self._hub.leader:
            return  # it carries no bytes
        if settings.pulls:
            self._hub.spawn(self._prepare(), "carrier")
        else:
            self._prepare_lanes()

    async def _prepare(self) -> None:
        try:
            await self.get()
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            logger.warning("%s: no carrier yet: %s", self._hub.name, error)

    async def get(self) -> Carrier:
        """The carrier, which listens.

        :raises replicas.carry.rank_side.CarrierDied: none could be started.
        """
        hub = self._hub
        carrier = await hub.loop.carrier(hub.address, hub.settings.carry_port, encrypt=hub.settings.encrypt)
        if carrier is not self._told:
            self._tell(carrier)
        return carrier

    def _tell(self, carrier: Carrier) -> None:
        if carrier is not self._told:
            carrier.ends.append(partial(self._hub.call, self._ended, carrier))
        self._told = carrier
        self._hub.send(CarrierUp(carrier.port, carrier.certificate_hash))

    def _ended(self, carrier: Carrier) -> None:
        """Nobody is to be told of it any more; who needs one starts another."""
        if carrier is self._told and self._hub.over is None:
            self._told = None
            self._hub.send(CarrierUp(0))

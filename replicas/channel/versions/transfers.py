"""Transfers: move or map the bytes of one version into, or out of, a slot.

Theory of operation
===================

On its own host a member *maps* a version: it opens the memory of a holder, which takes
neither time nor memory. (On its own GPU it copies the version:
:mod:`replicas.channel.versions.on_device`.) Otherwise an offer is answered when the
slot is pinned (to send) or reserved (to receive); a receiver waits for a slot as long
as the offer allows. On Go the lane's sidecar moves the bytes, after the parts on this
host or GPU were copied. A transfer may be withdrawn at any moment. Running work is not
cancelled then: the flag ``cancelled`` makes it clean up when it ends, so that no slot
is lost between two threads. A new coordinator withdraws all transfers of the old one; a
version completely received by then is held like any other, until it is committed or
discarded.

After a failure the sidecar may still work on the slot (a Gloo wait that timed out goes
on inside). Its lane therefore ends, and the slot is released only when the sidecar is
known to be dead. If that cannot be known, the slot is retired.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from replicas import errors
from replicas.channel.hub import Hub, as_wire_error
from replicas.channel.sidecar_lanes import SidecarLane, SidecarLanes
from replicas.channel.versions.free_slot import look_again
from replicas.channel.versions.manifest_exchange import ManifestExchange
from replicas.channel.versions.on_device import copy_image, copy_part
from replicas.core.versions.manifest import Manifest
from replicas.messages import (
    SlotPlace,
    TransferCancel,
    TransferDone,
    TransferFailed,
    TransferGo,
    TransferOffer,
    TransferReady,
)
from replicas.sidecar.rank_side.client import Sidecar, TransferSpec
from replicas.weights.digest import digest_of
from replicas.weights.memory.arena import Buffer, Slot

__all__ = ["Transfers"]

logger = logging.getLogger("replicas.channel")

MARGIN_S = 0.5
"""How long before the offer's deadline a receiver without a slot gives up."""
KEPT_FILLED = 8
"""Versions whose fill level is remembered: several publishes may be under way."""


class _Transfer:
    def __init__(self, offer: TransferOffer) -> None:
        self.offer = offer
        self.slot: Slot | None = None
        self.pinned = False
        self.sidecar: Sidecar | None = None
        self.manifest = b""
        self.running = False
        self.cancelled = False

    @property
    def sends(self) -> bool:
        return self.offer.role == "send"


class Transfers:
    """The transfers of one channel in this process."""

    def __init__(self, hub: Hub, lanes: SidecarLanes, manifests: ManifestExchange) -> None:
        self._hub = hub
        self._lanes = lanes
        self._manifests = manifests
        self._transfers: dict[int, _Transfer] = {}
        self._filled: dict[int, int] = {}
        hub.on_fill(self._filled_up_to)

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {TransferOffer: self._offered, TransferGo: self._go, TransferCancel: self._cancel_asked}

    def new_term(self) -> None:
        for number in list(self._transfers):
            self._cancel(number)

    def fail_all(self, error: errors.ReplicasError) -> None:
        self.new_term()

    # ------------------------------------------------------------ getting ready

    def _offered(self, offer: TransferOffer) -> None:
        transfer = _Transfer(offer)
        self._transfers[offer.transfer] = transfer
        mapped = self._copy_image if self._hub.device else self._map
        work = mapped(transfer) if offer.role == "map" else self._prepare(transfer)
        self._hub.spawn(work, f"transfer {offer.transfer}")

    async def _prepare(self, transfer: _Transfer) -> None:
        offer = transfer.offer
        try:
            transfer.manifest = await self._manifests.get(offer.manifest_hash)
            if transfer.sends:
                self._pin(transfer)
            elif not transfer.cancelled:
                await self._reserve(transfer)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self._failed(transfer, error, phase="offer")
            return
        if transfer.cancelled:
            self._let_go(transfer)
        else:
            self._hub.send(TransferReady(offer.transfer))

    async def _map(self, transfer: _Transfer) -> None:
        """Map the offered version; it is that version, however late the offer."""
        offer, hub, started = transfer.offer, self._hub, time.monotonic()
        try:
            manifest = await self._manifests.decoded(offer.manifest_hash)
            if transfer.cancelled:
                return
            slot = self._adopt(offer, manifest)
            place, digest = slot.place, offer.digest
            mapped = time.monotonic()
            if not digest:
                digest = await self._digest_pinned(slot)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self._say_failed(transfer, error, phase="map")
            return
        if not self._forget(transfer):
            hub.holdings.release(offer.version)
            return
        hub.holdings.received(slot, digest, offer.meta, "cpu")
        hub.version_held()
        verify_s = time.monotonic() - mapped
        hub.send(TransferDone(offer.transfer, digest, {}, mapped - started, verify_s, place))

    async def _copy_image(self, transfer: _Transfer) -> None:
        """Copy the version from a holder on the same GPU into a slot of our own."""
        offer, hub = transfer.offer, self._hub
        try:
            place = self._place_of(offer)
            await self._reserve(transfer)
            slot = transfer.slot
            if slot is None or transfer.cancelled:
                self._let_go(transfer)
                return
            transfer.running = True
            copied = await asyncio.to_thread(copy_image, hub.arena, place, slot, hub.device, offer.digest)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self._failed(transfer, error, phase="map")
            return
        if not self._forget(transfer):
            self._let_go(transfer)
            return
        hub.holdings.received(slot, copied.digest, offer.meta, "cuda")
        hub.version_held()
        hub.send(TransferDone(offer.transfer, copied.digest, {}, copied.copy_s, copied.verify_s, slot.place))

    def _place_of(self, offer: TransferOffer) -> SlotPlace:
        if offer.place is None:
            raise self._hub.error(errors.InternalError, f"transfer {offer.transfer} names no place")
        return offer.place

    def _adopt(self, offer: TransferOffer, manifest: Manifest) -> Slot:
        """Map the offered place as a foreign slot; drop our slot of that version."""
        buffer = Buffer.open(self._place_of(offer), offer.version)
        if buffer.nbytes != manifest.image_nbytes:
            buffer.close()
            raise self._hub.error(
                errors.InternalError,
                f"version {offer.version} has {manifest.image_nbytes} bytes, its memory {buffer.nbytes}",
            )
        self._hub.holdings.overtake(offer.version)
        self._hub.arena.release(offer.version)
        slot = self._hub.arena.adopt(offer.version, manifest, buffer, offer.digest)
        slot.sharing = offer.sharing
        return slot

    async def _digest_pinned(self, slot: Slot) -> str:
        self._hub.arena.pin(slot)
        try:
            return await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        finally:
            self._hub.arena.unpin(slot)

    def _pin(self, transfer: _Transfer) -> None:
        offer = transfer.offer
        if offer.streaming and (filling := self._hub.arena.find_filling(offer.version)) is not None:
            transfer.slot = filling  # its publish keeps it, and pins it when it is full
            return
        slot = self._hub.arena.find_pinned(offer.version)
        if slot is not None and (slot.image is None) != (offer.mode == "parts"):
            self._hub.arena.unpin(slot)
            slot = None
        if slot is None:
            raise self._hub.error(
                errors.Gone, f"{self._hub.member} no longer holds version {offer.version}", version=offer.version
            )
        transfer.slot, transfer.pinned = slot, True

    def _filled_up_to(self, version: int, nbytes: int) -> None:
        """Let sidecars send the first ``nbytes`` of a version that is being packed."""
        self._filled[version] = nbytes
        while len(self._filled) > KEPT_FILLED:
            del self._filled[next(iter(self._filled))]
        for transfer in self._transfers.values():
            if transfer.offer.version == version and transfer.sidecar is not None:
                transfer.sidecar.progress(transfer.offer.transfer, nbytes)

    async def _reserve(self, transfer: _Transfer) -> None:
        hub, offer = self._hub, transfer.offer
        until = time.monotonic() + max(0.0, offer.deadline_s - MARGIN_S)
        manifest = await self._manifests.decoded(offer.manifest_hash)
        hub.holdings.overtake(offer.version)
        while not transfer.cancelled:
            changed = hub.holdings.event()
            hub.arena.release(offer.version)
            transfer.slot = await asyncio.to_thread(hub.arena.acquire, offer.version, manifest)
            if transfer.slot is not None:
                transfer.slot.sharing = offer.sharing
                return
            left = until - time.monotonic()
            if left <= 0:
                raise hub.error(
                    errors.Busy,
                    f"{hub.member} has no free slot for version {offer.version}: {hub.arena.in_use()}",
                    version=offer.version,
                    members=[hub.member.name],
                )
            await look_again(changed, left)

    # ------------------------------------------------------------ moving

    def _go(self, go: TransferGo) -> None:
        transfer = self._transfers.get(go.transfer)
        if transfer is None or transfer.slot is None or transfer.running:
            error = errors.InternalError(f"transfer {go.transfer} cannot go: {self._hub.member} is not ready for it")
            self._hub.send(TransferFailed(go.transfer, as_wire_error(error, channel=self._hub.name, phase="transfer")))
            return
        transfer.running = True
        self._hub.spawn(self._move(transfer, transfer.slot, go), f"transfer {go.transfer}")

    async def _move(self, transfer: _Transfer, slot: Slot, go: TransferGo) -> None:
        lane: SidecarLane | None = None
        try:
            if go.places:
                manifest = await self._manifests.decoded(transfer.offer.manifest_hash)
                await asyncio.to_thread(self._copy_parts, manifest, slot, go.places)
            if go.lane:
                lane = self._lanes.get(go.lane)
                done = await self._through(lane, transfer, slot, go)
            else:
                done = await self._alone(transfer, slot)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            self._say_failed(transfer, error, phase="transfer")
            if lane is not None and not await lane.gone():
                logger.warning("%s: %r is retired: its sidecar did not die", self._hub.name, slot)
                return
            self._let_go(transfer)
            return
        transfer.running = False
        self._forget(transfer)
        if transfer.cancelled:
            self._let_go(transfer)
            return
        known = self._hub.holdings
        place = None
        if transfer.sends:
            if done.image_digest:
                known.note(transfer.offer.version, digest=done.image_digest)
            self._unpin(transfer, slot)
        else:
            device = "cuda" if self._hub.device or (lane is not None and lane.backend == "nccl") else "cpu"
            known.received(slot, done.image_digest, transfer.offer.meta, device)
            place = slot.place  # others may map it from now on
            self._hub.version_held()
        self._hub.send(msgspec.structs.replace(done, place=place))

    async def _through(self, lane: SidecarLane, transfer: _Transfer, slot: Slot, go: TransferGo) -> TransferDone:
        if lane.sidecar is None:
            raise self._hub.error(errors.Gone, f"lane {go.lane} is gone", hint="")
        offer = transfer.offer
        owned = [number for number, route in enumerate(go.routes) if route and route[0] == lane.rank]
        if offer.role == "map" or (transfer.sends and not owned):
            raise self._hub.error(errors.InternalError, f"transfer {go.transfer}: nothing to send in lane {go.lane}")
        spec = TransferSpec(
            transfer=go.transfer,
            role=offer.role,
            mode=offer.mode,
            manifest=transfer.manifest,
            routes=go.routes,
            part=owned[0] if offer.mode == "parts" and transfer.sends else None,
            timeout_s=go.deadline_s,
            digest=offer.digest if transfer.sends else "",
            streaming=offer.streaming,
        )
        moving = lane.sidecar.transfer(spec, slot.buffer)
        if offer.streaming:
            transfer.sidecar = lane.sidecar
            known = self._filled.get(offer.version, 0)
            lane.sidecar.progress(go.transfer, slot.data.numel() if slot.state == "held" else known)
        result = await moving
        transfer.sidecar = None
        return TransferDone(
            transfer=go.transfer,
            image_digest=result.image_digest,
            part_digests=result.part_digests,
            transfer_s=result.transfer_s,
            verify_s=result.verify_s,
        )

    async def _alone(self, transfer: _Transfer, slot: Slot) -> TransferDone:
        """All parts were copied on this host: compute the digest."""
        started = time.monotonic()
        digest = await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        return TransferDone(transfer.offer.transfer, digest, {}, 0.0, time.monotonic() - started)

    def _copy_parts(self, manifest: Manifest, slot: Slot, places: tuple[SlotPlace, ...]) -> None:
        """Worker thread: copy the parts on this host into the image."""
        for place in places:
            copy_part(self._hub.arena, manifest, place, slot, self._hub.device)

    # ------------------------------------------------------------ ends

    def _cancel_asked(self, message: TransferCancel) -> None:
        self._cancel(message.transfer)

    def _cancel(self, number: int) -> None:
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        transfer.cancelled = True
        if transfer.slot is not None and not transfer.running:
            self._let_go(transfer)
        self._hub.holdings.protect()

    def _forget(self, transfer: _Transfer) -> bool:
        """Remove it; False: it was withdrawn, and its number may be reused."""
        number = transfer.offer.transfer
        if self._transfers.get(number) is not transfer:
            return False
        del self._transfers[number]
        return True

    def _failed(self, transfer: _Transfer, error: BaseException, *, phase: str) -> None:
        self._say_failed(transfer, error, phase=phase)
        self._let_go(transfer)

    def _say_failed(self, transfer: _Transfer, error: BaseException, *, phase: str) -> None:
        if not self._forget(transfer):
            return
        offer = transfer.offer
        logger.info("%s: transfer %d of version %d: %s", self._hub.name, offer.transfer, offer.version, error)
        wire = as_wire_error(error, channel=self._hub.name, phase=phase, version=offer.version)
        self._hub.send(TransferFailed(offer.transfer, wire))

    def _let_go(self, transfer: _Transfer) -> None:
        slot, transfer.slot = transfer.slot, None
        if slot is None:
            return
        if transfer.sends:
            self._unpin(transfer, slot)
        else:
            self._hub.arena.free(slot)

    def _unpin(self, transfer: _Transfer, slot: Slot) -> None:
        if transfer.pinned:
            transfer.pinned = False
            self._hub.arena.unpin(slot)

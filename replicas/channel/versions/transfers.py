"""Transfers: move, pull or map the bytes of one version.

Theory of operation
===================

On its own host a member *maps* a version: it opens the memory of a holder, which takes
neither time nor memory. (On its own GPU it copies the version:
:mod:`replicas.channel.versions.on_device`.) Otherwise it answers an offer when the slot
is pinned (to send) or reserved (to receive); a receiver waits for a slot as long as the
offer allows. When all are ready, the coordinator sends the Go of an operation, and the
lane's sidecar broadcasts the slot, or fills it. A transfer may be withdrawn at any
moment. Running work is then not cancelled: it cleans up when it ends, so that no slot
is lost between two threads. A new coordinator withdraws all transfers of the old one; a
version completely received by then is held like any other, until it is committed or
discarded.

After a failure the sidecar may still work on the slot (a timed-out Gloo wait continues
inside). Its lane ends, and the slot is retired unless the sidecar's death is confirmed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from replicas import errors
from replicas import messages as wire
from replicas.carry.rank_side import PullFailed, cut_off
from replicas.carry.wire import Pulled
from replicas.channel.session.carriers import Carriers
from replicas.channel.session.hub import Hub, Part, as_wire_error
from replicas.channel.session.sidecar_lanes import SidecarLanes
from replicas.channel.versions.carried import Carried, Transfer, scratch_memory
from replicas.channel.versions.filling import free_slot
from replicas.channel.versions.manifest_exchange import ManifestExchange
from replicas.channel.versions.on_device import copy_image, copy_part, put_part, take_out
from replicas.common.logs import Log
from replicas.core.base.manifest import Manifest
from replicas.memory.held_memory import is_in_proc
from replicas.weights.copies.digest import digest_of
from replicas.weights.memory.arena import Slot
from replicas.weights.memory.buffers import Buffer

logger = Log("replicas.channel")

MARGIN_S = 0.5
"""Seconds before the offer's deadline when a receiver without a slot gives up."""
_Step = Callable[[Transfer], Coroutine[Any, Any, wire.TransferDone | None]]
KEPT_FILLED = 8
"""Versions whose fill level is remembered: several publishes may be under way."""


class Transfers(Part):
    """Moves versions to and from this member, as the coordinator offers them."""

    def __init__(self, hub: Hub, lanes: SidecarLanes, carriers: Carriers, manifests: ManifestExchange) -> None:
        """Start without transfers. ``lanes`` run broadcasts, ``carriers`` give the
        process that serves and pulls, ``manifests`` gets those of offered versions."""
        self._hub = hub
        self._lanes = lanes
        self._carriers = carriers
        self._manifests = manifests
        self._transfers: dict[int, Transfer] = {}
        self._filled: dict[int, int] = {}

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return the functions that handle the coordinator's messages, by type."""
        return {wire.TransferOffer: self._offered, wire.TransferCancel: self._cancel}

    def new_term(self) -> None:
        """Withdraw all transfers: the old coordinator offered them."""
        for number in list(self._transfers):
            self._cancel(wire.TransferCancel(number))

    def filled_up_to(self, version: int, nbytes: int) -> None:
        """Let the transfer server (carrier) send the version's first ``nbytes``."""
        self._filled[version] = nbytes
        while len(self._filled) > KEPT_FILLED:
            del self._filled[next(iter(self._filled))]
        for transfer in self._transfers.values():
            if transfer.offer.version == version and transfer.sends:
                for carried in transfer.carried:
                    if not carried.scratch:
                        carried.filled(nbytes)

    def _offered(self, offer: wire.TransferOffer) -> None:
        """Start the task for an offer: map, serve, pull, or get a slot ready."""
        transfer = self._transfers.setdefault(offer.transfer, Transfer(offer))  # a known one was pulled wrong
        transfer.offer = offer
        steps: dict[str, tuple[_Step, str]] = {
            "map": (self._copy_image if self._hub.device else self._map, "map"),
            "serve": (self._serve, "transfer"),
            "pull": (self._pull, "transfer"),
        }
        self._spawn(transfer, *steps.get(offer.role, (self._prepare, "offer")))

    def broadcast(self, go: wire.OperationGo) -> None:
        """Start the task that sends this member's slot, or receives into it, by the
        broadcast that ``go`` starts. Send OperationFailed if no slot is ready."""
        transfer = self._transfers.get(go.transfer)
        if transfer is None or transfer.slot is None or transfer.running:
            text = f"transfer {go.transfer} cannot start: {self._hub.member} is not ready"
            told = as_wire_error(errors.InternalError(text), channel=self._hub.name, phase="transfer")
            self._hub.send(wire.OperationFailed(go.operation, told))
            return
        transfer.running = True
        self._spawn(transfer, partial(self._broadcast, slot=transfer.slot, go=go), "transfer")

    def _spawn(self, transfer: Transfer, step: _Step, phase: str) -> None:
        """Start a task that runs ``step``; ``phase`` names it in errors."""
        self._hub.spawn(self._run(transfer, step, phase), f"transfer {transfer.offer.transfer}")

    async def _run(self, transfer: Transfer, step: _Step, phase: str) -> None:
        """Run one step, and send its result; after a failure free the slot, if safe."""
        offer, hub = transfer.offer, self._hub
        try:
            done = await step(transfer)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            if self._remove_transfer(transfer):
                logger.info("channel %s: transfer %d of version %d: %s", hub.name, offer.transfer, offer.version, error)
                told = as_wire_error(error, channel=hub.name, phase=phase, version=offer.version)
                holders = error.cut if isinstance(error, PullFailed) else {}
                hub.send(wire.TransferFailed(offer.transfer, told, holders))
            if not await transfer.end_carried(hub.arena):
                logger.warning("channel %s: giving up %r: its carrier process did not die", hub.name, transfer.slot)
            elif transfer.lane is not None and not await transfer.lane.gone():
                logger.warning("channel %s: giving up %r: its sidecar process did not die", hub.name, transfer.slot)
            else:
                self._let_go(transfer)
            return
        if done is not None and transfer.slot is not None:
            self._ended(transfer, transfer.slot, done)
        elif transfer.cancelled:
            self._let_go(transfer)
        else:
            hub.send(wire.TransferReady(offer.transfer))

    def _ended(self, transfer: Transfer, slot: Slot, done: wire.TransferDone) -> None:
        """Record what a step moved, and send TransferDone unless it was withdrawn."""
        offer, hub = transfer.offer, self._hub
        if offer.role == "pull":
            self._pulled(transfer, slot, done)
        elif not self._remove_transfer(transfer):
            self._let_go(transfer)
        elif transfer.sends:
            hub.held_versions.record_facts(offer.version, digest=done.image_digest)
            self._let_go(transfer)
            hub.send(done)
        else:
            nccl = transfer.lane is not None and transfer.lane.backend == "nccl"
            hub.held_versions.received(slot, done.image_digest, offer.meta, "cuda" if hub.device or nccl else "cpu")
            place = done.place or slot.place  # others may map it from now on
            hub.tell(Part.versions_grown)
            hub.send(msgspec.structs.replace(done, place=place))

    # ------------------------------------------------------------ through the carrier

    async def _serve(self, transfer: Transfer) -> None:
        """Have the carrier serve the slot to other hosts; return when it has begun. It
        serves until the transfer is cancelled."""
        self._pin(transfer)
        carrier = await self._carriers.get()
        slot, offer = transfer.slot, transfer.offer
        if transfer.cancelled or slot is None:
            return
        hub, nbytes, memory, device = self._hub, slot.data.numel(), slot.buffer, self._hub.device
        filled = nbytes if slot.state == "held" else self._filled.get(slot.version, 0)
        base = await transfer.take_base(hub, nbytes)
        if device:  # the bytes travel through host memory
            memory, filled = await scratch_memory(hub, slot.version, nbytes), 0
        carried = transfer.carry(hub, carrier, offer.part, memory, nbytes, base)
        if self._is_over(transfer):
            await self._stop_carrying(transfer)
            return
        carried.serve(filled, slot.manifest.regions if slot.manifest is not None and base is not None else ())
        if device and await transfer.is_filled(hub, slot):
            await asyncio.to_thread(take_out, slot, memory.readable(), device)
            if not self._is_over(transfer):
                carried.filled(nbytes)

    def _is_over(self, transfer: Transfer) -> bool:
        """Return True if the transfer was withdrawn, or has ended."""
        return self._transfers.get(transfer.offer.transfer) is not transfer

    def slot_wanted(self) -> None:
        """Have delta bases released, without waiting, so that their slots get free."""
        for transfer in self._transfers.values():
            if transfer.base is not None and transfer.sends:
                self._hub.spawn(transfer.drop_base(self._hub.arena), f"the base of transfer {transfer.offer.transfer}")

    async def _pull(self, transfer: Transfer) -> wire.TransferDone | None:
        """Pull the version into a slot, from which others may pull meanwhile. Return
        the report to send, or None if the transfer was withdrawn."""
        offer, hub = transfer.offer, self._hub
        manifest = await self._manifests.decoded(offer.manifest_hash)
        if not transfer.running:  # else this is a second pull
            await self._reserve_and_carry(transfer, manifest)
        slot = transfer.slot
        if transfer.cancelled or slot is None:
            await self._stop_carrying(transfer)
            return None
        hub.send(wire.TransferReady(offer.transfer))
        started, told = time.monotonic(), dict.fromkeys(transfer.carried, 0)

        def moved(carried: Carried, nbytes: int) -> None:
            """Send the bytes that all parts have so far; ``nbytes`` of ``carried``."""
            told[carried] = nbytes
            hub.send(wire.TransferMoved(offer.transfer, sum(told.values())))

        async def pull(carried: Carried, one: wire.PartPull) -> Pulled:
            """Pull one part from its holders, verify it, and copy it into the slot."""
            source = carried.memory.readable()
            known = "" if hub.device else one.digest or offer.digest  # a device's digest is of another kind
            pulled = await carried.pull(one.holders, offer.deadline_s, known, partial(moved, carried))
            if hub.device and one.digest and await asyncio.to_thread(digest_of, source, slot.digest_kind) != one.digest:
                raise hub.error(errors.SyncError, f"part {one.part} of version {offer.version} has a wrong digest")
            if carried.scratch:
                await asyncio.to_thread(put_part, manifest, carried.part, source, slot, hub.device)
            return pulled

        pulls = map(pull, transfer.carried, offer.pulls)
        found: list[Pulled] = []
        for outcome in await asyncio.gather(*pulls, return_exceptions=True):  # all have ended, also when one fails
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
        here = time.monotonic()
        if offer.mode == "image" and not hub.device:
            digest = found[0].digest
        else:
            digest = await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        return wire.TransferDone(
            offer.transfer,
            digest,
            here - started,
            time.monotonic() - here,
            received=dict(sum((Counter(pulled.received) for pulled in found), Counter())),
            holders={name: why for pulled in found for name, why in cut_off(pulled).items()},
            wrong={name: why for pulled in found for name, why in pulled.wrong.items()},
        )

    async def _reserve_and_carry(self, transfer: Transfer, manifest: Manifest) -> None:
        """Reserve a slot. Copy the parts that other members of this host have into it,
        and prepare memory into which the carrier pulls the other parts."""
        offer = transfer.offer
        slot = await self._reserve(transfer)
        transfer.running = True
        for place in offer.places:
            await asyncio.to_thread(copy_part, self._hub.arena, manifest, place, slot, self._hub.device)
        for one in offer.pulls:
            carrier = await self._carriers.get()
            memory, nbytes = slot.buffer, slot.data.numel()
            base = None if one.part >= 0 else await transfer.take_base(self._hub, nbytes)
            if one.part >= 0:
                nbytes = manifest.part_nbytes(one.part)
            if one.part >= 0 or self._hub.device:
                memory = await scratch_memory(self._hub, offer.version, nbytes)
            transfer.carry(self._hub, carrier, one.part, memory, nbytes, base)

    def _pulled(self, transfer: Transfer, slot: Slot, done: wire.TransferDone) -> None:
        """Record the pulled version, send ``done`` (its TransferDone), and keep the
        slot pinned: the carrier serves it to others until the transfer is over."""
        hub, offer = self._hub, transfer.offer
        transfer.unpin_base(hub.arena)  # a second pull uses no deltas; the next version may need its slot
        if slot.state == "held":
            hub.held_versions.record_facts(offer.version, digest=done.image_digest)
        else:
            hub.held_versions.received(slot, done.image_digest, offer.meta, "cuda" if hub.device else "cpu")
        if self._is_over(transfer):  # cancelled at its end: no member pulls from here
            hub.spawn(self._stop_carrying(transfer), f"transfer {offer.transfer} ends")
            return
        if not transfer.pinned:
            hub.arena.pin(slot)
            transfer.pinned = True
        hub.tell(Part.versions_grown)
        hub.send(msgspec.structs.replace(done, place=slot.place))

    async def _stop_carrying(self, transfer: Transfer) -> None:
        """End the transfer at the carrier; then unpin its slot, if no longer used."""
        if not await transfer.end_carried(self._hub.arena):
            logger.warning("channel %s: keeping %r: a helper process did not die", self._hub.name, transfer.slot)
            return
        slot = transfer.slot
        if transfer.pinned and slot is not None:
            transfer.slot, transfer.pinned = None, False
            self._hub.arena.unpin(slot)
        elif transfer.sends:
            self._let_go(transfer)

    # ------------------------------------------------------------ over a lane

    async def _prepare(self, transfer: Transfer) -> None:
        """Pin the slot to send, once it is full, or reserve one to receive into."""
        if self._hub.settings.encrypt:
            text = f"version {transfer.offer.version} cannot use a process group: the channel is encrypted"
            raise self._hub.error(errors.InternalError, text)
        if not transfer.sends:
            if not transfer.cancelled:
                await self._reserve(transfer)
            return
        self._pin(transfer)
        if transfer.slot is not None and not await transfer.is_filled(self._hub, transfer.slot):
            raise self._hub.error(errors.Gone, "the publisher has not copied the version in time", hint="")

    async def _map(self, transfer: Transfer) -> wire.TransferDone | None:
        """Map a holder's memory of the version here; return the report to send.

        Return None if the transfer was withdrawn.
        """
        offer, hub, started = transfer.offer, self._hub, time.monotonic()
        manifest = await self._manifests.decoded(offer.manifest_hash)
        place = self._place_of(offer)
        if is_in_proc(place):
            buffer = Buffer.open(place, offer.version)
        else:  # which may block on a frozen process
            buffer = await asyncio.to_thread(Buffer.open, place, offer.version)
        if transfer.cancelled:
            buffer.close()
            return None
        if buffer.nbytes != manifest.image_nbytes:
            buffer.close()
            text = f"version {offer.version} has {manifest.image_nbytes} bytes, but its memory {buffer.nbytes}"
            raise hub.error(errors.InternalError, text)
        hub.held_versions.unprotect_up_to(offer.version)
        hub.arena.release(offer.version)
        slot = hub.arena.adopt(offer.version, manifest, buffer, offer.digest)
        slot.sharing = offer.sharing
        transfer.slot, transfer.running = slot, True
        own, digest, mapped = slot.place, offer.digest, time.monotonic()
        if not digest:
            hub.arena.pin(slot)
            try:
                digest = await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
            finally:
                hub.arena.unpin(slot)
        return wire.TransferDone(offer.transfer, digest, mapped - started, time.monotonic() - mapped, own)

    async def _copy_image(self, transfer: Transfer) -> wire.TransferDone | None:
        """Copy the version from a holder on the same GPU into a slot of our own; return
        the report to send."""
        offer, hub = transfer.offer, self._hub
        place = self._place_of(offer)
        slot = await self._reserve(transfer)
        transfer.running = True
        copied = await asyncio.to_thread(copy_image, hub.arena, place, slot, hub.device, offer.digest)
        digest, copy_s, verify_s = copied
        return wire.TransferDone(offer.transfer, digest, copy_s, verify_s)

    def _place_of(self, offer: wire.TransferOffer) -> wire.SlotPlace:
        """Return where the offer's holder has its memory; raise if it does not say."""
        if offer.place is None:
            raise self._hub.error(errors.InternalError, f"transfer {offer.transfer} names no place")
        return offer.place

    def _pin(self, transfer: Transfer) -> None:
        """Give the transfer the slot to send, pinned or being filled; or raise Gone."""
        offer = transfer.offer
        if offer.streaming and (filling := self._hub.arena.find_filling(offer.version)) is not None:
            transfer.slot = filling  # the publish keeps the slot, and pins it when full
            return
        slot = self._hub.arena.find_pinned(offer.version)
        if slot is not None and (slot.image is None) != (offer.mode == "parts"):
            self._hub.arena.unpin(slot)
            slot = None
        if slot is None:
            text = f"{self._hub.member} no longer holds version {offer.version}"
            raise self._hub.error(errors.Gone, text, version=offer.version)
        transfer.slot, transfer.pinned = slot, True

    async def _reserve(self, transfer: Transfer) -> Slot:
        """Wait for a free slot to receive into, and give it to the transfer.

        :raises replicas.errors.Busy, Gone: none became free in time; it was withdrawn.
        """
        hub, offer = self._hub, transfer.offer
        until = time.monotonic() + max(0.0, offer.deadline_s - MARGIN_S)
        manifest = await self._manifests.decoded(offer.manifest_hash)
        hub.held_versions.unprotect_up_to(offer.version)

        def check() -> None:
            """Raise Gone if the transfer was withdrawn."""
            if transfer.cancelled:
                raise hub.error(errors.Gone, "the coordinator has withdrawn the transfer", hint="")

        text = f"{hub.member} has no free slot for version {offer.version}"
        slot = await free_slot(hub, offer.version, manifest, until=until, check=check, text=text)
        slot.sharing = offer.sharing
        transfer.slot = slot
        return slot

    async def _broadcast(self, transfer: Transfer, slot: Slot, go: wire.OperationGo) -> wire.TransferDone:
        """Run the broadcast of ``go`` when its lane (process group) is free. Tell the
        coordinator that it is done; digest the slot; return the report to send."""
        hub, offer, started = self._hub, transfer.offer, time.monotonic()
        try:
            transfer.lane = lane = self._lanes.get(go.lane)
            image = (wire.Segment("uint8", (slot.buffer.readable().numel(),)),)
            go = msgspec.structs.replace(go, segments=(image,) * len(go.participants))
            inputs, outputs = (slot.buffer, None) if transfer.sends else (None, slot.buffer)
            async with lane.turn:
                await lane.run(go, "broadcast", "sum", inputs, outputs)
        except (OSError, RuntimeError, errors.ReplicasError) as error:
            told = as_wire_error(error, channel=hub.name, phase="transfer", version=offer.version)
            hub.send(wire.OperationFailed(go.operation, told))
            raise
        moved = time.monotonic()
        hub.send(wire.OperationDone(go.operation))
        digest = (offer.digest or hub.held_versions.digest(offer.version)) if transfer.sends else ""
        digest = digest or await asyncio.to_thread(digest_of, slot.data, slot.digest_kind)
        return wire.TransferDone(offer.transfer, digest, moved - started, time.monotonic() - moved)

    def _cancel(self, message: wire.TransferCancel) -> None:
        """Withdraw a transfer; free its slot, now or when running work has ended."""
        transfer = self._transfers.pop(message.transfer, None)
        if transfer is None:
            return
        transfer.cancelled = True
        if transfer.carried or transfer.offer.role == "pull":  # a running pull then fails, and frees its slot
            self._hub.spawn(self._stop_carrying(transfer), f"transfer {message.transfer} ends")
        elif not transfer.running:
            self._let_go(transfer)
        self._hub.held_versions.protect()

    def _remove_transfer(self, transfer: Transfer) -> bool:
        """Forget an ended transfer; return False if it was withdrawn before."""
        if self._is_over(transfer):
            return False
        del self._transfers[transfer.offer.transfer]
        return True

    def _let_go(self, transfer: Transfer) -> None:
        """Take the slot from the transfer; unpin it, and on a receiver also free it."""
        slot, transfer.slot = transfer.slot, None
        if slot is None:
            return
        if transfer.pinned:
            transfer.pinned = False
            self._hub.arena.unpin(slot)
        if transfer.sends:
            return
        if slot.foreign or slot.state == "held":  # mapped, or pulled and wrong
            self._hub.held_versions.release(transfer.offer.version)
        else:
            self._hub.arena.free(slot)

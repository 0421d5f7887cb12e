"""One transfer as a member sees it, and its memory in the hands of the carrier: served,
or pulled into."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicas import errors
from replicas.carry.rank_side import Carrier, CarrierDied
from replicas.carry.wire import Pulled
from replicas.channel.session.hub import Hub
from replicas.channel.session.sidecar_lanes import SidecarLane
from replicas.channel.versions.on_device import take_out
from replicas.messages import HolderAddress, TransferOffer
from replicas.sidecar.rank_side.sidecar_handle import Sidecar
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer

DEATH_TIMEOUT_S = 5.0


class Carried:
    """One part of a version in one attempt, known to both ends by its secret.

    Its number at a carrier names the member, too: two of one process share a carrier.

    :param member: the name of this one.
    :param part: its number; -1: the whole version.
    :param memory: ends with the part's ``nbytes`` bytes.
    :param base: ends with as many bytes of a version that the other end may have, too.
    :param scratch: the memory is closed at the end; else it is a slot's.
    :param encrypt: served and pulled in TLS alone.
    :ivar on_received: called with the bytes received so far, now and then.
    """

    def __init__(
        self,
        carrier: Carrier,
        member: str,
        secret: bytes,
        part: int,
        memory: Buffer,
        nbytes: int,
        *,
        base: Buffer | None = None,
        scratch: bool = False,
        encrypt: bool = False,
    ) -> None:
        self.part, self.memory, self.scratch = part, memory, scratch
        self._base = None if base is None else (base, (base.nbytes - nbytes, nbytes))
        self._carrier, self._secret, self._encrypt = carrier, secret, encrypt
        self._number = self._number_at(member)
        self._place = (memory.nbytes - nbytes, nbytes)
        self.on_received: Callable[[int], object] = lambda nbytes: None

    def _number_at(self, member: str) -> int:
        text = f"{self.part} {member}".encode()
        digest = hashlib.blake2b(text, key=self._secret, digest_size=8, person=b"transfer").digest()
        return int.from_bytes(digest, "little")

    def serve(self, filled: int, regions: Sequence[tuple[int, int, int]] = ()) -> None:
        """Serve it to whoever knows the secret; ``filled`` bytes of it so far.

        :param regions: where elements of which size are in it.
        """
        self._carrier.serve(
            self._number,
            self._secret,
            self.memory,
            self._place,
            filled,
            self._base,
            regions,
            encrypt=self._encrypt,
        )

    async def drop_base(self) -> bool:
        """Have the carrier let go of the base; False: it neither did nor died."""
        try:
            await self._carrier.drop_base(self._number)
        except CarrierDied:
            return await self._carrier.wait_dead(DEATH_TIMEOUT_S)
        return True

    def filled(self, nbytes: int) -> None:
        self._carrier.filled(self._number, nbytes)

    async def pull(self, holders: Sequence[HolderAddress], timeout_s: float, source: str, digest: str) -> Pulled:
        """Pull it into the memory; ``digest``: of it, if that is known.

        :raises replicas.carry.rank_side.PullFailed: no holder is left.
        :raises CarrierDied: it died.
        """
        self._carrier.receivers[self._number] = self.on_received
        try:
            return await self._carrier.pull(
                self._number,
                self._secret,
                self.memory,
                self._place,
                holders,
                timeout_s,
                source,
                digest,
                self._base,
                encrypt=self._encrypt,
                numbers=tuple(self._number_at(holder.name) for holder in holders),
            )
        finally:
            self._carrier.receivers.pop(self._number, None)

    async def end(self) -> bool:
        """Have the carrier let go of the memory; False: it neither did nor died."""
        try:
            await self._carrier.withdraw(self._number, "it is not needed any more")
        except CarrierDied:
            if not await self._carrier.wait_dead(DEATH_TIMEOUT_S):
                return False
        if self.scratch:
            self.memory.close()
        return True


@dataclass(eq=False, repr=False)
class Transfer:
    """One transfer of this member.

    ``running``: its slot is worked on. ``cancelled``: it was withdrawn.
    """

    offer: TransferOffer
    slot: Slot | None = None
    pinned: bool = False
    lane: SidecarLane | None = None
    streams_to: Sidecar | None = None
    carried: list[Carried] = field(default_factory=list)
    base: Slot | None = None
    _copied: Buffer | None = None
    manifest: bytes = b""
    running: bool = False
    cancelled: bool = False

    @property
    def sends(self) -> bool:
        return self.offer.role in ("send", "serve")

    async def is_filled(self, hub: Hub, slot: Slot) -> bool:
        """Wait until the slot is complete; False: it is not in time, or withdrawn."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.offer.deadline_s):
                while slot.state == "filling" and not self.cancelled:
                    await hub.holdings.changed.wait()
        return slot.state in ("held", "leaving") and not self.cancelled

    def carry(
        self, hub: Hub, carrier: Carrier, part: int, memory: Buffer, nbytes: int, base: Buffer | None, *, scratch: bool
    ) -> Carried:
        """Put this memory into the hands of the carrier, until :meth:`end_carried`."""
        name, secret, encrypt = hub.member.name, self.offer.secret, hub.settings.encrypt
        carried = Carried(carrier, name, secret, part, memory, nbytes, base=base, scratch=scratch, encrypt=encrypt)
        self.carried.append(carried)
        return carried

    async def end_carried(self, arena: Arena) -> bool:
        """Return True if the carrier uses none of its memory any more."""
        ended = all([await carried.end() for carried in self.carried])
        if ended:
            self.unpin_base(arena)
        return ended

    async def take_base(self, hub: Hub, nbytes: int) -> Buffer | None:
        """The memory of the version to which there are deltas, if it still fits.

        What lies on a GPU is copied out: a delta is made, and applied, in host memory.
        """
        base = hub.arena.find_pinned(self.offer.base) if self.offer.base else None
        if base is not None and base.data.numel() != nbytes:
            hub.arena.unpin(base)
            base = None
        if base is None or not base.buffer.device:
            self.base = base
            return None if base is None else base.buffer
        try:  # this pin is ours alone: a slot that is wanted meanwhile waits for the copy
            self._copied = await scratch_memory(hub, base.version, nbytes)
            await asyncio.to_thread(take_out, base, self._copied.readable(), hub.device)
        except errors.NoCapacity:  # then all comes as bytes
            return None
        finally:
            hub.arena.unpin(base)
        return self._copied

    def unpin_base(self, arena: Arena) -> None:
        base, self.base = self.base, None
        if base is not None:
            arena.unpin(base)
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.close()

    async def drop_base(self, arena: Arena) -> None:
        """Have no more deltas made, and let go of the base."""
        if all([await carried.drop_base() for carried in self.carried]):
            self.unpin_base(arena)


async def scratch_memory(hub: Hub, version: int, nbytes: int) -> Buffer:
    """Host memory for bytes that are not in a slot as they travel."""
    return await asyncio.to_thread(Buffer.allocate, nbytes, f"replicas-{hub.name}-part-of-{version}")

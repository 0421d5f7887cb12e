"""One transfer of a member, and the memory that its carrier serves or pulls into."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from replicas import errors
from replicas.carry.rank_side import Carrier, CarrierDied
from replicas.carry.wire import Pulled
from replicas.channel.session.hub import Hub
from replicas.channel.session.sidecar_lanes import SidecarLane
from replicas.channel.versions.on_device import take_out
from replicas.messages import HolderAddress, TransferOffer
from replicas.weights.memory.arena import Arena, Slot
from replicas.weights.memory.buffers import Buffer

DEATH_TIMEOUT_S = 5.0


class Carried:
    """A version's bytes (or a part's) that this member's carrier serves or pulls.

    The *carrier* is this process's transfer server, a child process. Both ends know the
    secret of the transfer. Its number at the carrier depends on the member: those of
    one process share a carrier.

    :param part: number of the part, or -1 for the whole version.
    :param memory: its last ``nbytes`` bytes are the part's; a header may precede.
    :param base: its last bytes are those of a version that the peer may have, too.
    :ivar scratch: True if the memory is closed at the end, False for a slot's.
    """

    scratch = False

    def __init__(
        self, hub: Hub, carrier: Carrier, secret: bytes, part: int, memory: Buffer, nbytes: int, base: Buffer | None
    ) -> None:
        """Store the arguments; the carrier is told by :meth:`serve` or :meth:`pull`.

        :param carrier: this process's transfer server.
        :param secret: of the transfer, which both ends know.
        :param part: number of the part; -1 for the whole version.
        :param memory: its last ``nbytes`` bytes are the part's; a header may precede.
        :param base: its last ``nbytes`` bytes are an older version's, for deltas; None:
            no deltas.
        """
        self.part, self.memory = part, memory
        self._base = None if base is None else (base, (base.nbytes - nbytes, nbytes))
        self._carrier, self._secret = carrier, secret
        self._address, self._encrypt = hub.address, hub.settings.encrypt
        self._number = self._number_at(hub.member.name)
        self._lent = self._number, secret, memory, (memory.nbytes - nbytes, nbytes)

    def _number_at(self, member: str) -> int:
        """Return the number by which the carrier of ``member`` knows the part.

        It is a hash, keyed by the secret, that both ends can compute.
        """
        text = f"{self.part} {member}".encode()
        digest = hashlib.blake2b(text, key=self._secret, digest_size=8, person=b"transfer").digest()
        return int.from_bytes(digest, "little")

    def serve(self, filled: int, regions: Sequence[tuple[int, int, int]] = ()) -> None:
        """Have the carrier serve the first ``filled`` bytes to members with the secret.

        It does not wait. :meth:`filled` raises the number, and :meth:`end` ends it.

        :param regions: (start, end, bytes of an element) of ranges of the data, for
            deltas.
        """
        self._carrier.serve(*self._lent, filled, self._base, regions, encrypt=self._encrypt)

    async def drop_base(self) -> bool:
        """Have the carrier stop using the base, the older version for deltas.

        Wait for that. Return True once it has, or is dead; False if the carrier may
        still use the memory.
        """
        return await self._is_unmapped(self._carrier.drop_base(self._number))

    def filled(self, nbytes: int) -> None:
        """Tell the carrier that the first ``nbytes`` of the part can be served."""
        self._carrier.filled(self._number, nbytes)

    async def pull(
        self, holders: Sequence[HolderAddress], timeout_s: float, digest: str, on_received: Callable[[int], object]
    ) -> Pulled:
        """Have the carrier pull the part into the memory; wait, and return the result.

        The carrier serves the bytes to other members, too, until :meth:`end`.

        :param holders: members to pull from, in order of preference.
        :param timeout_s: limit of the pull in seconds.
        :param digest: expected digest of the part; empty: do not compare.
        :param on_received: called on the loop with the number of bytes received so far.
        :raises replicas.carry.rank_side.PullFailed: no holder is left, or the time is
            up.
        :raises CarrierDied: the carrier died.
        """
        numbers = tuple(self._number_at(holder.name) for holder in holders)
        how = timeout_s, self._address, digest, self._base
        self._carrier.receivers[self._number] = on_received
        try:
            return await self._carrier.pull(*self._lent, holders, *how, encrypt=self._encrypt, numbers=numbers)
        finally:
            self._carrier.receivers.pop(self._number, None)

    async def end(self) -> bool:
        """Have the carrier stop using the memory, and wait for that.

        Return True once it has, or is dead; close the memory if it is a scratch buffer.
        Return False if the carrier may still use the memory, which then must not be
        reused.
        """
        ended = await self._is_unmapped(self._carrier.withdraw(self._number, "the transfer is over"))
        if ended and self.scratch:
            self.memory.close()
        return ended

    async def _is_unmapped(self, request: Awaitable[object]) -> bool:
        """Return True once the carrier has done ``request``, or is dead.

        Returns False if it neither answers nor dies within 5 s.
        """
        try:
            await request
        except CarrierDied:
            return await self._carrier.wait_dead(DEATH_TIMEOUT_S)
        return True


@dataclass(eq=False, repr=False)
class Transfer:
    """The move of one version to or from this member, as the coordinator offered it.

    :ivar slot: memory with the version, or for it; None until it is known.
    :ivar pinned: the transfer has a pin on the slot, which it must remove.
    :ivar lane: process group of a broadcast.
    :ivar carried: what the transfer server (carrier) serves or pulls.
    :ivar base: pinned slot of the older version for deltas.
    :ivar running: the slot is in use.
    :ivar cancelled: the transfer was withdrawn.
    """

    offer: TransferOffer
    slot: Slot | None = None
    pinned: bool = False
    lane: SidecarLane | None = None
    carried: list[Carried] = field(default_factory=list)
    base: Slot | None = None
    _copied: Buffer | None = None
    running: bool = False
    cancelled: bool = False

    @property
    def sends(self) -> bool:
        """True if this member sends the version, False if it gets it."""
        return self.offer.role in ("send", "serve")

    async def is_filled(self, hub: Hub, slot: Slot) -> bool:
        """Wait until ``slot`` is complete, up to the offer's deadline, and return True.

        Return False if it is late, was emptied, or the transfer was withdrawn.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.offer.deadline_s):
                while slot.state == "filling" and not self.cancelled:
                    await hub.held_versions.changed.wait()
        return slot.state in ("held", "leaving") and not self.cancelled

    def carry(self, hub: Hub, carrier: Carrier, part: int, memory: Buffer, nbytes: int, base: Buffer | None) -> Carried:
        """Prepare ``memory`` for the carrier; return it as a :class:`Carried`.

        The carrier may then serve it, or pull into it, until :meth:`end_carried`.

        :param part: number of the part, or -1 for the whole version.
        :param nbytes: size of the part, which is at the end of the memory.
        :param base: memory of an older version for deltas, or None.
        """
        carried = Carried(hub, carrier, self.offer.secret, part, memory, nbytes, base)
        carried.scratch = bool(hub.device) or (part >= 0 and not self.sends)
        self.carried.append(carried)
        return carried

    async def end_carried(self, arena: Arena) -> bool:
        """Have the carrier stop using the transfer's memory; wait; unpin the base.

        Return True once it has, or is dead. Return False if the carrier may still use
        some: then the base stays pinned, and the slot must not be reused.
        """
        ended = all([await carried.end() for carried in self.carried])
        if ended:
            self.unpin_base(arena)
        return ended

    async def take_base(self, hub: Hub, nbytes: int) -> Buffer | None:
        """Pin the delta base, and return its memory; None if there is none that fits.

        The base is an older version that both ends hold: only differences from it are
        sent. A base on a GPU is copied to the host, where deltas are made and applied,
        and is not pinned then; None without memory for that copy. :meth:`unpin_base`
        ends it.

        :param nbytes: size that its data must have.
        """
        base = hub.arena.find_pinned(self.offer.base) if self.offer.base else None
        if base is not None and base.data.numel() != nbytes:
            hub.arena.unpin(base)
            base = None
        if base is None or not base.buffer.device:
            self.base = base
            return None if base is None else base.buffer
        try:  # our own pin: a publish that needs this slot waits for the copy
            self._copied = await scratch_memory(hub, base.version, nbytes)
            await asyncio.to_thread(take_out, base, self._copied.readable(), hub.device)
        except errors.NoCapacity:  # then no deltas
            return None
        finally:
            hub.arena.unpin(base)
        return self._copied

    def unpin_base(self, arena: Arena) -> None:
        """Unpin the delta base, and free its copy in host memory."""
        base, self.base = self.base, None
        if base is not None:
            arena.unpin(base)
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.close()

    async def drop_base(self, arena: Arena) -> None:
        """Have the carrier stop making deltas; wait until it has, then unpin the base.

        If the carrier may still use the base, that stays pinned.
        """
        if all([await carried.drop_base() for carried in self.carried]):
            self.unpin_base(arena)


async def scratch_memory(hub: Hub, version: int, nbytes: int) -> Buffer:
    """Allocate host memory, on another thread, for bytes that do not travel in slots.

    The caller closes the buffer.

    :param version: for the name of the memory.
    :raises replicas.errors.NoCapacity: there is no memory.
    """
    return await asyncio.to_thread(Buffer.allocate, nbytes, f"replicas-{hub.name}-part-of-{version}")

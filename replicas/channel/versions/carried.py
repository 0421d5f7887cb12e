"""Memory in the hands of the carrier: served, or pulled into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from replicas.carry.rank_side import Carrier, CarrierDied
from replicas.carry.wire import Pulled
from replicas.messages import HolderAddress
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

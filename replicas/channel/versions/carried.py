"""One slot in the hands of the carrier: served, or pulled into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from replicas.carry.rank_side import Carrier, CarrierDied
from replicas.carry.wire import Pulled
from replicas.messages import HolderAddress
from replicas.weights.memory.arena import Slot

DEATH_TIMEOUT_S = 5.0


class Carried:
    """A transfer of one attempt, known to its two ends by its secret.

    :param encrypt: served and pulled in TLS alone.
    :ivar on_received: called with the bytes received so far, now and then.
    """

    def __init__(self, carrier: Carrier, secret: bytes, slot: Slot, *, encrypt: bool) -> None:
        self._carrier, self._secret, self._slot, self._encrypt = carrier, secret, slot, encrypt
        digest = hashlib.blake2b(secret, digest_size=8, person=b"transfer").digest()
        self._number = int.from_bytes(digest, "little")
        data = slot.data
        self._place = (slot.buffer.nbytes - data.numel(), data.numel())
        self.on_received: Callable[[int], object] = lambda nbytes: None

    def serve(self, filled: int) -> None:
        """Serve the slot to whoever knows the secret; ``filled`` bytes of it so far."""
        memory = self._slot.buffer
        self._carrier.serve(self._number, self._secret, memory, self._place, filled, encrypt=self._encrypt)

    def filled(self, nbytes: int) -> None:
        self._carrier.filled(self._number, nbytes)

    async def pull(self, holders: Sequence[HolderAddress], timeout_s: float, source: str) -> Pulled:
        """Pull the version into the slot.

        :raises replicas.carry.rank_side.PullFailed: no holder is left.
        :raises CarrierDied: it died.
        """
        self._carrier.receivers[self._number] = self.on_received
        try:
            return await self._carrier.pull(
                self._number,
                self._secret,
                self._slot.buffer,
                self._place,
                holders,
                timeout_s,
                source,
                encrypt=self._encrypt,
            )
        finally:
            self._carrier.receivers.pop(self._number, None)

    async def end(self) -> bool:
        """Have the carrier let go of the slot; False: it neither did nor died."""
        try:
            await self._carrier.withdraw(self._number, "it is not needed any more")
        except CarrierDied:
            return await self._carrier.wait_dead(DEATH_TIMEOUT_S)
        return True

    async def gone(self) -> bool:
        """After a failed pull: nobody uses the slot; False: that cannot be known."""
        return await self.end()

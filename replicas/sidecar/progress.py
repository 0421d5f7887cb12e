"""How far the images are packed that this sidecar sends, as its rank tells it."""

from __future__ import annotations

__all__ = ["KEPT_TRANSFERS", "PackingProgress"]

KEPT_TRANSFERS = 16
"""What is told of transfers that never begin here, or have ended already, must not pile
up."""


class PackingProgress:
    """Bytes that are there from the start of the data section, for each transfer.

    The rank packs when it likes: what is told of a transfer that has not begun is kept.
    No number stands for two transfers in the life of a sidecar.
    """

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}

    def tell(self, transfer: int, nbytes: int) -> None:
        """The first ``nbytes`` are there; a smaller number that comes later says
        nothing new."""
        self._nbytes[transfer] = max(nbytes, self._nbytes.pop(transfer, 0))
        while len(self._nbytes) > KEPT_TRANSFERS:
            del self._nbytes[next(iter(self._nbytes))]

    def of(self, transfer: int) -> int:
        """How many bytes are there."""
        return self._nbytes.get(transfer, 0)

    def forget(self, transfer: int) -> None:
        """It has ended."""
        self._nbytes.pop(transfer, None)

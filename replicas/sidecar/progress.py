"""Packing progress of the images that this sidecar sends, as reported by its rank."""

from __future__ import annotations

__all__ = ["KEPT_TRANSFERS", "PackingProgress"]

KEPT_TRANSFERS = 16
"""Limit for transfers that never began here or have ended, so they do not pile up."""


class PackingProgress:
    """Bytes packed from the start of the data section, for each transfer.

    The rank may pack early: the progress of a transfer that has not begun is kept. A
    number stands for one transfer in the life of a sidecar.
    """

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}

    def tell(self, transfer: int, nbytes: int) -> None:
        """Note that the first ``nbytes`` are packed; ignore a smaller late report."""
        self._nbytes[transfer] = max(nbytes, self._nbytes.pop(transfer, 0))
        while len(self._nbytes) > KEPT_TRANSFERS:
            del self._nbytes[next(iter(self._nbytes))]

    def of(self, transfer: int) -> int:
        """Bytes packed so far."""
        return self._nbytes.get(transfer, 0)

    def forget(self, transfer: int) -> None:
        """Forget an ended transfer."""
        self._nbytes.pop(transfer, None)

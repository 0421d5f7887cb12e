"""Memory of a GPU that is closed and not freed yet."""

from __future__ import annotations

from replicas.weights.devices import device_buffers

__all__ = ["lingering_nbytes"]


def lingering_nbytes() -> int:
    """Bytes closed in this process that other processes still have open."""
    return device_buffers._lingering.nbytes()

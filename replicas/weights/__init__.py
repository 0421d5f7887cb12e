"""Weights as bytes: memory for them, packing, loading and digests. Imports torch."""

from __future__ import annotations

from replicas.weights.devices import device_buffers  # it makes itself known to Buffer

__all__ = ["device_buffers"]

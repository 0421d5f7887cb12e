"""Weights as bytes: packing, digests, shared memory, GPUs, loading. Imports torch."""

from __future__ import annotations

from replicas.weights.devices import device_buffers  # registers its buffer kind with Buffer

__all__ = ["device_buffers"]

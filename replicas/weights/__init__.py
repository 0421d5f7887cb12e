"""Turn a model's tensors into the bytes of a slot, and back. Imports torch.

    publish: feed.Feed -> layout -> packing.Packer -> copies -> a slot of memory.arena
    load: slot or image -> loading.load_image, or changes.Difference -> model

The room does the copies, digests and checks on this host, in host or GPU memory
(``devices``). It does not move bytes to other hosts (``replicas.carry`` does), decide
which version is committed, or talk to the coordinator.
"""

from __future__ import annotations

from replicas.weights.devices import device_buffers  # registers its buffer kind with Buffer

__all__ = ["device_buffers"]

"""Copy and digest bytes in host memory; the interface to GPUs (``accelerator``).

    copying.Copier -> host_copies.HostCopies -> streaming.copy_runs (C) -> digest

User tensors may move or be freed by other threads during a copy, which the room
detects. CUDA itself is in ``replicas.weights.devices``.
"""

"""Check at join that a sidecar can open the device memory of its rank.

The rank allocates a small buffer in the same way as slots and writes a nonce into it; a
sidecar forked for this purpose opens the buffer and returns the bytes. So join finds a
container that forbids CUDA IPC, a ``CUDA_VISIBLE_DEVICES`` that hides the rank's GPU
from its sidecars, or an unusable driver, before the first transfer. (The configuration
of torch's allocator does not matter: it does not allocate slots.)
"""

from __future__ import annotations

import asyncio
import os
import secrets

import torch

from replicas.errors import Preflight
from replicas.sidecar.rank_side.forkserver_client import Forkserver
from replicas.sidecar.rank_side.sidecar_handle import Sidecar, SidecarDied, SidecarFailed
from replicas.weights.copies.accelerator import device_of
from replicas.weights.memory.buffers import Buffer

NONCE_NBYTES = 64
_STAGING_HINT = 'set staging = "host" on the channel'
_HINT = (
    "give all processes of a replica the same CUDA_VISIBLE_DEVICES; in a container use --ipc=host and one PID namespace"
)
_proven: set[tuple[int, str]] = set()
"""(pid, GPU) pairs that have passed the check."""


async def prove_device(forkserver: Forkserver, uuid: str, *, timeout_s: float) -> None:
    """Check, once per process and GPU, that a sidecar can open memory of this process.

    Forks a sidecar for it, and kills that afterwards.

    :param uuid: of the GPU.
    :raises Preflight: the sidecar cannot, within ``timeout_s``.
    :raises NoCapacity: the GPU has too little memory left for the check.
    """
    if (os.getpid(), uuid) in _proven:
        return
    nonce = secrets.token_bytes(NONCE_NBYTES)
    sidecar: Sidecar | None = None
    buffer: Buffer | None = None
    try:
        async with asyncio.timeout(timeout_s):
            buffer = await asyncio.to_thread(_written, uuid, nonce)
            sidecar = await forkserver.fork()
            seen = await sidecar.probe(buffer, timeout_s)
    except SidecarFailed as error:
        raise _refusal(uuid, str(error), error.hint or _HINT) from error
    except (SidecarDied, TimeoutError) as error:
        reason = str(error) or f"the check took longer than {timeout_s:g} s"
        raise _refusal(uuid, reason, _HINT) from error
    finally:
        if sidecar is not None:
            sidecar.kill()
            await sidecar.wait_dead()
        if buffer is not None:
            buffer.close()
    if seen != nonce:
        raise _refusal(uuid, "the helper process does not read the bytes that its rank has written", _HINT)
    _proven.add((os.getpid(), uuid))


def _refusal(uuid: str, reason: str, hint: str) -> Preflight:
    """Return (do not raise) the error of a failed check.

    :param reason: why it failed. :param hint: what to do; host staging is added to it.
    """
    if _STAGING_HINT not in hint:
        hint = f"{hint}; or {_STAGING_HINT}"
    return Preflight(f"helper processes of this rank cannot use the memory of GPU {uuid}: {reason}", hint=hint)


def _written(uuid: str, nonce: bytes) -> Buffer:
    """Return a new buffer on the GPU, with the nonce in it; the caller closes it."""
    gpu = device_of(uuid)
    buffer = Buffer.allocate(len(nonce), "replicas-probe", device=uuid)
    try:
        with gpu.on_side_stream(uuid):
            buffer.tensor().copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
            buffer.record_write()
            gpu.synchronize(uuid)
    except BaseException:
        buffer.close()
        raise
    return buffer

"""Digests of weights: xxh3-128, in hex, of the xxh3-128 of each block of 16 MiB.

Several threads hash blocks, in any order, as one thread reads 16 GB/s, less than memory
allows. Hashing releases the GIL. Digests are compared only with digests of this
library. Weights in GPU memory have another kind of digest, computed on the GPU.

Digests of device memory
========================

xxh3 would have to read all bytes on the host. Instead, the device reduces each block of
16 MiB to two sums of 64 bits, by integer operations that every device has and that are
exact in any order. The host hashes these sums, in their order, and the length. The same
bytes have the same digest on every kind of device, the CPU included. A first letter
distinguishes it from the other kind.

For a block of words ``w[i]`` (int64, little endian, padded with zeros), modulo 2^64,
with fixed odd random keys ``k[i]``::

    t = w * k;  t ^= t >> 32;  t *= C;  t ^= t >> 32;  first = sum(t)
    t *= k;     t ^= t >> 32;                          second = sum(t)

Each step is a bijection of a word, so a change of one word always changes ``first``.
The keys make the positions count. The shifts keep changes of high bits, which a product
alone would leave high, from cancelling each other. The digest detects errors, not
forgery. ``t ^= t >> 32`` works on halves of words, because torch's shift keeps the
sign. The work runs on the thread's current stream; only reading the sums blocks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Literal

import torch
import xxhash

from replicas.common.waits import locked
from replicas.weights.copies.accelerator import accelerator
from replicas.weights.copies.copy_pool import helpers_for, run_all

BLOCK_NBYTES = 16 << 20
DigestKind = Literal["host", "device"]
DEVICE_PREFIX = "d"
_WORDS = BLOCK_NBYTES // 8
_AT_ONCE = {"cuda": 4}
"""Blocks per launch by device type, else 1; a GPU's temporary takes 64 MiB."""
_C = 0x9FB21C651E98DF25 - (1 << 64)
_SEED = 0x2545F4914F6CDD1D
_lock = threading.Lock()
_keys: dict[torch.device, torch.Tensor] = {}


def combined(blocks: Iterable[bytes]) -> str:
    """Return the digest of data, in hex, from the digests of its 16 MiB blocks.

    :param blocks: binary xxh3-128 of each block, in order.
    """
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def digest_of(data: torch.Tensor | memoryview | bytes, kind: DigestKind = "host") -> str:
    """Compute the digest of one contiguous run of bytes. Blocks.

    :param kind: ``"host"``: several threads hash. ``"device"``: the tensor's device
        does, on a stream of this library, so that earlier writes to the tensor must
        have completed.
    """
    if kind == "device":
        if not isinstance(data, torch.Tensor):
            raw = bytearray(data)
            data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        gpu = accelerator()
        uuid = gpu.uuid_of(data) if gpu is not None else ""
        with gpu.on_side_stream(uuid) if gpu is not None and uuid else nullcontext():
            return device_digest_of(data)
    return combined(digest_blocks(data.numpy().data if isinstance(data, torch.Tensor) else memoryview(data)))


def digest_blocks(data: memoryview) -> list[bytes]:
    """Return the xxh3-128 of each block of 16 MiB; several threads hash. Blocks."""
    blocks = [b""] * -(-data.nbytes // BLOCK_NBYTES)

    def hash_block(number: int) -> None:
        """Hash a block, and keep the result."""
        blocks[number] = xxhash.xxh3_128_digest(data[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES])

    tasks = [functools.partial(hash_block, number) for number in range(len(blocks))]
    run_all(tasks, helpers_for(data.nbytes // 2))  # a thread hashes faster than it copies
    return blocks


def device_digest_of(data: torch.Tensor) -> str:
    """Compute the digest of a contiguous run of bytes (uint8) on its device. Blocks.

    The work runs on the thread's current stream, so the library's threads call this
    inside :meth:`~replicas.weights.copies.accelerator.Accelerator.on_side_stream`.
    """
    whole = data.numel() // BLOCK_NBYTES * BLOCK_NBYTES
    at_once = BLOCK_NBYTES * _AT_ONCE.get(data.device.type, 1)
    parts = [*torch.split(data[:whole], at_once), data[whole:]]
    sums = [_sums(part) for part in parts if part.numel()]
    known = torch.cat(sums).cpu() if sums else torch.empty(0, dtype=torch.int64)
    state = xxhash.xxh3_128(known.numpy().tobytes())
    state.update(data.numel().to_bytes(8, "little"))
    return DEVICE_PREFIX + state.hexdigest()


def _sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return both hash sums of each block, computed on the device of ``blocks``.

    The sums are of the block's 8-byte words, mixed with fixed random keys; a block's
    digest is made of them.

    :param blocks: uint8: whole blocks of 16 MiB, or one shorter block.
    :returns: int64, one-dimensional, with two neighbours for each block.
    """
    count = -(-min(blocks.numel(), BLOCK_NBYTES) // 8)
    keys = locked(_lock, _keys_on, count, blocks.device)[:count]
    with torch.no_grad():
        if blocks.numel() % 8 or blocks.data_ptr() % 8 or blocks.storage_offset() % 8:
            padded = torch.zeros(-(-blocks.numel() // 8), dtype=torch.int64, device=blocks.device)
            padded.view(torch.uint8)[: blocks.numel()].copy_(blocks)
        else:
            padded = blocks.view(torch.int64)
        mixed = padded.view(-1, keys.numel()) * keys
        halves = mixed.view(torch.int32).view(*mixed.shape, 2)
        low, high = halves[..., 0], halves[..., 1]
        low.bitwise_xor_(high)
        mixed.mul_(_C)
        low.bitwise_xor_(high)
        first = mixed.sum(1)
        mixed.mul_(keys)
        low.bitwise_xor_(high)
        return torch.stack((first, mixed.sum(1)), 1).flatten()


def _keys_on(count: int, device: torch.device) -> torch.Tensor:
    """Return at least ``count`` random keys on the device, always the same; cached.

    Needs the lock. Waits for the device when it makes them.
    """
    found = _keys.get(device)
    if found is None or found.numel() < count:
        found = _random(min(_WORDS, 1 << (count - 1).bit_length()), device)
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # other streams will use the keys
        _keys[device] = found
    return found


def _random(count: int, device: torch.device) -> torch.Tensor:
    """Return ``count`` odd pseudo-random numbers, int64, in a new tensor on ``device``.

    They are the same in each call, on each device: splitmix64 of a counter from 1. They
    are computed on the thread's current stream, without a wait.
    """
    state = (
        torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(0x9E3779B97F4A7C15 - (1 << 64)).add_(_SEED)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        state ^= (state >> shift) & ((1 << (64 - shift)) - 1)
        state *= factor - (1 << 64) if factor >> 63 else factor
    return state | 1

"""Digests that a device computes: of every bit, in its place, and of the length."""

from __future__ import annotations

import random

import pytest
import torch

from replicas.weights.copies import digest as device_digest
from replicas.weights.copies.digest import DEVICE_PREFIX, device_digest_of, digest_of

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digest, "BLOCK_NBYTES", BLOCK)


def some_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_it_stays_what_it_is() -> None:
    """Members of one run may have different releases of this library, or of torch."""
    counted = torch.arange(10_001, dtype=torch.int64).to(torch.uint8)
    assert device_digest_of(counted) == "d41539d101eb2751ad90bd490d7e42751"
    assert not digest_of(counted).startswith(DEVICE_PREFIX)


@pytest.mark.parametrize("seed", range(5))
def test_every_change_shows(seed: int) -> None:
    chance = random.Random(seed)
    data = some_bytes(chance.choice([3 * BLOCK, 3 * BLOCK + 5, 2 * BLOCK + 8, 70]), seed)
    seen = {device_digest_of(data)}
    changes = 0

    def check(changed: torch.Tensor) -> None:
        nonlocal changes
        changes += 1
        seen.add(device_digest_of(changed))

    for _ in range(8):
        changed = data.clone()
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        check(changed)
    high = data.clone()
    high[7:64:8] ^= 0x80  # high bits of several words: their changes would cancel each other in a plain sum of products
    check(high)
    check(data[:-1])
    check(torch.cat([data, data.new_zeros(1)]))
    check(torch.cat([data[8:16], data[:8], data[16:]]))
    if len(data) >= 2 * BLOCK:
        check(torch.cat([data[BLOCK : 2 * BLOCK], data[:BLOCK], data[2 * BLOCK :]]))
    assert len(seen) == changes + 1


def test_zeros_of_each_length_differ() -> None:
    assert len({device_digest_of(torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in (0, 1, 8, 9, BLOCK)}) == 5


@pytest.mark.parametrize("at_once", [2, 4])
def test_where_it_lies_does_not_matter(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    data = some_bytes(3 * BLOCK + 5)
    wanted = device_digest_of(data)
    monkeypatch.setattr(device_digest, "_AT_ONCE", {"cpu": at_once})  # as a GPU is given several blocks
    shifted = torch.empty(len(data) + 3, dtype=torch.uint8)[3:].copy_(data)
    assert device_digest_of(shifted) == wanted
    assert digest_of(data, "device") == digest_of(data.numpy().tobytes(), "device") == wanted

"""Small versions, and an archive in memory whose requests are counted and disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from obstore.store import MemoryStore

from replicas.archive import ArchiveKey, Follower, Rules, Version, Writer
from replicas.archive.keys import make_pem
from replicas.archive.store import Store
from replicas.channel import Update
from replicas.core.base.manifest import Manifest, TensorSpec

__all__ = ["CHANNEL", "KEY", "Bucket", "Killed", "bytes_of", "changed", "manifest_of", "reader", "version", "writer"]

CHANNEL = "policy"
KEY = ArchiveKey(make_pem())
Words = npt.NDArray[np.uint16]


class Killed(BaseException):
    """The process ends here, as by kill -9."""


class Bucket:
    """Objects in memory. ``calls``: the requests so far, by kind; ``read``: the data
    objects that were read.

    :ivar put_limit: the number of writes after which the writer is killed.
    """

    def __init__(self) -> None:
        self.objects = MemoryStore()
        self.calls: Counter[str] = Counter()
        self.read: list[tuple[str, int]] = []
        self.put_limit: int | None = None
        self.before_read: Callable[[str], None] = lambda name: None

    def names(self, folder: str = "") -> list[str]:
        return sorted(one["path"] for one in self.objects.list(folder or None).collect())

    def content(self, name: str) -> bytes:
        return bytes(self.objects.get(f"{CHANNEL}/{name}").bytes())

    def replace(self, name: str, data: bytes) -> None:
        self.objects.put(f"{CHANNEL}/{name}", data)

    def nbytes(self) -> int:
        return sum(one["size"] for one in self.objects.list().collect())

    def watch(self, store: Store) -> None:
        """Count the calls of a writer's or a reader's store."""
        read, put = store.read, store.put

        def reads(name: str, start: int = 0, nbytes: int = 0, **options: Any) -> Any:
            self.calls["read"] += 1
            self.before_read(name)
            if name.startswith("data/"):
                self.read.append((name, nbytes))
            return read(name, start, nbytes, **options)

        def puts(name: str, data: bytes | memoryview, *options: Any, **more: Any) -> Any:
            if self.put_limit is not None:
                if not self.put_limit:
                    raise Killed
                self.put_limit -= 1
            self.calls["put"] += 1
            if name != "latest" and f"{CHANNEL}/{name}" in self.names():
                assert self.content(name) == bytes(data), f"{name} gets other bytes"
            return put(name, data, *options, **more)

        store.read, store.put = reads, puts  # type: ignore[method-assign]  # counted


def manifest_of(count: int, dtype: str = "bfloat16") -> Manifest:
    return Manifest((TensorSpec("w", dtype, (count,)), TensorSpec("b", dtype, ())), (("tied", "w"),))


def version(number: int, words: Words, manifest: Manifest | None = None, **facts: Any) -> Version:
    """A version with these words as its tensors ``w`` and ``b``."""
    manifest = manifest or manifest_of(len(words) - 1)
    image = np.frombuffer(manifest.header + words.tobytes(), np.uint8)
    return Version(number, image.data, manifest, **facts)


def changed(words: Words, seed: int, share: float = 0.02) -> Words:
    """Some words moved by a step of their type, up or down."""
    random = np.random.default_rng(seed)
    found = words.copy()
    found[random.random(len(found)) < share] += random.choice(np.array([1, 0xFFFF], np.uint16))
    return found


def bytes_of(update: Update) -> bytes:
    """The tensors' bytes of an open update."""
    tensors = dict(update)
    return b"".join(tensors[name].view(-1).view(torch.uint8).numpy().tobytes() for name in ("w", "b"))


def writer(bucket: Bucket, rules: Rules = Rules(), *, run: str = "grpo", key: ArchiveKey = KEY) -> Writer:
    found = Writer(bucket.objects, CHANNEL, run=run, key=key, rules=rules)
    bucket.watch(found._store)
    return found


@contextmanager
def reader(
    bucket: Bucket,
    *,
    timeout: float = 5.0,
    key: str | None = KEY.public,
    at_least: Any = None,
    version: int | str | None = None,
) -> Iterator[Follower]:
    found = Follower(bucket.objects, CHANNEL, key, at_least, version, timeout)
    bucket.watch(found._store)
    try:
        yield found
    finally:
        found.close()

"""A store whose values only members of one lane can write: what anybody else puts there
is noticed, and believed by nobody.

Theory of operation
===================

torch's TCPStore knows no users: whoever reaches its port reads, writes and deletes
every key. A process group trusts what it finds there, above all the addresses of its
members. So each value is stored behind a tag, the keyed BLAKE2b (RFC 7693) of its key
and itself; the secret comes from the coordinator with the lane, over the member's
authenticated session, and is never in the store. A value without its tag is *tampered
with*. So is a key that this member wrote and that is not there any more, or holds
something else: that is looked up twice a second while others are waited for, which
would wait in vain.

Either way the lane fails with :class:`replicas.errors.StoreTampered`, which names no
member: nobody of the run did it. A value that is written back in an older state cannot
be: lanes have prefixes and secrets of their own, and no key of a lane is written twice.

Counters and appended values cannot be signed; no backend of a process group needs them
here, and they are refused.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from replicas.errors import StoreTampered

__all__ = ["SECRET_NBYTES", "SignedStore"]

SECRET_NBYTES = 32
TAG_NBYTES = 16
LOOK_S = 0.5
"""While keys of others are waited for: how often the own ones are looked up."""
_SLICE_TRIPS = 4.0
"""But so many round trips at least, or no answer would come in time."""

_T = TypeVar("_T")
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class SignedStore(_c10d.Store):  # type: ignore[misc]  # torch leaves its stores untyped
    """The keys of one lane. ``inner``: the store, with the lane's prefix. ``secret``:
    of all its members.

    :ivar tampered: what has been found; empty: nothing. An error that came out of torch
        may hide it.
    """

    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__()
        self._inner = inner
        self._secret = secret
        self._timeout = timedelta(seconds=30)
        self._slice_s = 0.0
        self._mine: dict[str, bytes] = {}
        self.tampered = ""

    # ---------------------------------------------------------- what process groups use

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mine[key] = self._tag(key, data) + data
        self._inner.set(key, self._mine[key])

    def get(self, key: str) -> bytes:
        """Waits for the key as :meth:`wait` does."""
        return self._opened(key, self._patiently(lambda: self._inner.get(key), self._timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for the keys as :meth:`wait` does."""
        values = self._patiently(lambda: self._inner.multi_get(list(keys)), self._timeout)
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        found: bool = self._inner.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """:raises torch.distributed.DistStoreError: they are not all there by then.

        :raises replicas.errors.StoreTampered: they cannot be expected any more.
        """
        self._patiently(lambda: self._inner.wait(list(keys)), self._timeout if timeout is None else timeout)

    def _patiently(self, ask: Callable[[], _T], timeout: timedelta) -> _T:
        until = time.monotonic() + timeout.total_seconds()
        slice_s = self.slice_s
        while True:
            left = until - time.monotonic()
            self._inner.set_timeout(timedelta(seconds=max(0.001, min(slice_s, left))))
            try:
                return ask()
            except _c10d.DistStoreError:
                self.verify()
                if left <= slice_s:
                    raise

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def delete_key(self, key: str) -> bool:
        self._mine.pop(key, None)
        found: bool = self._inner.delete_key(key)
        return found

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SignedStore:
        return self

    # ------------------------------------------------------------ what it finds

    @property
    def slice_s(self) -> float:
        """How long the store is waited for at a time: long enough for an answer to come
        over a long way."""
        if not self._slice_s:
            asked = time.monotonic()
            self._inner.set_timeout(self._timeout)
            self._inner.check([next(iter(self._mine), "")])
            self._slice_s = max(LOOK_S, _SLICE_TRIPS * (time.monotonic() - asked))
        return self._slice_s

    def verify(self) -> None:
        """:raises replicas.errors.StoreTampered: what this member wrote is not what is
        there."""
        keys = list(self._mine)
        self._inner.set_timeout(timedelta(seconds=self.slice_s))
        if keys and not self._inner.check(keys):
            self._found(f"a key of {len(keys)} that this member wrote was deleted")
        for key, value in zip(keys, self._inner.multi_get(keys) if keys else (), strict=True):
            if value != self._mine[key]:
                self._found(f'the key "{key}" that this member wrote was overwritten')

    def _opened(self, key: str, value: bytes) -> bytes:
        data = value[TAG_NBYTES:]
        if value[:TAG_NBYTES] != self._tag(key, data):
            self._found(f'the value of "{key}" was not written by a member')
        return data

    def _found(self, what: str) -> None:
        self.tampered = what
        raise StoreTampered(f"somebody else writes into the store: {what}")

    def _tag(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        size = len(name).to_bytes(8, "little")
        return hashlib.blake2b(size + name + data, digest_size=TAG_NBYTES, key=self._secret).digest()

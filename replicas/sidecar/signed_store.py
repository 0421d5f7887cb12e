"""Store with signed values: detects values not written by a member of the lane.

Theory of operation
===================

torch's TCPStore has no users: every process that reaches its port reads, writes and
deletes every key. A process group trusts the values, above all the addresses of its
members. So each value is stored behind a tag, the keyed BLAKE2b (RFC 7693) of key and
value. The secret comes from the coordinator with the lane, over the member's
authenticated session, and is never in the store.

A value without its tag is *tampered with*. So is a key of this member that was deleted
or overwritten; other members would wait for the key until their deadline, so each
waiting member checks its own keys twice a second. In both cases the lane fails with
:class:`replicas.errors.StoreTampered`, which names no member, as none is at fault.

An older value cannot be replayed: each lane has its own prefix and secret, and no key
of a lane is written twice. Counters and appended values cannot be signed; no process
group needs them here, and they are refused.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from replicas.errors import StoreTampered

SECRET_NBYTES = 32
TAG_NBYTES = 16
LOOK_S = 0.5
"""Interval of the checks of own keys while waiting for other members, in seconds."""
_SLICE_TRIPS = 4.0
"""Minimum of that interval in round trips: an answer must fit in it."""

_T = TypeVar("_T")
_c10d: Any = dist  # torch's own annotations leave out most of the names below


class SignedStore(_c10d.Store):  # type: ignore[misc]  # torch leaves its stores untyped
    """torch's store for the keys of one lane (process group), with signed values.

    It detects values that no member of the lane has written.

    :param inner: the store, with the lane's prefix.
    :param secret: shared by all members of the lane.
    :ivar tampered: description of the tampering, or empty; torch may replace our error.
    """

    def __init__(self, inner: Any, secret: bytes) -> None:
        """Wrap a store; send nothing to it yet.

        :param inner: torch's store, with the lane's prefix.
        :param secret: shared by all members of the lane; key of the tags.
        """
        super().__init__()
        self._inner = inner
        self._secret = secret
        self._timeout = timedelta(seconds=30)
        self._slice_s = 0.0
        self._mine: dict[str, bytes] = {}
        self.tampered = ""

    # ------------------------------------------------------ methods for process groups

    def set(self, key: str, value: str | bytes) -> None:
        """Write ``value`` behind its tag, a keyed hash.

        Also remember it as our own, so that :meth:`verify` finds later changes.
        """
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._mine[key] = self._tag(key, data) + data
        self._inner.set(key, self._mine[key])

    def get(self, key: str) -> bytes:
        """Wait up to the timeout for the key; return its value, without its tag.

        :raises torch.distributed.DistStoreError: the key is missing after the timeout.
        :raises replicas.errors.StoreTampered: a value, or an own key, was tampered
            with.
        """
        return self._verified_value(key, self._patiently(lambda: self._inner.get(key), self._timeout))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait up to the timeout for all keys; return their values, in order.

        :raises torch.distributed.DistStoreError: a key is missing after the timeout.
        :raises replicas.errors.StoreTampered: a value, or an own key, was tampered
            with.
        """
        values = self._patiently(lambda: self._inner.multi_get(list(keys)), self._timeout)
        return [self._verified_value(key, value) for key, value in zip(keys, values, strict=True)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write each of ``values`` under the key at its position, as :meth:`set`
        does."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are in the store; do not verify their values."""
        found: bool = self._inner.check(list(keys))
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are in the store; do not verify their values.

        :param timeout: limit; None: that of :meth:`set_timeout`.
        :raises torch.distributed.DistStoreError: a key is missing after the timeout.
        :raises replicas.errors.StoreTampered: an own key was deleted or overwritten.
        """
        self._patiently(lambda: self._inner.wait(list(keys)), self._timeout if timeout is None else timeout)

    def _patiently(self, ask: Callable[[], _T], timeout: timedelta) -> _T:
        """Return ``ask()``, retried until the timeout; verify own keys in between.

        :param ask: a request to the store, which raises DistStoreError after a slice of
            time.
        """
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
        """Set the limit of later waits for keys by this object; at first 30 s."""
        self._timeout = timeout

    def delete_key(self, key: str) -> bool:
        """Delete a key, also of another member; return True if it was there.

        An own key is no longer verified then.
        """
        self._mine.pop(key, None)
        found: bool = self._inner.delete_key(key)
        return found

    def has_extended_api(self) -> bool:
        """Return False: torch then uses plain ``set`` and ``get`` alone."""
        return False

    def clone(self) -> SignedStore:
        """Return this object itself, which torch then shares."""
        return self

    @property
    def slice_s(self) -> float:
        """Timeout of one request to the store, in seconds: several round trips.

        The first call measures a round trip, by a request.
        """
        if not self._slice_s:
            asked = time.monotonic()
            self._inner.set_timeout(self._timeout)
            self._inner.check([next(iter(self._mine), "")])
            self._slice_s = max(LOOK_S, _SLICE_TRIPS * (time.monotonic() - asked))
        return self._slice_s

    def verify(self) -> None:
        """Raise StoreTampered if a key that this member wrote was deleted or changed.

        Reads these keys from the store; blocks for that.
        """
        keys = list(self._mine)
        self._inner.set_timeout(timedelta(seconds=self.slice_s))
        if keys and not self._inner.check(keys):
            self._raise_tampered(f"a key of {len(keys)} that this member wrote was deleted")
        for key, value in zip(keys, self._inner.multi_get(keys) if keys else (), strict=True):
            if value != self._mine[key]:
                self._raise_tampered(f'the key "{key}" that this member wrote was overwritten')

    def _verified_value(self, key: str, value: bytes) -> bytes:
        """Return ``value``, as stored under ``key``, without its tag.

        :raises replicas.errors.StoreTampered: the tag is wrong.
        """
        data = value[TAG_NBYTES:]
        if value[:TAG_NBYTES] != self._tag(key, data):
            self._raise_tampered(f'the value of "{key}" was not written by a member')
        return data

    def _raise_tampered(self, what: str) -> None:
        """Record the tampering in ``tampered``, and raise StoreTampered.

        :param what: what was found, in words.
        """
        self.tampered = what
        raise StoreTampered(f"a process other than a member writes into the rendezvous store: {what}")

    def _tag(self, key: str, data: bytes) -> bytes:
        """Return the keyed hash of ``key`` and ``data``, the value.

        Stored before the value.
        """
        name = key.encode()
        size = len(name).to_bytes(8, "little")
        return hashlib.blake2b(size + name + data, digest_size=TAG_NBYTES, key=self._secret).digest()

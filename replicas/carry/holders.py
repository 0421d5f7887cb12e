"""The holders from which one version is pulled: in order of preference, and measured.

A slow holder would delay all hosts behind it in a chain. So a holder that sends less
than :data:`SLOW_NBYTES_S` during :data:`TRY_S` makes room for the next one; when all
were measured, the fastest stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicas.carry import endpoint
from replicas.common.sizes import size_text

TRY_S = 1.0
"""How long a holder is measured."""
SLOW_NBYTES_S = 20e6
"""A holder that sends less a second makes room for another one,"""
LEFT_S = 3.0
"""if the rest would take longer than this."""


@dataclass(frozen=True)
class Holder:
    """A carrier from which the version can be pulled.

    ``name``: of the member, for messages. ``certificate_hash``: of its TLS certificate.
    ``transfer``: the transfer's number there; 0 means the puller's own.
    """

    name: str
    host: str
    port: int
    certificate_hash: str = ""
    transfer: int = 0

    @property
    def address(self) -> str:
        return endpoint.address_text(self.host, self.port)


@dataclass(frozen=True)
class _Trial:
    """A measurement of a holder: its start, and the bytes received until then."""

    holder: Holder
    began: float
    nbytes: int


class Holders:
    """The holders that are still usable, the preferred first. Not thread-safe.

    :ivar why: why holders were given up or put off, by name.
    :ivar cut: names of those whose network path seems broken or slow.
    """

    def __init__(self, holders: Sequence[Holder] = ()) -> None:
        self._left = list(holders)
        self._talking: set[Holder] = set()
        self._rates: dict[Holder, float] = {}
        """Bytes a second of the holders that were measured as slow."""
        self._trial: _Trial | None = None
        self.why: dict[str, str] = {}
        self.cut: set[str] = set()

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._left

    @property
    def first(self) -> Holder | None:
        """The holder to pull from."""
        return self._left[0] if self._left else None

    def is_last(self, holder: Holder) -> bool:
        return self._left == [holder]

    def mark_connected(self, holder: Holder) -> None:
        """Note that a connection to the holder works, so that it can be measured."""
        self._talking.add(holder)

    def give_up(self, holder: Holder, why: str, *, cut: bool) -> None:
        """Remove the holder. ``cut``: its network path seems broken."""
        self._left.remove(holder)
        self.why[holder.name] = why
        if cut:
            self.cut.add(holder.name)

    def replace_slow(self, received: Mapping[str, int], left_nbytes: int) -> Holder | None:
        """Measure the first holder; return it if a better one takes its place.

        :param received: bytes by holder.
        """
        trial = self._trial
        if trial is None or trial.holder not in self._left or trial.holder in self._rates:
            self._trial = self._start_trial(received)
            return None
        if (elapsed_s := time.monotonic() - trial.began) < TRY_S:
            return None
        holder, rate = trial.holder, (received.get(trial.holder.name, 0) - trial.nbytes) / elapsed_s
        if rate >= SLOW_NBYTES_S or left_nbytes <= rate * LEFT_S:
            return None
        self._rates[holder] = rate
        self._left.sort(key=lambda one: -self._rates.get(one, math.inf))
        best = self._left[0]
        self.why.pop(best.name, None)
        self.cut.discard(best.name)
        if best == holder:
            return None
        self.why[holder.name] = f"it gave {size_text(rate)}/s"
        self.cut.add(holder.name)
        return holder

    def _start_trial(self, received: Mapping[str, int]) -> _Trial | None:
        if len(self._left) < 2:
            return None
        holder = self._left[0]
        if holder not in self._talking or holder in self._rates:
            return None
        return _Trial(holder, time.monotonic(), received.get(holder.name, 0))

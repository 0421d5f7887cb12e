"""The holders from which one version is pulled: in order of preference, and measured.

A slow holder would delay all hosts behind it in a chain. So a holder that sends less
than :data:`SLOW_NBYTES_S` during any :data:`TRY_S` makes room for the next one; when
all were found slow, the fastest stays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
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
    """A carrier (transfer server) from which the version can be pulled.

    :ivar name: of the member, for messages.
    :ivar certificate_hash: of its TLS certificate.
    :ivar transfer: the transfer's number there; 0 means the puller's own.
    """

    name: str
    host: str
    port: int
    certificate_hash: str = ""
    transfer: int = 0

    @property
    def address(self) -> str:
        """``host:port``, with brackets around an IPv6 address."""
        return endpoint.address_text(self.host, self.port)


@dataclass(frozen=True)
class _Trial:
    """A measurement of a holder: its start, and the bytes received until then."""

    holder: Holder
    began: float
    nbytes: int


class Holders:
    """The holders that one pull may still use, the preferred first. Not thread-safe.

    :ivar why: why holders were given up or put off, by name.
    :ivar cut: names of those whose network path seems broken or slow.
    """

    def __init__(self, holders: Iterable[Holder] = ()) -> None:
        """Use these holders, the preferred first, with none given up or measured
        yet."""
        self.why: dict[str, str] = {}
        self.cut: set[str] = set()
        self.restart(holders)

    def restart(self, holders: Iterable[Holder]) -> None:
        """Replace the holders by these, none of them measured yet; keep ``why`` and
        ``cut``."""
        self._left = list(holders)
        self._talking: set[Holder] = set()
        self._rates: dict[Holder, float] = {}
        """Bytes a second of the holders that were measured as slow."""
        self._trial: _Trial | None = None

    def __len__(self) -> int:
        """Return how many holders are left."""
        return len(self._left)

    def __contains__(self, holder: Holder) -> bool:
        """Return True if the holder is left: not given up since the last restart."""
        return holder in self._left

    @property
    def first(self) -> Holder | None:
        """The holder to pull from now, or None if all were given up."""
        return self._left[0] if self._left else None

    def is_last(self, holder: Holder) -> bool:
        """Return True if this holder is the only one that is still usable."""
        return self._left == [holder]

    def mark_connected(self, holder: Holder) -> None:
        """Record that a connection to the holder works, so that :meth:`replace_slow`
        may measure its rate."""
        self._talking.add(holder)

    def give_up(self, holder: Holder, why: str, *, cut: bool) -> None:
        """Remove the holder, which must be one that is left, until :meth:`restart`.

        :param why: the reason, kept in ``why`` by the holder's name.
        :param cut: its network path seems broken; its name is then put into ``cut``.
        """
        self._left.remove(holder)
        self.why[holder.name] = why
        if cut:
            self.cut.add(holder.name)

    def replace_slow(self, received: Mapping[str, int], left_nbytes: int) -> Holder | None:
        """Measure the first holder; if it is slow, move it behind the others.

        Call it several times a second during a pull: a call starts a measurement, or
        ends one that has run for 1 s, and starts the next. A holder is slow if it sent
        less than 20 MB/s and the rest would take over 3 s. Nothing is measured if no
        other holder is left.

        :param received: bytes so far, by holder's name.
        :param left_nbytes: bytes that are still missing.
        :returns: the holder that lost the first place, whose connections the caller
            must shut down; None if the order is as before.
        """
        trial = self._trial
        if trial is None or trial.holder not in self._left or trial.holder in self._rates:
            self._trial = self._start_trial(received)
            return None
        if (elapsed_s := time.monotonic() - trial.began) < TRY_S:
            return None
        holder, rate = trial.holder, (received.get(trial.holder.name, 0) - trial.nbytes) / elapsed_s
        if rate >= SLOW_NBYTES_S or left_nbytes <= rate * LEFT_S:
            self._trial = self._start_trial(received)  # it may slow down at any time
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
        """Return the start of a measurement of the first holder.

        Return None if there is no other one to replace it, it was measured before, or
        no connection to it works yet.

        :param received: bytes so far, by holder's name.
        """
        if len(self._left) < 2:
            return None
        holder = self._left[0]
        if holder not in self._talking or holder in self._rates:
            return None
        return _Trial(holder, time.monotonic(), received.get(holder.name, 0))

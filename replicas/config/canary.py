"""The canary of a channel: a few replicas that load a candidate before the others."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from replicas.config import values as forms
from replicas.config.tables import AsKey

_Number = Annotated[float | None, AsKey(default="none"), forms.number]


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A few replicas that load a candidate before the others."""

    group: Annotated[str, forms.name]
    """The target group of which some replicas are the canary."""
    replicas: Annotated[int, forms.whole(1)] = 1
    """Number of replicas of the canary."""
    share: Annotated[float | None, AsKey(default="none"), forms.share] = None
    """Share of the group's replicas, rounded up, that are the canary if these are more
    than replicas, and of the requests that HAProxy sends them.
    """
    soak_s: Annotated[float, forms.duration(zero=True)] = 300.0
    """With promote = "healthy", a candidate is promoted when all replicas of the canary
    have served it for this time.
    """
    promote: Literal["manual", "healthy", "scored"] = "manual"
    """A candidate is promoted by an order, when its canary stays healthy, or when a
    report of its metric is good enough.
    """
    metric: Annotated[str, forms.name, AsKey(default="none")] = ""
    """The score that decides, with promote = "scored"."""
    min: _Number = None
    """The candidate is rejected when its metric is below this."""
    not_below_current_by: _Number = None
    """The candidate is rejected when its metric is below that of the version that is
    served by more than this.
    """

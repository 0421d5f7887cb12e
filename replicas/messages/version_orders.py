"""Orders to serve, keep, name and score versions.

A member sends them in its session, a person or a program to the control port. A version
is given by its number or by a label, as text.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from replicas.messages.bounds import NAME_LENGTH, REASON_LENGTH, Finite, Seconds

_Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH)]
_Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH)]
SCORES_MAX = 32
"""Scores of one version."""


class _VersionOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """``channel``: its name; a member's order is about its own channel."""

    channel: _Name = ""


class Promote(_VersionOrder, frozen=True, kw_only=True):
    """Serve a committed version: all targets load it."""

    version: _Name = "candidate"


class Reject(_VersionOrder, frozen=True, kw_only=True):
    """Never serve the candidate; its canary goes back."""

    version: _Name = "candidate"
    why: _Reason = ""


class Rollback(_VersionOrder, frozen=True, kw_only=True):
    """Serve the content of an older version again, as a new version."""

    to: _Name = "previous"


class Hold(_VersionOrder, frozen=True, kw_only=True):
    """Keep a version's content.

    :ivar seconds: for this time; None or 0: until it is released, or the member that
        sent the order is lost.
    :ivar name: of the lease; empty: the coordinator names it.
    """

    version: _Name
    seconds: Seconds | None = None
    name: _Name = ""


class Release(_VersionOrder, frozen=True, kw_only=True):
    """End a lease."""

    name: _Name


class Label(_VersionOrder, frozen=True, kw_only=True):
    """Point a label to a version.

    :ivar version: empty: remove the label.
    :ivar move: the label may point to another version now.
    """

    label: _Name
    version: _Name
    move: bool = False


class Score(_VersionOrder, frozen=True, kw_only=True):
    """Report scores of a version, by name; the mean of all reports counts."""

    version: _Name
    scores: Annotated[dict[_Name, Finite], msgspec.Meta(min_length=1, max_length=SCORES_MAX)]


VersionOrder: TypeAlias = Promote | Reject | Rollback | Hold | Release | Label | Score


class Steered(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an order about versions: the decision, which is on disk.

    :ivar version: the version that it is about; of a rollback the new one.
    :ivar content_of: the version whose content that has; 0: its own.
    :ivar name: of the lease or label.
    :ivar until: when the lease ends, in seconds since 1970; None: it has no such end.
    """

    channel: str
    version: int
    content_of: int = 0
    name: str = ""
    until: float | None = None

"""The errors that a request to a sidecar ends with."""

from __future__ import annotations

from typing import Any

from replicas import errors
from replicas.sidecar import wire

__all__ = ["SidecarDied", "SidecarFailed", "failure"]


class SidecarFailed(RuntimeError):
    """The sidecar said why it could not do it.

    :ivar over: its group is of no use any more, and it exits by itself; else the
        request was refused and nothing moved.
    :ivar kind: name of a class of :mod:`replicas.errors`, or empty. :ivar members:
        those concerned. :ivar hint: the remedy.
    :ivar links: pairs of addresses between which members of the group could not
        connect.
    """

    def __init__(
        self,
        message: str,
        *,
        over: bool = True,
        kind: str = "",
        members: tuple[str, ...] = (),
        hint: str = "",
        links: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.over = over
        self.kind = kind
        self.members = members
        self.hint = hint
        self.links = links

    def as_error(self, **fields: Any) -> errors.ReplicasError:
        """The same as an error of the library. ``fields``: channel, phase, version."""
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(RuntimeError):
    """The sidecar, or the forkserver, is gone (killed at a deadline too)."""


def failure(reply: wire.Failed) -> SidecarFailed:
    """The reply as an error."""
    return SidecarFailed(
        reply.error, over=reply.over, kind=reply.kind, members=reply.members, hint=reply.hint, links=reply.links
    )

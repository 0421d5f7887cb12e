"""Errors of requests to a sidecar."""

from __future__ import annotations

from typing import Any

from replicas import errors
from replicas.sidecar import wire

__all__ = ["SidecarDied", "SidecarFailed", "failure"]


class SidecarFailed(RuntimeError):
    """The sidecar answered with an error.

    :ivar over: True if its group is unusable and it exits by itself; False if the
        request was refused and nothing moved.
    :ivar kind: name of a class of :mod:`replicas.errors`, or empty.
    :ivar members: the members concerned.
    :ivar hint: the remedy.
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
        """Convert to an error of the library. ``fields``: channel, phase, version."""
        kind = errors.error_class(self.kind) if self.kind else errors.SyncError
        return kind(str(self), members=self.members, hint=self.hint or None, **fields)


class SidecarDied(RuntimeError):
    """The sidecar or the forkserver is dead, or was killed at a deadline."""


def failure(reply: wire.Failed) -> SidecarFailed:
    """Convert the reply to an error."""
    return SidecarFailed(
        reply.error, over=reply.over, kind=reply.kind, members=reply.members, hint=reply.hint, links=reply.links
    )

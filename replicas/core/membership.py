"""The tables of a channel: a member, a publish, a transfer, a lane.

Theory of operation
===================

These four are the whole of what a channel can be in; :class:`~replicas.core.channel.ChannelState` moves them, and nothing
moves that has no row here.

*A member* is one incarnation of a rank. It is *joining* until a boundary, where it is admitted to a new epoch and *live*.
A target that did not get a version that the others committed is *behind*: still a member, caught up beside the others, and
admitted again when it has that version or a newer one. One with which no process group works (found by probing pairs), or
that keeps dying right after it joined, is *quarantined*: it takes part in nothing with others, is served alone, at growing
intervals, and released when that has worked. *Observers* take part in nothing. Every way ends in *gone*; a process that
comes back is another member.

*A publish* is *packing* while the ranks of its replica fill their slots, *queued* until its turn comes, *moving* while a
transfer carries it, and has then exactly one verdict.

*A transfer* runs in attempts: *offering* (slots and a lane are being made ready), *moving*; ``again`` is the next attempt
over those that are left. When a second attempt fails with everybody alive, pairs of its members are *probed* to find whom
it is up to.

*A lane* is a process group: it forms once, and is dead after the first failure or loss.

The pictures of these tables in ARCHITECTURE.md are made from them (:func:`diagrams`).
"""

from __future__ import annotations

from typing import Literal

from replicas.core.tables import Table

__all__ = [
    "LANE",
    "MEMBER",
    "PUBLISH",
    "TRANSFER",
    "LaneState",
    "MemberEvent",
    "PublishState",
    "Standing",
    "TransferState",
    "diagrams",
]

Standing = Literal["joining", "live", "behind", "quarantined", "observing", "gone"]
MemberEvent = Literal["admitted", "left_behind", "isolated", "released", "lost"]

MEMBER: Table[Standing, MemberEvent] = Table(
    "a member",
    ("joining", "observing"),
    {
        ("joining", "admitted"): "live",
        ("joining", "isolated"): "quarantined",
        ("live", "left_behind"): "behind",
        ("live", "isolated"): "quarantined",
        ("behind", "admitted"): "live",
        ("behind", "isolated"): "quarantined",
        ("quarantined", "released"): "joining",
        ("joining", "lost"): "gone",
        ("live", "lost"): "gone",
        ("behind", "lost"): "gone",
        ("quarantined", "lost"): "gone",
        ("observing", "lost"): "gone",
    },
)

PublishState = Literal["packing", "queued", "moving", "committed", "failed"]
PublishEvent = Literal["packed_by_all", "turn", "decided", "fail"]

PUBLISH: Table[PublishState, PublishEvent] = Table(
    "a publish",
    ("packing",),
    {
        ("packing", "packed_by_all"): "queued",
        ("packing", "decided"): "committed",
        ("packing", "fail"): "failed",
        ("queued", "turn"): "moving",
        ("queued", "decided"): "committed",
        ("queued", "fail"): "failed",
        ("moving", "decided"): "committed",
        ("moving", "fail"): "failed",
    },
)

TransferState = Literal["offering", "moving", "probing", "complete", "failed"]
TransferEvent = Literal["all_ready", "again", "stuck", "done", "fail"]

TRANSFER: Table[TransferState, TransferEvent] = Table(
    "a transfer",
    ("offering",),
    {
        ("offering", "all_ready"): "moving",
        ("offering", "again"): "offering",
        ("moving", "again"): "offering",
        ("offering", "stuck"): "probing",
        ("moving", "stuck"): "probing",
        ("probing", "again"): "offering",
        ("moving", "done"): "complete",
        ("offering", "done"): "complete",
        ("probing", "done"): "complete",
        ("offering", "fail"): "failed",
        ("moving", "fail"): "failed",
        ("probing", "fail"): "failed",
    },
)

LaneState = Literal["forming", "formed", "dead"]
LaneEvent = Literal["formed_by_all", "close"]

LANE: Table[LaneState, LaneEvent] = Table(
    "a lane",
    ("forming",),
    {
        ("forming", "formed_by_all"): "formed",
        ("forming", "close"): "dead",
        ("formed", "close"): "dead",
    },
)


def diagrams() -> str:
    """All tables as Mermaid diagrams with titles, for ARCHITECTURE.md."""
    tables = (MEMBER, PUBLISH, TRANSFER, LANE)
    return "\n\n".join(f"{table.what.capitalize()}:\n\n```mermaid\n{table.diagram()}\n```" for table in tables)

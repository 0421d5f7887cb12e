"""The transition tables of a channel: member, publish, transfer, lane, round and slot.

Theory of operation
===================

:class:`~replicas.core.channel.ChannelState` applies these tables (and each member's
:class:`~replicas.weights.memory.arena.Arena` the one of its slots). A transition
without a row here is refused.

*A member* is one incarnation of a rank. It is *joining* until a boundary, where it is
admitted to a new epoch and is *live*. A target that did not get a version that was
committed is *behind*: still a member, caught up beside the others, and admitted again
when it has that version or a newer one. A member is *quarantined* when no process group
with it works (found by probing pairs), or when it keeps dying right after it joined: it
takes part in no joint work, is served alone at growing intervals, and is released when
that has worked; a peer is released when probes with other peers have worked
(:mod:`replicas.core.operations.trials`). *Observers* take part in nothing. Every path
ends in *gone*; a process that comes back is another member.

*A publish* is *packing* while the ranks of its replica fill their slots, *queued* until
its turn, *moving* while a transfer carries it, and then has exactly one verdict.

*A transfer* runs in attempts: *offering* (slots and a lane are being made ready), then
*moving*; ``again`` starts the next attempt over the members that are left. When a
second attempt fails while all members are alive, pairs of them are *probed* to find the
culprit.

*A lane* is a process group: it forms once, and is dead after the first failure or loss.

*A round* is what all ranks of one target replica load. It is *idle* until a version is
*assigned* to all of them, *loading* from the first grant on, and *loaded* when every
rank serves that version. A loaded round is *torn*, and loading again, when a rank is
lost or new. A failed load makes it *partial*, whatever is assigned and granted
afterwards, until all ranks serve the same version. It is *over* when no rank is left;
ranks that join later begin another round.

*A slot* holds one version in a member's memory. It is *filling* from the moment it is
given to a writer, *held* when a version is complete in it, and *leaving* when that
version is released while it is still being read. A slot that maps the memory of another
member of the host starts as *held*, and is *closed* when it is no longer needed here.

The diagrams in docs/protocol.md are made from these tables (:func:`diagrams`).
"""

from __future__ import annotations

from typing import Literal

from replicas.core.tables import Table

__all__ = [
    "LANE",
    "MEMBER",
    "PUBLISH",
    "ROUND",
    "SLOT",
    "TRANSFER",
    "LaneState",
    "MemberEvent",
    "PublishState",
    "RoundEvent",
    "RoundState",
    "SlotEvent",
    "SlotState",
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


RoundState = Literal["idle", "assigned", "loading", "loaded", "partial", "over"]
RoundEvent = Literal["assign", "grant", "loaded_by_all", "torn", "load_failed", "all_alike", "given_back", "emptied"]

ROUND: Table[RoundState, RoundEvent] = Table(
    "a round",
    ("idle",),
    {
        ("idle", "assign"): "assigned",
        ("assigned", "assign"): "assigned",
        ("loading", "assign"): "assigned",
        ("loaded", "assign"): "assigned",
        ("partial", "assign"): "partial",
        ("assigned", "grant"): "loading",
        ("loading", "grant"): "loading",
        ("partial", "grant"): "partial",
        ("assigned", "loaded_by_all"): "loaded",
        ("loading", "loaded_by_all"): "loaded",
        ("partial", "loaded_by_all"): "loaded",
        ("loaded", "torn"): "loading",
        ("loading", "given_back"): "assigned",
        ("idle", "load_failed"): "partial",
        ("assigned", "load_failed"): "partial",
        ("loading", "load_failed"): "partial",
        ("loaded", "load_failed"): "partial",
        ("partial", "load_failed"): "partial",
        ("partial", "all_alike"): "assigned",
        ("idle", "emptied"): "over",
        ("assigned", "emptied"): "over",
        ("loading", "emptied"): "over",
        ("loaded", "emptied"): "over",
        ("partial", "emptied"): "over",
    },
)

SlotState = Literal["free", "filling", "held", "leaving", "closed"]
SlotEvent = Literal["acquired", "completed", "abandoned", "evicted", "released", "released_in_use", "let_go", "close"]

SLOT: Table[SlotState, SlotEvent] = Table(
    "a slot",
    ("free", "held"),
    {
        ("free", "acquired"): "filling",
        ("filling", "completed"): "held",
        ("filling", "abandoned"): "free",
        ("held", "evicted"): "filling",
        ("held", "released"): "free",
        ("held", "released_in_use"): "leaving",
        ("leaving", "let_go"): "free",
        ("free", "close"): "closed",
        ("held", "close"): "closed",
        ("leaving", "close"): "closed",
    },
)


def diagrams() -> str:
    """Return all tables as Mermaid diagrams with titles, for docs/protocol.md."""
    tables = (MEMBER, PUBLISH, TRANSFER, LANE, ROUND, SLOT)
    return "\n\n".join(f"{table.what.capitalize()}:\n\n```mermaid\n{table.diagram()}\n```" for table in tables)

"""The state machines of a channel, as transition tables.

:class:`~replicas.core.channel_state.ChannelState` applies these tables (and each
member's :class:`~replicas.weights.memory.arena.Arena` the table of its slots). A
transition without a row here is refused.

*A member* is one incarnation of a rank: *joining* until a boundary, where it is
admitted to a new epoch and is *live*. A target that did not get a committed version is
*behind*: it is caught up beside the others, and admitted again when it has that version
or a newer one. *Observers* take part in nothing. A process that comes back is another
member.

*A publish* is *packing* while the ranks of its replica fill their slots, *queued* until
its turn, *moving* while a transfer carries it, and then has exactly one verdict.

*A transfer* is *moving* in attempts; ``again`` starts the next one over the members
that are left.

*A delivery* is one version on its way to a member (:mod:`replicas.core.moving.task`):
*due* until a holder's carrier listens, *offered*, *taking* once its slot is reserved.
It *came* when all bytes have arrived, and is *held* when their digest is that of the
version.

*An operation* between peers is *due* when their posts pair. It is *forming* until its
lane has formed, then *running*; ``again`` is another attempt, in another lane. It ends
as *done* or *failed* for all of them.

*A lane* is a process group: it forms once, and is dead after the first failure or loss.

*A round* is the load of one version by all ranks of one target replica: *assigned* to
all of them, *loading* from the first grant on, *loaded* when every rank serves that
version, *torn* (and loading again) when a rank is lost or new. A failed load makes it
*partial* until all ranks serve the same version; later grants do not change that. It is
*over* when no rank is left; ranks that join later begin another round.

*A publish on its rank* is *walking* while the caller's thread iterates over the
weights, *copying* while bytes still arrive in the slot, *filled* until its digest is
known, and *ready* until its turn to be *told* to the coordinator; a new coordinator
makes it ready again. A rank that cannot publish has *failed*, and has reported it; the
verdict of the replica is still to come.

*A slot* holds one version in a member's memory: *filling* while it is given to a
writer, *held* when a version is complete in it, *leaving* when that version is released
while it is still being read. A slot that maps another member's memory starts as *held*.
"""

from __future__ import annotations

from typing import Literal

from replicas.common.table import Table

Standing = Literal["joining", "live", "behind", "observing", "gone"]
MemberEvent = Literal["admitted", "left_behind", "lost"]

MEMBER: Table[Standing, MemberEvent] = Table(
    "a member",
    ("joining", "observing"),
    {
        "joining": {"live": ("admitted",), "gone": ("lost",)},
        "live": {"behind": ("left_behind",), "gone": ("lost",)},
        "behind": {"live": ("admitted",), "gone": ("lost",)},
        "observing": {"gone": ("lost",)},
    },
)

PublishState = Literal["packing", "queued", "moving", "committed", "failed"]
PublishEvent = Literal["packed_by_all", "turn", "decided", "fail"]

PUBLISH: Table[PublishState, PublishEvent] = Table(
    "a publish",
    ("packing",),
    {
        "packing": {"queued": ("packed_by_all",), "committed": ("decided",), "failed": ("fail",)},
        "queued": {"moving": ("turn",), "committed": ("decided",), "failed": ("fail",)},
        "moving": {"committed": ("decided",), "failed": ("fail",)},
    },
)

TransferState = Literal["moving", "complete", "failed"]
TransferEvent = Literal["again", "done", "fail"]

TRANSFER: Table[TransferState, TransferEvent] = Table(
    "a transfer", ("moving",), {"moving": {"moving": ("again",), "complete": ("done",), "failed": ("fail",)}}
)

OperationState = Literal["due", "forming", "running", "done", "failed"]
OperationEvent = Literal["begin", "go", "again", "done_by_all", "fail"]

OPERATION: Table[OperationState, OperationEvent] = Table(
    "an operation",
    ("due",),
    {
        "due": {"forming": ("begin",)},
        "forming": {"running": ("go",), "forming": ("again",), "failed": ("fail",)},
        "running": {"done": ("done_by_all",), "forming": ("again",), "failed": ("fail",)},
    },
)

LaneState = Literal["forming", "formed", "dead"]
LaneEvent = Literal["formed_by_all", "close"]

LANE: Table[LaneState, LaneEvent] = Table(
    "a lane",
    ("forming",),
    {"forming": {"formed": ("formed_by_all",), "dead": ("close",)}, "formed": {"dead": ("close",)}},
)


RoundState = Literal["idle", "assigned", "loading", "loaded", "partial", "over"]
RoundEvent = Literal["assign", "grant", "loaded_by_all", "torn", "load_failed", "all_alike", "given_back", "emptied"]

ROUND: Table[RoundState, RoundEvent] = Table(
    "a round",
    ("idle",),
    {
        "idle": {"assigned": ("assign",), "partial": ("load_failed",), "over": ("emptied",)},
        "assigned": {
            "assigned": ("assign",),
            "loading": ("grant",),
            "loaded": ("loaded_by_all",),
            "partial": ("load_failed",),
            "over": ("emptied",),
        },
        "loading": {
            "assigned": ("assign", "given_back"),
            "loading": ("grant",),
            "loaded": ("loaded_by_all",),
            "partial": ("load_failed",),
            "over": ("emptied",),
        },
        "loaded": {"assigned": ("assign",), "loading": ("torn",), "partial": ("load_failed",), "over": ("emptied",)},
        "partial": {
            "partial": ("assign", "grant", "load_failed"),
            "loaded": ("loaded_by_all",),
            "assigned": ("all_alike",),
            "over": ("emptied",),
        },
    },
)

PublishJobState = Literal["walking", "copying", "filled", "ready", "told", "failed", "over"]
PublishJobEvent = Literal["walked", "copied", "digested", "tell", "forgotten", "fail", "end"]

PUBLISH_JOB: Table[PublishJobState, PublishJobEvent] = Table(
    "a publish on its rank",
    ("walking",),
    {
        "walking": {"copying": ("walked",), "failed": ("fail",), "over": ("end",)},
        "copying": {"filled": ("copied",), "failed": ("fail",), "over": ("end",)},
        "filled": {"ready": ("digested",), "failed": ("fail",), "over": ("end",)},
        "ready": {"told": ("tell",), "over": ("end",)},
        "told": {"ready": ("forgotten",), "over": ("end",)},
        "failed": {"over": ("end",)},
    },
)

SlotState = Literal["free", "filling", "held", "leaving", "closed"]
SlotEvent = Literal["acquired", "completed", "abandoned", "evicted", "released", "released_in_use", "let_go", "close"]

SLOT: Table[SlotState, SlotEvent] = Table(
    "a slot",
    ("free", "held"),
    {
        "free": {"filling": ("acquired",), "closed": ("close",)},
        "filling": {"held": ("completed",), "free": ("abandoned",)},
        "held": {"filling": ("evicted",), "free": ("released",), "leaving": ("released_in_use",), "closed": ("close",)},
        "leaving": {"free": ("let_go",), "closed": ("close",)},
    },
)

DeliveryState = Literal["due", "offered", "taking", "came", "held", "failed"]
DeliveryEvent = Literal["holder_up", "began", "all_here", "right", "wrong", "gave_up"]

DELIVERY: Table[DeliveryState, DeliveryEvent] = Table(
    "a delivery",
    ("due",),
    {
        "due": {"offered": ("holder_up",), "failed": ("gave_up",)},
        "offered": {"taking": ("began",), "came": ("all_here",), "failed": ("gave_up",)},
        "taking": {"came": ("all_here",), "failed": ("gave_up",)},
        "came": {"held": ("right",), "due": ("wrong",), "failed": ("gave_up",)},
    },
)

"""What a sync to many replicas costs, as formulas: :mod:`bench.bench_scale` measures
what they can be checked against.

One source on a host of its own, ``targets`` replicas of one rank, ``per_host`` of them
on each host; each host has a leader, which pulls the version, and the others map its
memory.

*Messages* of one publish. To the coordinator: PublishBegin, Packed, TransferReady from
the leaders, TransferDone from all targets; Loaded, Dropped (of the version before) and
the next ReceiveAsk from all targets. From it: PublishAdmitted, TransferOffer to the
source and all targets, TransferCancel to the source and the leaders, Commit to all
members, Assigned and ReceiveGrant to all targets, PublishEnd. With L leaders and T
targets 3 T + 2 L + 6 of them up to the commit, and 8 T + 2 L + 7 in all. (Released,
which follows at its own time, is left out.)

*The coordinator* is one thread and does one thing after another: its time is a constant
for each message.

*Lanes* (``transport = "group"``): the leaders form a chain that passes on pieces while
the next ones come, so that the last leader has all of them after ``pieces + leaders -
1`` steps of one piece each, of the size that
:func:`replicas.sidecar.collective.piece_nbytes` gives. With ``nbytes`` much
larger than a piece for each leader this comes close to ``nbytes / link``, however many
leaders there are.

*Pulls* (``transport = "tcp"``) pass on what has landed: chunks of bytes, or a block's
delta once it was applied. The last leader has all after the time of the slowest stage
for all blocks, and one chunk, or block, for each leader before it. The connections of
all leaders are made at once, in :data:`DOOR_TRIPS` round trips.

*On each host* the leader's memory is mapped by all others at the same time, each on a
core of its own; copying it into parameters comes on top, and is the same with one
replica or a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicas.carry.blocks import BLOCK_NBYTES
from replicas.carry.image import CHUNK_NBYTES
from replicas.sidecar.collective import piece_nbytes

__all__ = [
    "Rates",
    "Sync",
    "chain_s",
    "delta_pull_s",
    "leaders_of",
    "messages_of",
    "messages_to_commit",
    "model",
    "pull_s",
]

PER_HOST = 8
DOOR_TRIPS = 3
"""To connect, to prove both ends, and for the first byte that was asked for."""


@dataclass(frozen=True)
class Rates:
    """What was measured (or, of the link and its steps, is assumed).

    :param message_s: the coordinator's time for one message.
    :param memory: bytes per second of one copy within memory; :param mapping: of making
        mapped memory readable.
    :param link: bytes per second between two hosts; :param step_s: what passing on one
        piece, chunk or block costs beside its bytes.
    :param encode: bytes of an image per second of which deltas are made, :param apply:
        and applied, on one core; :param trip_s: a round trip.
    """

    message_s: float
    memory: float
    mapping: float
    link: float
    step_s: float
    encode: float = 0.0
    apply: float = 0.0
    trip_s: float = 0.0


@dataclass(frozen=True)
class Sync:
    """Seconds of each part of one sync, which come one after another."""

    pack_s: float
    coordinator_s: float
    chain_s: float
    map_s: float

    @property
    def total_s(self) -> float:
        return self.pack_s + self.coordinator_s + self.chain_s + self.map_s


def leaders_of(targets: int, per_host: int = PER_HOST) -> int:
    """Hosts with targets."""
    return -(-targets // per_host)


def messages_to_commit(targets: int, leaders: int) -> int:
    """Of one publish, to and from the coordinator, until everybody has been told of the
    commit."""
    return 3 * targets + 2 * leaders + 6


def messages_of(targets: int, leaders: int) -> int:
    """Of one publish, to and from the coordinator, until all targets have loaded it."""
    return 8 * targets + 2 * leaders + 7


def chain_s(nbytes: int, leaders: int, link: float, step_s: float) -> float:
    """From the first byte out of the source to the last one in at the last leader."""
    if not leaders:
        return 0.0
    piece = min(nbytes, piece_nbytes(nbytes, leaders + 1))
    steps = -(-nbytes // piece) + leaders - 1
    return steps * (piece / link + step_s)


def pull_s(nbytes: int, leaders: int, rates: Rates) -> float:
    """The same, pulled as bytes."""
    chunk_s = CHUNK_NBYTES / rates.link + rates.step_s
    return DOOR_TRIPS * rates.trip_s + nbytes / rates.link + max(0, leaders - 1) * chunk_s


def delta_pull_s(nbytes: int, share: float, leaders: int, rates: Rates) -> float:
    """The same, pulled as deltas of ``share`` of the bytes, block by block."""
    sent_s, made_s = BLOCK_NBYTES * share / rates.link, BLOCK_NBYTES / rates.encode
    applied_s = BLOCK_NBYTES / rates.apply
    blocks = -(-nbytes // BLOCK_NBYTES)
    first_s = made_s + leaders * (sent_s + applied_s + rates.step_s)
    return DOOR_TRIPS * rates.trip_s + first_s + (blocks - 1) * max(sent_s, made_s, applied_s)


def model(nbytes: int, targets: int, rates: Rates, per_host: int = PER_HOST, share: float | None = None) -> Sync:
    """One sync of ``nbytes`` to so many targets.

    :param share: pulled: 1.0 as bytes, less as deltas of so much; None: over a lane.
    """
    leaders = leaders_of(targets, per_host)
    if share is None:
        moved_s = chain_s(nbytes, leaders, rates.link, rates.step_s)
    elif share < 1.0:
        moved_s = delta_pull_s(nbytes, share, leaders, rates)
    else:
        moved_s = pull_s(nbytes, leaders, rates)
    return Sync(
        pack_s=nbytes / rates.memory,
        coordinator_s=messages_to_commit(targets, leaders) * rates.message_s,
        chain_s=moved_s,
        map_s=nbytes / rates.mapping,
    )

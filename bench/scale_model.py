"""What a sync to many replicas costs, as formulas: :mod:`bench.bench_scale` measures
what they can be checked against.

One source on a host of its own, ``targets`` replicas of one rank, ``per_host`` of them
on each host; each host has a leader, which receives over the lane, and the others map
its memory.

*Messages* of one publish on a lane that exists. To the coordinator: PublishBegin,
Packed, TransferReady from the source and the leaders, TransferDone from the source and
all targets; Loaded, Dropped (of the version before) and the next ReceiveAsk from all
targets. From it: PublishAdmitted, TransferOffer to the source and all targets,
TransferGo to the source and the leaders, Commit to all members, Assigned and
ReceiveGrant to all targets, PublishEnd. With L leaders and T targets 3 T + 2 L + 8 of
them up to the commit, and 8 T + 2 L + 9 in all. (Released, which follows at its own
time, is left out.)

*The coordinator* is one thread and does one thing after another: its time is a constant
for each message.

*The chain* of leaders passes on buckets while the next ones come, so that the last
leader has all of them after ``buckets + leaders - 1`` steps of one bucket each, of the
size that :func:`replicas.sidecar.buckets.bucket_limit` gives. With ``nbytes`` much
larger than a bucket for each leader this comes close to ``nbytes / link``, however many
leaders there are.

*On each host* the leader's memory is mapped by all others at the same time, each on a
core of its own; copying it into parameters comes on top, and is the same with one
replica or a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass

from replicas.sidecar.buckets import bucket_limit

__all__ = ["Rates", "Sync", "chain_s", "leaders_of", "messages_of", "messages_to_commit", "model"]

PER_HOST = 8


@dataclass(frozen=True)
class Rates:
    """What was measured (or, of the link and its steps, is assumed).

    :param message_s: the coordinator's time for one message.
    :param memory: bytes per second of one copy within memory; :param mapping: of making
        mapped memory readable.
    :param link: bytes per second between two hosts; :param step_s: what passing on one
        bucket costs beside its bytes.
    """

    message_s: float
    memory: float
    mapping: float
    link: float
    step_s: float


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
    bucket = min(nbytes, bucket_limit(nbytes, leaders + 1))
    steps = -(-nbytes // bucket) + leaders - 1
    return steps * (bucket / link + step_s)


def model(nbytes: int, targets: int, rates: Rates, per_host: int = PER_HOST) -> Sync:
    """One sync of ``nbytes`` to so many targets."""
    leaders = leaders_of(targets, per_host)
    return Sync(
        pack_s=nbytes / rates.memory,
        coordinator_s=messages_to_commit(targets, leaders) * rates.message_s,
        chain_s=chain_s(nbytes, leaders, rates.link, rates.step_s),
        map_s=nbytes / rates.mapping,
    )

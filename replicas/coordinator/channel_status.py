"""The status of one channel, as pages and commands show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from replicas.core.channel_state import ChannelState
from replicas.core.versions.publishes import SLOWEST, Publish
from replicas.core.versions.steps import number_in
from replicas.messages.bounds import text_of
from replicas.status import ChannelStatus, LeaseStatus, MemberStatus, PublishStatus, VersionStatus

INFOS_NBYTES = 16 * 2**20
"""Limit of all members' ``info`` on a status page; each member has an equal share."""
NOTE_LENGTH = 500


def _info_nbytes(info: Mapping[str, str]) -> int:
    """Return an upper limit of the bytes of a member's ``info`` in UTF-8."""
    return sum(4 * (len(name) + len(text)) for name, text in info.items())


def _under_way(channel: ChannelState, publish: Publish, now: float) -> PublishStatus:
    """Return the status of a publish that is neither committed nor failed yet.

    It names some of the members that the publish waits for, and counts all of them.

    :param now: loop time, for the seconds since its begin and until its deadline.
    """
    names: list[str] = []
    state, latest, kept = publish.state, channel.commits.latest, 0
    if state == "packing":
        replica = channel.roster.replica(publish.group, publish.replica)
        world = max((one.hello.world_size for one in replica), default=1)
        ranks = channel.commits.publishes.unpacked(publish, world)
        names = [f"{publish.group}/{publish.replica}/{rank}" for rank in ranks]
        readers = channel.hosts.readers(channel.roster.states(publish.begun), latest)
        if readers and len({latest}.union(*readers.values())) >= channel.config.slots:
            names, kept = list(readers), min(min(versions) for versions in readers.values())
    elif publish.transfer is not None:
        names = [member.name for member in sorted(publish.transfer.awaited_members)]
    return PublishStatus(
        version=publish.version,
        publisher=f"{publish.group}/{publish.replica}",
        state=state if state in ("packing", "queued") else "moving",
        seconds=max(0.0, now - publish.began_at),
        waits_for=tuple(names[:SLOWEST]),
        waiting=len(names),
        kept=kept,
        left_s=max(0.0, publish.deadline - now),
    )


def channel_waits(channels: Iterable[ChannelState], now: float) -> dict[str, str]:
    """Return, by name, texts of what each channel and open publish waits for.

    They continue "waits": ``{"version 7 of policy": "for rollout/0/0, 12 s at most"}``.
    A channel or publish that waits for nothing is left out.

    :param now: loop time, for the seconds that are left.
    """
    found = dict[str, str]()
    for channel in channels:
        what, left_s = channel.recovery.wait_text(now)
        if left_s is not None:
            found[f"channel {channel.config.name}"] = f"{what}, {left_s:.0f} s at most"
        for one in (_under_way(channel, publish, now) for publish in channel.commits.publishes.without_verdict()):
            if one.waits:
                found[f"version {one.version} of {channel.config.name}"] = f"{one.waits}, {one.left_s:.0f} s at most"
    return found


def _versions(channel: ChannelState) -> Iterator[VersionStatus]:
    """Yield the status of each version whose commit is on disk, the newest first."""
    ledger, rounds = channel.told.ledger, channel.load_rounds
    serving: dict[int, list[str]] = {}
    for group, replica in sorted(rounds.replicas):
        serving.setdefault(rounds.of(group, replica).loaded, []).append(f"{group}/{replica}")
    for number, known in sorted(ledger.versions.items(), reverse=True):
        leases = [one for one in ledger.leases.values() if one.version == number]
        yield VersionStatus(
            number=number,
            step=known.commit.step,
            at=known.commit.at,
            nbytes=known.commit.nbytes,
            digest=known.digest,
            content_of=known.commit.content,
            labels=ledger.labels_of(number),
            leases=tuple(msgspec.convert(one, LeaseStatus, from_attributes=True) for one in leases),
            rejected=known.rejected,
            scores={name: score.value for name, score in known.scores.items()},
            held=len(channel.roster.holders.of(known.content)),
            serving=tuple(serving.get(number, ())[:SLOWEST]),
        )


def channel_status(channel: ChannelState, now: float) -> ChannelStatus:
    """Return the status of one channel, for pages and commands; change nothing.

    Its version is the newest whose commit is on disk.

    :param now: loop time, from which ages and remaining seconds are counted.
    """
    commits, told = channel.commits, channel.told
    # commits may be ahead of the disk, told never is
    meta = commits.newest.meta if commits.latest == told.latest else None
    fell = commits.steps.fell
    digest = commits.decided if commits.latest == told.latest else told.digest  # it may be learned after the commit
    waits, left_s = channel.recovery.wait_text(now)
    share_nbytes = INFOS_NBYTES // max(1, len(channel.roster))
    members = (
        MemberStatus(
            name=state.member.name,
            state=state.standing,
            note=text_of(state.note, NOTE_LENGTH),
            role=state.settings.role,
            host=state.host,
            loaded=state.loaded,
            held=tuple(sorted(state.held)),
            heartbeat_age_s=max(0.0, now - state.last_seen),
            info=state.hello.info if _info_nbytes(state.hello.info) <= share_nbytes else {},
        )
        for state in sorted(channel.roster, key=lambda state: state.member)
    )
    return ChannelStatus(
        name=channel.config.name,
        epoch=channel.roster.epoch,
        committed_version=told.latest,
        digest=digest,
        members=tuple(members),
        last_sync=told.last,
        disk_problem=told.disk_problem,
        step=number_in(meta, "step"),
        step_before=None if fell is None else fell.before,
        slots=channel.config.slots,
        adopt_together=channel.config.adopt_together,
        sources=tuple(one.group for one in channel.config.sources),
        targets=tuple(one.group for one in channel.config.targets),
        peers=tuple(one.group for one in channel.config.peers),
        under_way=tuple(_under_way(channel, publish, now) for publish in commits.publishes.without_verdict()),
        archive="" if channel.config.archive is None else f"{channel.config.name}-archive",
        follow=channel.config.follow,
        current=told.ledger.current(),
        versions=tuple(_versions(channel)),
        canary=tuple(f"{group}/{replica}" for group, replica in sorted(channel.serving.canary)),
        canary_share=0.0 if channel.config.canary is None else channel.config.canary.share or 0.0,
        waits=waits,
        left_s=left_s,
    )

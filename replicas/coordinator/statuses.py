"""A channel's state as a report."""

from __future__ import annotations

from replicas.core.channel import ChannelState
from replicas.core.roster import MemberState
from replicas.status import ChannelStatus, MemberStatus

__all__ = ["channel_status"]


def channel_status(channel: ChannelState, now: float) -> ChannelStatus:
    commits = channel.commits
    last = channel.commits.decided
    return ChannelStatus(
        name=channel.config.name,
        epoch=channel.roster.epoch,
        committed_version=commits.latest,
        digest=last,
        members=tuple(_member(state, now) for state in sorted(channel.roster, key=lambda s: s.member)),
        syncs=dict(commits.totals),
        retries=dict(commits.retries),
        bytes_total=commits.bytes_total,
        operations=dict(channel.operations.totals),
        last_sync=commits.last,
    )


def _member(state: MemberState, now: float) -> MemberStatus:
    return MemberStatus(
        name=state.member.name,
        state=state.standing,
        note=state.note,
        role=state.settings.role,
        host=state.host,
        loaded=state.loaded,
        held=tuple(sorted(state.held)),
        heartbeat_age_s=max(0.0, now - state.last_seen),
        info=state.hello.info,
    )

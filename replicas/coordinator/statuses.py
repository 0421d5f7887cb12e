"""Build the status report of a channel."""

from __future__ import annotations

from replicas.core.channel import ChannelState
from replicas.core.members.member_state import MemberState
from replicas.status import ChannelStatus, MemberStatus

__all__ = ["channel_status"]


def channel_status(channel: ChannelState, now: float) -> ChannelStatus:
    commits, told = channel.commits, channel.told
    digest = commits.decided if commits.latest == told.latest else told.digest  # it may be learned after the commit
    return ChannelStatus(
        name=channel.config.name,
        epoch=channel.roster.epoch,
        committed_version=told.latest,
        digest=digest,
        members=tuple(_member(state, now) for state in sorted(channel.roster, key=lambda s: s.member)),
        syncs=dict(told.syncs),
        retries=dict(channel.ground.retries),
        bytes_total=told.nbytes,
        operations=dict(channel.operations.totals),
        last_sync=told.last,
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

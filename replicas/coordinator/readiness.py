"""Whether a replica has done its part on every channel: joined with all its ranks, and serving the newest weights.

A target that (re)starts is ready when it has loaded the newest committed version, and stays ready when newer ones are
committed (its lag is a metric). Before the first commit of a channel, joining is enough, and so it is when the newest
version has died with everybody who held it: a source may wait for its targets before it publishes again. A rank that left
in good order has done its part.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from replicas.config import ChannelConfig
from replicas.core.channel import ChannelState
from replicas.core.roster import MemberState

__all__ = ["Readiness", "ReadinessBook"]


class Readiness(msgspec.Struct, frozen=True):
    """``reason``: what is missing. ``partial``: a rank failed to load. ``progressed_s``: since its last
    sign of progress; None while it waits for others (in a receive or an operation), which is no lack of progress.
    """

    ready: bool
    reason: str = ""
    heartbeat_age_s: float | None = None
    versions: dict[str, int] = {}
    partial: bool = False
    progressed_s: float | None = None


class ReadinessBook:
    """Remembers which replicas have been ready, by generation."""

    def __init__(self) -> None:
        self._was_ready: dict[tuple[str, str, int], int] = {}

    def of(
        self, channels: Collection[ChannelState], group: str, replica: int, generation: int, world: int, now: float
    ) -> Readiness:
        reasons: list[str] = []
        versions: dict[str, int] = {}
        seen: list[MemberState] = []
        partial = False
        for channel in channels:
            if not _concerns(channel.config, group):
                continue
            members = [m for m in channel.roster.replica(group, replica) if m.hello.generation == generation]
            seen += members
            left = _left(channel, group, replica, generation)
            missing = _expected(channel.config, group, world) - {m.member.rank for m in members} - left
            if missing:
                ranks = ", ".join(map(str, sorted(missing)))
                reasons.append(f"{channel.config.name}: rank {ranks} has not joined")
            if any(party.group == group for party in channel.config.targets):
                round_ = channel.rounds.of(group, replica)
                versions[channel.config.name] = round_.loaded
                partial = partial or round_.partial
                if not missing and not left:
                    reasons += self._behind(channel, group, replica, generation)
        ages = [now - state.last_seen for state in seen]
        progressed = [now - state.progressed_at for state in seen]
        waits = any(channel.waits(state.member) for channel in channels for state in seen)
        return Readiness(
            ready=not reasons,
            reason="; ".join(reasons),
            heartbeat_age_s=max(ages, default=None),
            versions=versions,
            partial=partial,
            progressed_s=None if waits else min(progressed, default=None),
        )

    def _behind(self, channel: ChannelState, group: str, replica: int, generation: int) -> list[str]:
        key = (channel.config.name, group, replica)
        latest, loaded = channel.commits.latest, channel.rounds.of(group, replica).loaded
        if channel.rounds.of(group, replica).partial:
            self._was_ready.pop(key, None)
            return [f"{channel.config.name}: version {latest} is loaded by a part of its ranks"]
        if loaded >= latest:
            self._was_ready[key] = generation
        elif self._was_ready.get(key) != generation and channel.commits.obtainable:
            return [f"{channel.config.name}: has version {loaded}, version {latest} is committed"]
        return []


def _concerns(config: ChannelConfig, group: str) -> bool:
    return any(party.group == group for party in (*config.sources, *config.targets, *config.peers))


def _left(channel: ChannelState, group: str, replica: int, generation: int) -> set[int]:
    """Ranks of this generation that left in good order."""
    names = ((name.split("/"), of) for name, of in channel.roster.left.items())
    return {int(rank) for (g, r, rank), of in names if (g, int(r), of) == (group, replica, generation)}


def _expected(config: ChannelConfig, group: str, world: int) -> set[int]:
    """Ranks that must have joined."""
    parties = [party for party in (*config.sources, *config.targets, *config.peers) if party.group == group]
    return set(range(1 if all(party.ranks == "leader" for party in parties) else world))

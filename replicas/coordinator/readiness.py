"""Decide whether a replica is ready: joined with all ranks, serving the newest weights.

A target that (re)starts is ready when all its ranks have loaded the version that was
newest when the first of them asked (see :mod:`replicas.core.versions.load_rounds`). It
stays ready when newer versions are committed (its lag is a metric): a target that loads
more slowly than its trainer publishes never has the newest version, but serves as well
as the others. Joining is enough before a channel's first commit, and when the newest
version was lost with all its holders, because a source may wait for its targets before
it publishes again. With ``adopt_together`` a target that did not load the version of
the others is not ready until it has. A rank that left in good order is not missing. But
if the other ranks of its replica then ask for a newer version, they are *stranded*: a
version is loaded by all ranks or by none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from replicas.common.reason import Reason
from replicas.core.channel_state import ChannelState
from replicas.core.members.member_state import MemberState

STRANDED_S = 5.0
"""Grace: ranks of one replica do not leave at the same moment."""


class Readiness(msgspec.Struct, frozen=True):
    """The readiness of a replica.

    :ivar reason: what is missing; if ready, why it did not load a newer version.
    :ivar partial: why a rank has only a part of a version loaded, or "".
    :ivar stranded: a rank waits for a version that it can no longer get, because
        another rank has left.
    :ivar progressed_s: seconds since its last progress; None while it waits for others
        (in a receive or an operation), which does not count.
    :ivar step: the newest step that it reported, in this or an earlier generation.
    :ivar silent: ranks whose heartbeats are late, or whose connections are cut.
    :ivar pids: of its ranks, each on its own node.
    :ivar slots: how many versions a rank holds at most, by channel.
    :ivar open_s: how long a rank has had an update open, by channel.
    """

    ready: bool
    reason: str = ""
    heartbeat_age_s: float | None = None
    silent: tuple[int, ...] = ()
    versions: dict[str, int] = {}
    partial: str = ""
    stranded: bool = False
    progressed_s: float | None = None
    step: int | None = None
    pids: dict[int, int] = {}
    slots: dict[str, int] = {}
    open_s: dict[str, float] = {}


class ReadinessBook:
    """Remembers which generation of each replica has been ready."""

    def __init__(self) -> None:
        """Begin with no generation known to have been ready."""
        self._was_ready: dict[tuple[str, str, int], int] = {}

    def of(
        self,
        channels: Collection[ChannelState],
        group: str,
        replica: int,
        generation: int,
        world: int,
        now: float,
        *,
        external: bool = False,
    ) -> Readiness:
        """Return whether one generation of a replica is ready, with the reasons if not.

        If it is ready, that is recorded: it stays ready when newer versions are
        committed that it has not loaded.

        :param channels: all channels of the run; those of other groups are skipped.
        :param generation: the start of the replica that is asked about.
        :param world: the number of its ranks.
        :param now: loop time, from which ages are counted.
        :param external: another launcher starts it; members of all generations count.
        """
        reasons: list[str] = []
        versions: dict[str, int] = {}
        seen: list[MemberState] = []
        silent: set[int] = set()
        steps: list[int] = []
        slots: dict[str, int] = {}
        open_s: dict[str, float] = {}
        partial = stranded = False
        failures: list[str] = []
        for channel in channels:
            config = channel.config
            parties = [party for party in (*config.sources, *config.targets, *config.peers) if party.group == group]
            if not parties:
                continue
            members = [
                m for m in channel.roster.replica(group, replica) if external or m.hello.generation == generation
            ]
            seen += members
            silent |= {m.member.rank for m in members if channel.roster.is_suspect(m, now)}
            steps.append(channel.marks.of(group, replica)[0])
            slots[config.name] = max((len(m.held) for m in members), default=0)
            if opened := [now - m.granted_at for m in members if channel.load_rounds.has_open_update(m.member)]:
                open_s[config.name] = max(opened)
            leaves = channel.roster.history.left.get((group, replica), {})
            left = {rank for rank, (of, _) in leaves.items() if external or of == generation}
            # where only leaders take part, the others need not join
            expected = range(1 if all(party.ranks == "leader" for party in parties) else world)
            missing = set(expected) - {m.member.rank for m in members} - left
            lost = missing & channel.roster.lost(group, replica, None if external else generation)
            for ranks, what in ((missing - lost, "has not joined"), (lost, "is lost from")):
                if ranks:
                    reasons.append(f"rank {', '.join(map(str, sorted(ranks)))} {what} channel {config.name}")
            if any(party.group == group for party in config.targets):
                round_ = channel.load_rounds.of(group, replica)
                versions[config.name] = round_.loaded
                partial = partial or round_.partial
                failures += [f"channel {config.name}, {round_.failure}"] if round_.failure else []
                if not missing and not left:  # ranks that have left cannot load
                    reasons += self._behind(channel, group, replica, generation)
                if left and (text := _stranded(channel, members, max(at for _, at in leaves.values()), now)):
                    stranded = True
                    reasons.append(text)
        ages = [now - state.last_seen for state in seen]
        progressed = [now - state.progressed_at for state in seen]
        waits = any(channel.waits(state.member) for channel in channels for state in seen)
        return Readiness(
            ready=not reasons,
            reason="; ".join(reasons + failures),
            heartbeat_age_s=max(ages, default=None),
            silent=tuple(sorted(silent)),
            versions=versions,
            partial="; ".join(failures) or "a version was not loaded, for an unknown reason" if partial else "",
            stranded=stranded,
            progressed_s=None if waits else min(progressed, default=None),
            step=max((step for step in steps if step >= 0), default=None),
            pids={state.member.rank: state.hello.process.pid for state in seen},
            slots=slots,
            open_s=open_s,
        )

    def _behind(self, channel: ChannelState, group: str, replica: int, generation: int) -> list[str]:
        """Return why the version that a target has loaded keeps it from being ready.

        The list has one text, or none if nothing is in the way. Then this generation is
        remembered as having been ready, and stays ready when newer versions come that
        it has not loaded. After a partial load it is forgotten.
        """
        key = (channel.config.name, group, replica)
        told, round_ = channel.told, channel.load_rounds.of(group, replica)
        latest = told.latest if channel.config.follow == "newest" else told.ledger.current()
        if round_.partial:
            self._was_ready.pop(key, None)
            return [f"its ranks may hold a mix of versions of channel {channel.config.name}"]
        if channel.lockstep.is_behind(group, replica):
            return [f"version {round_.loaded} of {channel.config.name} loaded, others serve {channel.lockstep.served}"]
        if round_.loaded or not latest:
            self._was_ready[key] = generation
        elif self._was_ready.get(key) != generation and (
            channel.recovery.active
            or channel.commits.contents.obtainable(channel.roster.replica(group, replica), latest)
        ):
            return [f"no version of {channel.config.name} loaded yet (newest: {latest})"]
        return []


def _stranded(channel: ChannelState, ranks: Sequence[MemberState], left_at: float, now: float) -> Reason | None:
    """Return why ranks wait for a version that they can never get, or None.

    All ranks of a replica load a version together, so it cannot come once one has left.

    :param ranks: the members of the replica that are left.
    :param left_at: loop time when the last of the others left. :param now: loop time.
    """
    asking = [state for state in ranks if channel.load_rounds.wants(state.member, state.told)]
    if not asking or now - left_at < STRANDED_S:
        return None
    waiting = ", ".join(str(state.member.rank) for state in asking)
    newest = max(state.told for state in asking)
    return f"rank {waiting} waits for version {newest} of {channel.config.name}, other ranks have left"

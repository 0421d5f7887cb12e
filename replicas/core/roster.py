"""Who is on a channel: members, epochs and leases.

Theory of operation
===================

A member is *joining* until a transfer boundary, then *live*: part of the current epoch, an immutable view whose number
strictly grows. A loss makes a new epoch at once, joins wait for :meth:`Roster.admit`. An *observer* sees commits and
takes part in nothing. One identity (group, replica, rank) has at most one incarnation: a later join fences the earlier.

A member whose last sign of life is older than the suspicion time is *suspect*: transfers go on without it. One older than
its lease is lost. The shell extends both by the pauses of its own loop (:meth:`Roster.forgive`), so that a stopped
coordinator evicts nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from replicas import errors
from replicas.config import ChannelConfig, Party
from replicas.core.identity import Member
from replicas.messages import ChannelSettings, Hello

__all__ = ["GroupShape", "MemberState", "Roster"]

HEARTBEAT_INTERVAL_S = 1.0
SUSPICION_S = 3.5
"""Age of the last sign of life beyond which transfers no longer wait for a member: three missed heartbeats."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a coordinator knows of a group.

    :param replicas: replicas that are expected; operations between peers wait for their first join.
    :param world_size: ranks of each replica.
    :param heartbeat_timeout_s: lease of a member: without a sign of life for so long it is lost. Default 30 s.
    """

    replicas: int = 1
    world_size: int = 1
    heartbeat_timeout_s: float = 30.0


@dataclass(slots=True, eq=False)
class MemberState:
    """What the coordinator knows of one member."""

    member: Member
    hello: Hello
    settings: ChannelSettings
    address: str
    last_seen: float
    live: bool = False
    carries: bool = True
    held: dict[int, str] = field(default_factory=dict)
    parts: set[int] = field(default_factory=set)
    manifests: set[str] = field(default_factory=set)
    loaded: int = 0
    progressed_at: float = 0.0
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_source(self) -> bool:
        return self.settings.role in ("source", "both")

    @property
    def is_target(self) -> bool:
        return self.settings.role in ("target", "both")

    @property
    def is_peer(self) -> bool:
        return self.settings.role == "peer"

    @property
    def observes(self) -> bool:
        return self.settings.role == "observer"


def _party(parties: tuple[Party, ...], group: str) -> Party | None:
    return next((party for party in parties if party.group == group), None)


class Roster:
    """Members and epochs of one channel."""

    def __init__(self, config: ChannelConfig, groups: Mapping[str, GroupShape], *, epoch: int = 0) -> None:
        self.config = config
        self.groups = dict(groups)
        self.epoch = epoch
        self._members: dict[Member, MemberState] = {}
        self.seen: set[str] = set()
        """Names of every identity that ever joined."""
        self.left: dict[str, int] = {}
        """Generation of those that left in good order, by name, until they join again."""

    def __iter__(self) -> Iterator[MemberState]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def get(self, member: Member) -> MemberState | None:
        return self._members.get(member)

    def shape(self, group: str) -> GroupShape:
        return self.groups.get(group, GroupShape())

    def settings_for(self, hello: Hello) -> ChannelSettings:
        """What this process is on the channel.

        :raises errors.UnknownChannel: its group has no part in it, and it does not only observe.
        """
        config = self.config
        source, target = _party(config.sources, hello.group), _party(config.targets, hello.group)
        peer = _party(config.peers, hello.group)
        role: str
        if hello.observe:
            role = "observer"
        elif peer is not None:
            role = "peer"
        elif source is not None and target is not None:
            role = "both"
        elif source is not None or target is not None:
            role = "source" if source is not None else "target"
        else:
            known = sorted({party.group for party in (*config.sources, *config.targets, *config.peers)})
            raise errors.UnknownChannel(
                f'group "{hello.group}" has no part in channel "{config.name}"',
                channel=config.name,
                hint=f"its groups are {', '.join(known)}; join with observe=True to only watch it",
            )
        return ChannelSettings(
            role=role,  # type: ignore[arg-type]  # one of the literals, by the branches above
            deadline_s=config.deadline_s,
            slots=config.slots,
            source_ranks="all" if any(party.ranks == "all" for party in config.sources) else "leader",
            peer_ranks=config.peers[0].ranks if config.peers else "leader",
            backend=config.backend,
            heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
        )

    def add(self, hello: Hello, address: str, now: float) -> tuple[MemberState, MemberState | None]:
        """Register a new incarnation; returns it and the one that it fences, which the caller must lose first."""
        self._check(hello)
        member = Member(hello.group, hello.replica, hello.rank, hello.incarnation)
        settings = self.settings_for(hello)
        older = None if hello.observe else self.holder_of(member.name)
        state = MemberState(member, hello, settings, address, last_seen=now, progressed_at=now)
        state.carries = self._carries(settings, hello)
        state.held = {held.version: held.digest for held in hello.held}
        state.loaded = hello.loaded
        return state, older

    def insert(self, state: MemberState) -> None:
        self._members[state.member] = state
        self.left.pop(state.member.name, None)
        if not state.observes:
            self.seen.add(state.member.name)

    def remove(self, member: Member) -> MemberState | None:
        return self._members.pop(member, None)

    def holder_of(self, name: str) -> MemberState | None:
        """The current incarnation of the identity ``name``."""
        return next((s for s in self._members.values() if s.member.name == name and not s.observes), None)

    def admit(self) -> bool:
        """Make every joining member live, in one new epoch; False when there was none."""
        joining = [state for state in self if not state.live and not state.observes]
        for state in joining:
            state.live = True
        if joining:
            self.epoch += 1
        return bool(joining)

    def demote(self, state: MemberState) -> None:
        """Out of the epoch, but still a member: it is caught up and admitted again at a boundary."""
        state.live = False
        self.epoch += 1

    @property
    def live(self) -> list[MemberState]:
        return sorted((state for state in self if state.live), key=lambda state: state.member)

    @property
    def targets(self) -> list[MemberState]:
        """Live targets that take bytes."""
        return [state for state in self.live if state.is_target and state.carries]

    def replica(self, group: str, replica: int) -> list[MemberState]:
        """Members of one replica, without observers."""
        return [s for s in self if s.member.group == group and s.member.replica == replica and not s.observes]

    def suspect(self, state: MemberState, now: float) -> bool:
        return now - state.last_seen > SUSPICION_S

    def expired(self, now: float) -> list[MemberState]:
        """Members whose lease has run out."""
        return [s for s in self if now - s.last_seen > self.shape(s.member.group).heartbeat_timeout_s]

    def forgive(self, pause_s: float) -> None:
        """The coordinator itself was not running for ``pause_s``: nobody could be heard."""
        for state in self:
            state.last_seen += pause_s

    def _carries(self, settings: ChannelSettings, hello: Hello) -> bool:
        """Whether bytes go to or from this rank (as a target or a peer; sources are looked at by the publish)."""
        if settings.role == "peer":
            return settings.peer_ranks != "leader" or hello.rank == 0
        party = _party(self.config.targets, hello.group)
        return party is None or party.ranks != "leader" or hello.rank == 0

    def _check(self, hello: Hello) -> None:
        where = f"{hello.group}/{hello.replica}/{hello.rank}"
        if hello.world_size < 1 or not 0 <= hello.rank < hello.world_size:
            raise errors.UsageError(
                f"{where}: rank {hello.rank} is not in a world of {hello.world_size}",
                channel=self.config.name,
                hint="pass rank from 0 to world_size - 1",
            )
        if hello.replica < 0:
            raise errors.UsageError(f"{where}: replica must be 0 or more", channel=self.config.name)
        others = {s.hello.world_size for s in self.replica(hello.group, hello.replica) if s.member.name != where}
        if others and others != {hello.world_size}:
            raise errors.RanksDisagree(
                f"{where}: world_size {hello.world_size}, but its replica joined with {others.pop()}",
                channel=self.config.name,
            )

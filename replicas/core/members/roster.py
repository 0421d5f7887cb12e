"""Who is on a channel: members, epochs and leases.

Theory of operation
===================

A member's standing moves by the table :data:`replicas.core.membership.MEMBER`. The
*live* ones are the current epoch, an immutable view whose number strictly grows: a loss
makes a new epoch at once, joins wait for :meth:`Roster.admit`. One identity (group,
replica, rank) has at most one incarnation: a later join fences the earlier.

An identity that was lost :data:`FLAPS` times within :data:`FLAP_WINDOW_S` is on
*probation* when it comes back: it is served and admitted only after a while, twice as
long each time, so that a program that dies right after each start does not interrupt
the others each time.

A member whose last sign of life is older than the suspicion time (three missed
heartbeats, of which :mod:`replicas.core.members.heartbeats` tells how often they come)
is *suspect*: transfers go on without it. So is one whose connection has ended, and that
has not come back within :data:`CUT_S`. One older than its lease is lost. The shell
extends all of them by the pauses of its own loop (:meth:`Roster.forgive`), so that a
stopped coordinator evicts nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.config.structs import ChannelConfig, ChannelRole
from replicas.core.members.heartbeats import Heartbeats
from replicas.core.members.member_state import Held, MemberState
from replicas.core.members.preflight import carries_bytes, check_join
from replicas.core.members.roster_index import RosterIndex, preflight_shape
from replicas.core.membership import MEMBER
from replicas.messages import ChannelSettings, Hello
from replicas.messages.identity import Member

__all__ = ["GroupShape", "Roster"]

FLAPS = 3
FLAP_WINDOW_S = 60.0
ISOLATION_WINDOW_S = 600.0
"""For so long a quarantine makes the next one of the same identity longer."""
CUT_S = 1.5
"""A member whose connection breaks dials again at once, and is back long before."""
PROBATION = Backoff(1.0, 30.0)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What a coordinator knows of a group.

    :param replicas: replicas that are expected; operations between peers wait for their
        first join.
    :param world_size: ranks of each replica.
    :param heartbeat_timeout_s: lease of a member: without a sign of life for so long it
        is lost. Default 30 s.
    """

    replicas: int = 1
    world_size: int = 1
    heartbeat_timeout_s: float = 30.0


def _party(parties: tuple[ChannelRole, ...], group: str) -> ChannelRole | None:
    return next((party for party in parties if party.group == group), None)


class Roster:
    """Members and epochs of one channel."""

    def __init__(self, config: ChannelConfig, groups: Mapping[str, GroupShape], *, epoch: int = 0) -> None:
        self.config = config
        self.groups = dict(groups)
        self.epoch = epoch
        self._members: dict[Member, MemberState] = {}
        self.index = RosterIndex(self._preflight_shape)
        self._live: tuple[MemberState, ...] = ()
        self._targets: tuple[MemberState, ...] = ()
        self._cached_epoch = -1
        self._heartbeats = Heartbeats()
        self.seen: set[str] = set()
        """Names of every identity that ever joined."""
        self.left: dict[str, tuple[int, float]] = {}
        """Generation of those that left in good order, and when, by name, until they
        join again."""
        self._losses: dict[str, deque[float]] = {}
        self._isolations: dict[str, deque[float]] = {}
        self._isolated: dict[str, str] = {}
        """Why identities were quarantined that are not there now, and have not been
        tried again."""

    def __iter__(self) -> Iterator[MemberState]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, member: Member) -> MemberState | None:
        return self._members.get(member)

    def states(self, members: Iterable[Member]) -> list[MemberState]:
        """Of those of ``members`` that are there."""
        return [state for state in map(self._members.get, members) if state is not None]

    def address(self, member: Member) -> str:
        """Where it is reached; empty: it is not there."""
        state = self._members.get(member)
        return state.address if state is not None else ""

    def host(self, member: Member) -> int:
        """The number of its host; 0: it is not known, or the member is not there."""
        state = self._members.get(member)
        return state.host if state is not None else 0

    def shape(self, group: str) -> GroupShape:
        return self.groups.get(group, GroupShape())

    def settings_for(self, hello: Hello) -> ChannelSettings:
        """What this process is on the channel.

        :raises errors.UnknownChannel: its group has no part in it, and it does not only
            observe.
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
            staging=config.staging,
            source_ranks="all" if any(party.ranks == "all" for party in config.sources) else "leader",
            peer_ranks=config.peers[0].ranks if config.peers else "leader",
            backend=config.backend,
            heartbeat_interval_s=self.heartbeat_interval_s,
        )

    def add(self, hello: Hello, address: str, now: float) -> tuple[MemberState, MemberState | None]:
        """Register a new incarnation; returns it and the one that it fences, which the
        caller must lose first.

        :raises errors.ReplicasError: the Hello is not acceptable, or it cannot work
            with those that are there.
        """
        self._check(hello)
        check_join(hello, self.index.others(hello), self.config)
        member = Member(hello.group, hello.replica, hello.rank, hello.incarnation)
        settings = self.settings_for(hello)
        older = None if hello.observe else self.holder_of(member.name)
        if older is not None:
            self._check_newer(member, hello, older)
        state = MemberState(member, hello, settings, address, last_seen=now, progressed_at=now)
        if state.observes:
            state.standing = "observing"
        state.carries = self._carries(settings, hello)
        state.held = Held({held.version: held.digest for held in hello.held})
        state.lent = {*state.held, *hello.lent}
        state.places = {held.version: held.place for held in hello.held if held.place is not None}
        state.loaded = hello.loaded
        state.resumed = not state.from_before
        state.not_before = self._probation_end(member.name, now)
        return state, older

    def insert(self, state: MemberState) -> None:
        self._members[state.member] = state
        self.index.insert(state)
        if not state.observes:
            self.left.pop(state.member.name, None)
            self.seen.add(state.member.name)

    def remove(self, member: Member) -> MemberState | None:
        """Take it out; ``gone`` from now on. Returns it as it was, or None."""
        state = self._members.pop(member, None)
        if state is None:
            return None
        self.index.remove(state)
        if state.live:
            self.epoch += 1
        if state.standing == "quarantined" and state.is_peer:
            self._isolated[member.name] = state.note
        state.step("lost")
        return state

    def was_isolated(self, name: str) -> str:
        """Why the last one of this identity was quarantined when it went, if it was;
        asked once."""
        return self._isolated.pop(name, "")

    def note_loss(self, name: str, now: float) -> None:
        """An identity was lost, and not in good order."""
        self._losses.setdefault(name, deque(maxlen=16)).append(now)

    def _forget_old(self, now: float) -> None:
        """Losses and quarantines of long ago."""
        for known, window_s in ((self._losses, FLAP_WINDOW_S), (self._isolations, ISOLATION_WINDOW_S)):
            for name, times in list(known.items()):
                while times and now - times[0] > window_s:
                    times.popleft()
                if not times:
                    del known[name]

    def _probation_end(self, name: str, now: float) -> float:
        recent = [at for at in self._losses.get(name, ()) if now - at <= FLAP_WINDOW_S]
        if len(recent) < FLAPS:
            return 0.0
        return now + PROBATION.after(len(recent) - FLAPS)

    def holder_of(self, name: str) -> MemberState | None:
        """The current incarnation of the identity ``name``."""
        return self.index.by_name.get(name)

    def admit(self, now: float) -> bool:
        """Make every member that waits for it live, in one new epoch; False when there
        was none."""
        waiting = self.waiting(now)
        for state in waiting:
            state.step("admitted")
            state.note, state.missed = "", 0
            del self.index.apart[state.member]
        if waiting:
            self.epoch += 1
        return bool(waiting)

    def waiting(self, now: float) -> list[MemberState]:
        """Those who would be admitted now."""
        return [state for state in self._apart(now) if state.caught_up]

    def missing(self, now: float) -> list[MemberState]:
        """Those who would be admitted now, if they had the version that they have
        missed."""
        return [state for state in self._apart(now) if not state.caught_up]

    def _apart(self, now: float) -> list[MemberState]:
        apart = self.index.apart.values()
        return [s for s in apart if MEMBER.allows(s.standing, "admitted") and self.admissible(s, now)]

    def admissible(self, state: MemberState, now: float) -> bool:
        """Whether it may be with the others now: it is known where it is, can be heard,
        may be trusted, and will stay."""
        return now >= state.not_before and self.available(state, now)

    def available(self, state: MemberState, now: float) -> bool:
        """Whether it is known where it is, it can be heard, and it will stay."""
        return state.host != 0 and not state.draining and not self.suspect(state, now)

    def leave_behind(self, state: MemberState, why: str, *, missed: int = 0) -> None:
        """Out of the epoch, but still a member: it is caught up and admitted again at a
        boundary."""
        state.step("left_behind")
        state.note, state.missed = why, missed
        self.index.apart[state.member] = state
        self.epoch += 1

    def note_isolation(self, name: str, now: float) -> int:
        """An identity is about to be quarantined: how often that has been so lately,
        this time included."""
        times = self._isolations.setdefault(name, deque(maxlen=16))
        times.append(now)
        return len(times)

    def release(self, state: MemberState) -> None:
        """It works again: it is admitted at the next boundary."""
        state.step("released")
        state.not_before = 0.0

    def isolate(self, state: MemberState, why: str, not_before: float) -> None:
        """Quarantine it: no process group with it works."""
        if state.live:
            self.epoch += 1
        state.step("isolated")
        self.index.apart[state.member] = state
        state.note = why
        state.not_before = not_before

    @property
    def live(self) -> tuple[MemberState, ...]:
        """Members of the current epoch, in order."""
        self._refresh()
        return self._live

    @property
    def targets(self) -> tuple[MemberState, ...]:
        """Live targets that take bytes, in order."""
        self._refresh()
        return self._targets

    def _refresh(self) -> None:
        """Whoever becomes live, or is not any more, makes a new epoch."""
        if self._cached_epoch != self.epoch:
            self._cached_epoch = self.epoch
            self._live = tuple(sorted((state for state in self if state.live), key=lambda state: state.member))
            self._targets = tuple(state for state in self._live if state.is_target and state.carries)

    def replica(self, group: str, replica: int) -> list[MemberState]:
        """Members of one replica, without observers."""
        return self.index.replica(group, replica)

    def holders(self, version: int) -> list[MemberState]:
        """Members that hold the whole of ``version``, in no order."""
        return self.index.holders(version)

    def lacking(self, version: int) -> list[MemberState]:
        """Targets that take bytes, live or not, and do not hold ``version``. Costs
        nothing when there are none."""
        return self.index.lacking(version)

    # ------------------------------------------------------------ signs of life

    @property
    def shortest_lease_s(self) -> float:
        """Of all groups, also of those that are not configured."""
        shapes = (GroupShape(), *self.groups.values())
        return min(shape.heartbeat_timeout_s for shape in shapes)

    @property
    def heartbeat_interval_s(self) -> float:
        """How often members send a heartbeat, from now on."""
        return self._heartbeats.interval_s(len(self._members), self.shortest_lease_s)

    def welcome_settings(self, state: MemberState) -> ChannelSettings:
        """What it is told whenever its session begins."""
        interval_s = self.heartbeat_interval_s
        self._heartbeats.told_one(interval_s)
        return msgspec.structs.replace(state.settings, heartbeat_interval_s=interval_s)

    def tell_interval(self, now: float) -> float:
        """The interval that all members are told now."""
        interval_s = self.heartbeat_interval_s
        self._heartbeats.told_all(interval_s, now)
        return interval_s

    def suspect(self, state: MemberState, now: float) -> bool:
        """Whether it has missed three heartbeats, or lost its connection and not come
        back."""
        cut = state.cut_at > 0.0 and now - state.cut_at > CUT_S
        return cut or now - state.last_seen > self._heartbeats.patience_s

    def keep_time(self, now: float) -> None:
        """Time passes: what is long past is forgotten."""
        self._forget_old(now)
        self._heartbeats.tick(self.heartbeat_interval_s, now)

    def expired(self, now: float) -> list[MemberState]:
        """Members whose lease has run out."""
        shortest_s = self.shortest_lease_s
        silent = [state for state in self if now - state.last_seen > shortest_s]
        return [s for s in silent if now - s.last_seen > self.shape(s.member.group).heartbeat_timeout_s]

    def forgive(self, pause_s: float, now: float) -> None:
        """The coordinator itself was not running for ``pause_s``: nobody could be
        heard, or seen to make progress."""
        for state in self:
            state.last_seen = max(state.last_seen, min(state.last_seen + pause_s, now))
            state.cut_at = min(state.cut_at + pause_s, now) if state.cut_at else 0.0
            state.progressed_at = max(state.progressed_at, min(state.progressed_at + pause_s, now))

    def pardon(self, members: Container[Member], silence_s: float, now: float, *, grace_s: float = 0.0) -> None:
        """``members`` are not judged by ``silence_s``, in which nobody was heard; those
        in no doubt before have a grace."""
        for state in self:
            if state.member in members:
                doubtful = self.suspect(state, now - silence_s)
                state.last_seen += silence_s + (0.0 if doubtful else grace_s)
                state.progressed_at = min(state.progressed_at + silence_s, now)

    def _preflight_shape(self, hello: Hello) -> object:
        by_device = self.config.backend == "nccl"
        return preflight_shape(hello, carries=carries_bytes(hello, self.config), by_device=by_device)

    def _carries(self, settings: ChannelSettings, hello: Hello) -> bool:
        """Whether bytes go to or from this rank (as a target or a peer; sources are
        looked at by the publish)."""
        if settings.role == "peer":
            return settings.peer_ranks != "leader" or hello.rank == 0
        party = _party(self.config.targets, hello.group)
        return party is None or party.ranks != "leader" or hello.rank == 0

    def _check_newer(self, member: Member, hello: Hello, holder: MemberState) -> None:
        """Of two that were members under another coordinator, the one that was fenced
        there has not heard of later epochs.

        :raises errors.Fenced: it is not ``hello`` that comes later.
        """
        known = (hello.generation, hello.epoch)
        if not hello.resume_term or (holder.from_before and known >= (holder.hello.generation, holder.hello.epoch)):
            return
        raise errors.Fenced(
            f"another process joined as {member} while this one could not be heard",
            channel=self.config.name,
            members=[member.name],
            hint="join again",
        )

    def _check(self, hello: Hello) -> None:
        where = f"{hello.group}/{hello.replica}/{hello.rank}"
        if hello.observe and min(hello.rank, hello.replica) >= 0:
            return  # it takes nobody's place, whatever it calls itself
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

"""The roster of a channel: members, epochs and leases.

Theory of operation
===================

A member's standing follows the table :data:`replicas.core.base.membership.MEMBER`. The
*live* members are the current epoch, an immutable view whose number strictly grows: a
loss makes a new epoch at once, joins wait for :meth:`Roster.admit`. One identity
(group, replica, rank) has at most one incarnation: a later join fences the earlier. The
ranks of a replica that belong together are one
:class:`~replicas.core.members.member_state.Life`; if operations are between all ranks
of the peers, they become live together. A generation that a supervisor has started ends
the one before: members that are left of that are lost (:meth:`Roster.outlived`).

An identity that was lost :data:`FLAPS` times within a minute is on
*probation* when it comes back: it is served at once, and admitted after a delay that
doubles each time, so that a program that dies after each start interrupts the others
less often. The replica that archives is never admitted: it is caught up after commits.

A member that missed three heartbeats (:mod:`replicas.core.members.heartbeats`) is
*suspect*: transfers go on without it. So is one whose connection ended and that has not
reconnected within :data:`CUT_S`. A member silent for longer than its lease is lost. The
shell extends all leases by the pauses of its own loop (:meth:`Roster.skip_pause`), so
that a suspended coordinator does not evict members.

*Cost.* A sync to *n* members is some ten messages for each of them; a walk over all
members at each message would make it quadratic. So messages use indices: members by
name, by replica, by held version, and targets that lack a version. A member's held
versions change in many places;
:class:`~replicas.core.members.member_state.Held` reports each change.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.config.structs import ChannelConfig
from replicas.core.base.membership import MEMBER
from replicas.core.members.heartbeats import Heartbeats
from replicas.core.members.history import History
from replicas.core.members.holders import Holders
from replicas.core.members.member_state import Held, Life, MemberState
from replicas.core.members.preflight import carries_bytes, check_identity, check_join, kind, settings_of
from replicas.messages import ChannelSettings, Hello
from replicas.messages.identity import Member

FLAPS = 3  # fewer may be coincidence
CUT_S = 1.5
"""A member whose connection breaks reconnects well within this time."""
PROBATION = Backoff(1.0, 30.0)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The expected shape of a group.

    :param replicas: expected replicas; operations between peers wait for their first
        join.
    :param world_size: ranks of each replica.
    :param heartbeat_timeout_s: lease of a member: without a sign of life for longer it
        is lost. Default 30 s, at least 2 s.
    """

    replicas: int = 1
    world_size: int = 1
    heartbeat_timeout_s: float = 30.0


class Roster:
    """Members and epochs of one channel."""

    def __init__(self, config: ChannelConfig, groups: Mapping[str, GroupShape], *, epoch: int = 0) -> None:
        """Start without members. ``groups``: expected shape of each group, by its name;
        ``epoch``: number of the last epoch (membership) used before."""
        self.config = config
        self.groups = dict(groups)
        self.epoch = epoch
        self._members: dict[Member, MemberState] = {}
        self._by_name: dict[str, MemberState] = {}
        """Members by name, without observers."""
        self.not_live: dict[Member, MemberState] = {}
        """Members that are neither live nor observing."""
        self.on_held: Callable[[MemberState], None] = lambda _: None
        """Called with a member whose held versions have changed."""
        self._replicas: dict[tuple[str, int], dict[Member, MemberState]] = {}
        self._lives: dict[tuple[str, int], Life] = {}
        self._alike: dict[object, dict[Member, MemberState]] = {}
        self.holders = Holders()
        self._cached: tuple[int, tuple[MemberState, ...], tuple[MemberState, ...]] = (-1, (), ())
        """An epoch, its live members, and those that are targets and carry bytes."""
        self._heartbeats = Heartbeats()
        self.history = History()
        self.carry_port = 0
        """The first port at which a carrier may listen; 0: any."""

    def __iter__(self) -> Iterator[MemberState]:
        return iter(self._members.values())

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)

    def get(self, member: Member) -> MemberState | None:
        """Return the member's state, or None if it is not in the roster."""
        return self._members.get(member)

    def states(self, members: Iterable[Member]) -> list[MemberState]:
        """Return the states of those ``members`` that are in the roster."""
        return [state for state in map(self._members.get, members) if state is not None]

    def address(self, member: Member) -> str:
        """Return the member's address, or "" if it is not in the roster."""
        state = self._members.get(member)
        return state.address if state is not None else ""

    def host(self, member: Member) -> int:
        """Return the number of the member's host; 0 if it is unknown."""
        state = self._members.get(member)
        return state.host if state is not None else 0

    def shape(self, group: str) -> GroupShape:
        """Return a group's expected replicas, ranks and lease (defaults if unknown)."""
        return self.groups.get(group, GroupShape())

    # ------------------------------------------------------------ joins and losses

    def add(self, hello: Hello, address: str, now: float) -> tuple[MemberState, MemberState | None]:
        """Make the state of a new member; return it and the member that it replaces.

        The replaced member is an earlier process of the same rank; None if there is
        none. The roster is not changed: the caller must first remove that member and
        those that :meth:`outlived` returns, and then :meth:`insert` the new one.

        :param hello: its first message.
        :param address: its IP address.
        :raises errors.ReplicasError: the Hello is not acceptable.
        """
        outlived = self.outlived(hello)
        # those are lost before this one enters
        replica = [state for state in self.replica(hello.group, hello.replica) if state not in outlived]
        check_identity(hello, replica, self.config)
        check_join(hello, self.others(hello), self.config)
        member = hello.member
        settings = settings_of(hello, self.config, self.heartbeat_interval_s)
        older = None if hello.observe else self.holder_of(member.name)  # an observer takes no identity
        if older is not None:
            self._check_newer(hello, older)
        state = MemberState(member, hello, settings, address, last_seen=now, progressed_at=now)
        if state.observes:
            state.standing = "observing"
        state.carries = carries_bytes(hello, (*self.config.targets, *self.config.peers))
        state.held = Held({held.version: held.digest for held in hello.held})
        state.lent = {*state.held, *hello.lent}
        state.places = {held.version: held.place for held in hello.held if held.place is not None}
        state.loaded = hello.loaded
        state.resumed = not state.from_before  # others owe a report of their work
        losses = self.history.losses(member.name, now)
        if losses >= FLAPS:
            state.not_before = now + PROBATION.after(losses - FLAPS)
        state.archives = state.slow = self.config.archive is not None and member.group == f"{self.config.name}-archive"
        return state, older

    def outlived(self, hello: Hello) -> list[MemberState]:
        """Return the members of generations that ``hello`` proves to be over.

        Return [] unless a supervisor vouches for the generation (``hello.proof``).
        """
        if not hello.proof or hello.observe:
            return []
        replica = self.replica(hello.group, hello.replica)
        return [state for state in replica if state.hello.generation < hello.generation]

    def _check_newer(self, hello: Hello, holder: MemberState) -> None:
        """Raise Fenced if ``holder``, the member of this rank, is newer than ``hello``.

        A new join is the newest. One that resumes a session under another coordinator
        is newer only than another such one of no later generation and epoch.
        """
        known = (hello.generation, hello.epoch)
        # a new join is the newest, whatever its numbers
        if not hello.resume_term or (holder.from_before and known >= (holder.hello.generation, holder.hello.epoch)):
            return
        raise self.fenced_error(hello)

    def fenced_error(self, hello: Hello, *, heard: bool = False) -> errors.Fenced:
        """Return (do not raise) the error of a member that was lost, or replaced by
        another process. ``heard``: it is connected now; else it has just come back."""
        member, holder = hello.member, None if hello.observe else self.holder_of(hello.member.name)
        what, hint = f"{member} was declared lost while it was disconnected", None if heard else "join again"
        if holder is not None and holder.hello.process == hello.process:
            what, hint = f"this process joined again as {member}", "keep the channel of one join, or close it first"
        elif holder is not None:
            what = f"another process joined as {member}{'' if heard else ' while this one was disconnected'}"
        return errors.Fenced(what, channel=self.config.name, members=[member.name], hint=hint)

    def insert(self, state: MemberState) -> None:
        """Enter a new member's state, made by :meth:`add`, in roster and indices."""
        member = state.member
        self._members[member] = state
        if not state.observes:
            self._by_name[member.name] = self.not_live[member] = state
            self._enter(state)
            self._alike.setdefault(kind(state.hello, self.config), {})[member] = state
            self.history.note_join(member)
        self.holders.insert(state)
        state.held.on_change = partial(self._held_changed, state)

    def _enter(self, state: MemberState) -> None:
        """Add the member to its replica, and to the life that it continues or opens."""
        key, hello = (state.member.group, state.member.replica), state.hello
        life = self._lives.get(key)
        # with a member there, whoever joins is of that life
        if life is None or not (key in self._replicas or life.is_continued_by(hello)):
            life = self._lives[key] = Life(hello.generation)
        life.joined(hello)
        self._replicas.setdefault(key, {})[state.member] = state

    def remove(self, member: Member, *, in_order: bool = False) -> MemberState | None:
        """Remove the member, now ``gone``; return its state, or None if unknown.

        If it was live, a new epoch begins. Unless ``in_order``, its rank counts as
        lost.
        """
        state = self._members.pop(member, None)
        if state is None:
            return None
        state.held.on_change = None
        self.holders.remove(state)
        self.not_live.pop(member, None)
        if not state.observes:
            if self._by_name.get(member.name) is state:  # a later incarnation may have taken the name
                del self._by_name[member.name]
            # ranks that left in order may come back to the same life
            _discard(self._replicas, (member.group, member.replica), member)
            if not in_order:
                self.life(member).lost.add(member.rank)
            _discard(self._alike, kind(state.hello, self.config), member)
        if state.live:
            self.epoch += 1
        state.step("lost")
        return state

    def _held_changed(self, state: MemberState, version: int, held: bool) -> None:
        """Update the indices: the member got (``held``) or dropped the version."""
        self.holders.note(state, version, held=held)
        self.on_held(state)

    # ------------------------------------------------------------ lookups

    def holder_of(self, name: str) -> MemberState | None:
        """Return the present member named ``group/replica/rank``, or None."""
        return self._by_name.get(name)

    def replica(self, group: str, replica: int) -> list[MemberState]:
        """Return the members of one replica, without observers."""
        return list(self._replicas.get((group, replica), {}).values())

    def life(self, member: Member) -> Life:
        """Return the present or last life (run of processes) of a member's replica."""
        return self._lives[member.group, member.replica]

    def lost(self, group: str, replica: int, generation: int | None) -> set[int]:
        """Return the ranks of a replica that were lost and have not come back: those of
        this generation, or of any if it is None."""
        life = self._lives.get((group, replica))
        return set(life.lost) if life is not None and generation in (life.generation, None) else set()

    def joined(self, group: str) -> dict[int, set[str]]:
        """Return the nonces of the joins of the group's members, by replica index."""
        replicas = ((index, members) for (name, index), members in self._replicas.items() if name == group)
        return {index: {member.incarnation for member in members} for index, members in replicas}

    def others(self, hello: Hello) -> list[Hello]:
        """Return one Hello of each kind of member, to be compared with ``hello``.

        Members of the same identity, and those that it outlives, are left out.
        """
        name, outlived = hello.member.name, self.outlived(hello)
        found = (
            next((s.hello for s in states.values() if s.member.name != name and s not in outlived), None)
            for states in self._alike.values()
        )
        return [other for other in found if other is not None]

    @property
    def live(self) -> tuple[MemberState, ...]:
        """Members of the current epoch (membership), by group, replica and rank."""
        return self._current()[1]

    @property
    def targets(self) -> tuple[MemberState, ...]:
        """Live targets that receive bytes themselves, by group, replica and rank."""
        return self._current()[2]

    def _current(self) -> tuple[int, tuple[MemberState, ...], tuple[MemberState, ...]]:
        """Return the epoch, its live members and the targets of these; cached."""
        if self._cached[0] != self.epoch:  # every change of the live set starts a new one
            live = sorted((state for state in self if state.live), key=lambda state: state.member)
            self._cached = self.epoch, tuple(live), tuple(s for s in live if s.is_target and s.carries)
        return self._cached

    # ------------------------------------------------------------ standings

    def admit(self, now: float) -> None:
        """Make all members of :meth:`waiting` live, in one new epoch, if any."""
        waiting = self.waiting(now)
        for state in waiting:
            state.step("admitted")
            state.note, state.missed = "", 0  # forget why it was not live
            del self.not_live[state.member]
        if waiting:
            self.epoch += 1

    def waiting(self, now: float) -> list[MemberState]:
        """Return the members that :meth:`admit` would make live now."""
        return [state for state in self._admissible_members(now) if state.caught_up]

    def missing(self, now: float) -> list[MemberState]:
        """Return members that only a missed version keeps from being admitted."""
        return [state for state in self._admissible_members(now) if not state.caught_up]

    def _admissible_members(self, now: float) -> list[MemberState]:
        """Return the joining or behind members that are :meth:`admissible`."""
        members = self.not_live.values()
        return [s for s in members if MEMBER.allows(s.standing, "admitted") and self.admissible(s, now)]

    def admissible(self, state: MemberState, now: float) -> bool:
        """Return True if only a missed version may keep the member from admission."""
        due = now >= state.not_before and not state.archives
        return due and self.available(state, now) and not self.missing_ranks(state)

    def missing_ranks(self, state: MemberState) -> list[str]:
        """Return the names of ranks that must join before a member may be admitted.
        They are of its replica; none, unless all ranks of peers run operations."""
        if not state.is_peer or self.config.peers[0].ranks != "all":
            return []
        life, member = self.life(state.member), state.member
        absent = [] if life.resumed else [rank for rank in range(state.hello.world_size) if rank not in life.ranks]
        return [f"{member.replica_name}/{rank}" for rank in absent]

    def available(self, state: MemberState, now: float) -> bool:
        """Return True if the member responds, is not draining, and has a known host."""
        return state.host != 0 and not state.draining and not self.is_suspect(state, now)

    def leave_behind(self, state: MemberState, why: str, *, missed: int = 0) -> None:
        """Begin an epoch without a live member: it is ``behind`` until it caught up.

        :param why: reason, for its status.
        :param missed: the version that it must have to be admitted again; 0 for none.
        """
        self.epoch += 1  # only live members are left behind
        state.step("left_behind")
        self.not_live[state.member] = state
        state.note, state.missed = why, missed

    # ------------------------------------------------------------ signs of life

    def note_heard(self, member: Member, now: float, rtt_s: float = 0.0) -> None:
        """Count a member's silence from ``now``; store the round-trip time unless 0."""
        if (state := self.get(member)) is not None:
            state.last_seen = max(state.last_seen, now)  # extend_leases() may have set it ahead of now
            state.rtt_s = rtt_s or state.rtt_s

    def connected(self, member: Member, now: float) -> None:
        """Record that the member has reconnected, and so was heard now."""
        if (state := self.get(member)) is not None:
            state.cut_at = 0.0
            self.note_heard(member, now)

    def disconnected(self, member: Member, now: float) -> None:
        """Record that a member's connection ended: suspect in 1.5 s without another."""
        if (state := self.get(member)) is not None:
            state.cut_at = now

    def update_patience(self, now: float) -> None:
        """Update after how much silence a member is suspect; call regularly."""
        self._heartbeats.tick(self.heartbeat_interval_s, now)

    @property
    def shortest_lease_s(self) -> float:
        """Shortest lease of any group, in seconds; at most 30, the default."""
        return min(shape.heartbeat_timeout_s for shape in (GroupShape(), *self.groups.values()))

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between heartbeats for the present number of members."""
        return self._heartbeats.interval_s(len(self._members), self.shortest_lease_s)

    def welcome_settings(self, state: MemberState) -> ChannelSettings:
        """Return the settings for a member's Welcome; note their heartbeat interval."""
        interval_s = self.heartbeat_interval_s
        self._heartbeats.note_sent_to_one(interval_s)
        return msgspec.structs.replace(state.settings, heartbeat_interval_s=interval_s, carry_port=self.carry_port)

    def take_interval_to_send(self, now: float) -> float:
        """Return the heartbeat interval, and note that all members are sent it now."""
        interval_s = self.heartbeat_interval_s
        self._heartbeats.note_sent_to_all(interval_s, now)
        return interval_s

    def is_suspect(self, state: MemberState, now: float) -> bool:
        """Return True if the member missed 3 heartbeats, or was cut off for 1.5 s.
        Work goes on without it, but it stays a member until its lease ends."""
        cut = state.cut_at > 0.0 and now - state.cut_at > CUT_S
        return cut or now - state.last_seen > self._heartbeats.patience_s

    def is_silent(self, state: MemberState, now: float) -> bool:
        """Return True if the member missed a heartbeat, or is not connected."""
        return state.cut_at > 0.0 or now - state.last_seen > self._heartbeats.silent_s

    def expired(self, now: float) -> list[MemberState]:
        """Return members silent beyond their leases; the caller must remove them."""
        shortest_s = self.shortest_lease_s
        # a cheap filter before each group is looked up
        silent = [state for state in self if now - state.last_seen > shortest_s]
        return [s for s in silent if now - s.last_seen > self.shape(s.member.group).heartbeat_timeout_s]

    def skip_pause(self, pause_s: float, now: float) -> None:
        """Extend all leases by ``pause_s``, in which the coordinator was suspended."""
        for state in self:
            # never earlier than before, never later than now
            state.last_seen = max(state.last_seen, min(state.last_seen + pause_s, now))
            state.cut_at = min(state.cut_at + pause_s, now) if state.cut_at else 0.0
            state.progressed_at = max(state.progressed_at, min(state.progressed_at + pause_s, now))

    def extend_leases(self, members: Container[Member], silence_s: float, now: float, *, grace_s: float = 0.0) -> None:
        """Extend the leases of ``members`` by ``silence_s``, in which none was heard.
        Members that were not suspect before get ``grace_s`` in addition."""
        for state in self:
            if state.member in members:
                doubtful = self.is_suspect(state, now - silence_s)  # as judged when the silence began
                state.last_seen += silence_s + (0.0 if doubtful else grace_s)
                state.progressed_at = min(state.progressed_at + silence_s, now)


def _discard(of: dict[Any, dict[Member, MemberState]], key: object, member: Member) -> None:
    """Remove the member from ``of[key]``, and the key with its last member."""
    states = of[key]
    states.pop(member, None)
    if not states:
        del of[key]

"""The newest committed version outlives its source on every host, and can be sent from there: keepers.

Theory of operation
===================

A *keeper* is a process of ours that is nobody's rank (:mod:`replicas.keeper`). It has a session with ``Hello(keeps=True)``,
proves its host like a member, maps versions there, holds them and gives them to others; but it is in no epoch, nobody waits
for it as for a target, and no receipt names it. With transfers it works as members do, so what it holds is found, mapped,
sent, and announced to a coordinator that starts again, by what there is for members.

There is one on each host that has a source, but not the coordinator: there the coordinator's own process holds the memory
(:mod:`replicas.core.keeping`), which costs nothing. A source of a host without a keeper is asked to start one; the next one
when none has come, at growing intervals. The coordinator has one started beside itself only when what it keeps must be sent
to another host, and nobody else has it. One that is not needed any more is told to leave, and so is a second one of a host.

Keepers map a version when it is packed, in a transfer of their own beside the main one (:attr:`Keepers.transfer`), and those
that come later when it is committed. The commit waits for that only when nobody but its publisher has the version
(:meth:`Keepers.awaited`), and not for long. A version in parts is put together by a keeper on whose host all of them are,
when no target is there to do it; of one whose parts are on several hosts nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replicas import errors
from replicas import messages as wire
from replicas.core.effects import Send, StartKeeper
from replicas.core.identity import Member
from replicas.core.payload import Payload
from replicas.core.roster import MemberState
from replicas.core.transfers import Transfer

if TYPE_CHECKING:
    from replicas.core.channel import ChannelState

__all__ = ["START_MAX_S", "Keepers"]

START_S = 20.0
"""How long a keeper that was asked for is waited for, until another member is asked; longer each time."""
START_MAX_S = 300.0
MAP_S = 5.0
"""How long a keeper may take to map a version."""
AWAITED_S = 2 * MAP_S
"""How long a version that only its publisher has waits for a keeper that is there, can be heard, and has not failed."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
TRIES = 4
"""After so many failures in a row a keeper is replaced; after so many starts in vain a host is expected to have none."""


@dataclass(slots=True)
class _Ask:
    """A keeper that a host should have. ``at``: when somebody was last asked to start it."""

    tries: int = 0
    at: float = 0.0
    again_at: float = 0.0


class Keepers:
    """The keepers of one channel. ``transfer``: by which some of them get a version now."""

    def __init__(self, channel: ChannelState) -> None:
        self._channel = channel
        self.transfer: Transfer | None = None
        self._members: dict[Member, MemberState] = {}
        self._sources: dict[Member, MemberState] = {}
        """Those whose memory has versions that others of their host could map."""
        self._asks: dict[int, _Ask] = {}
        self._wanted: set[int] = set()
        """Hosts that should have one."""
        self._dismissed: set[Member] = set()
        self._seen = 0
        self._closed = False

    # ------------------------------------------------------------ who is there

    def joined(self, state: MemberState) -> None:
        """A member, or a keeper, is new in the roster."""
        publishes = state.is_source and (state.settings.source_ranks == "all" or state.member.rank == 0)
        if state.keeps:
            self._members[state.member] = state
        elif publishes and self._channel.hosts.shares(state):
            self._sources[state.member] = state

    def lost(self, state: MemberState, host: int, now: float) -> None:
        """It is out of the roster. ``host``: where it was."""
        self._sources.pop(state.member, None)
        if self._members.pop(state.member, None) is not None:
            self._dismissed.discard(state.member)
            ask = self._asks.setdefault(host, _Ask())
            ask.again_at = min(ask.again_at, now + RETRY_S * 2**ask.tries) if ask.tries else now
        self._seen = -1

    def close(self) -> None:
        """The run is over: all are to leave, and nobody is asked for another one."""
        self._closed = True
        for member in self._members:
            self._dismiss(member)

    def unable(self, member: Member) -> None:
        """It cannot map the memory of its host: another one may."""
        self._dismiss(member)

    # ------------------------------------------------------------ moving on

    def advance(self, now: float) -> None:
        """Look who is needed where, if that may have changed, and have versions mapped."""
        if self._seen != self._channel.hosts.changes:
            self._look(now)
        if self._members:
            self._move(now)

    def tick(self, now: float) -> None:
        """Time passes."""
        transfer = self.transfer
        if transfer is not None and now > transfer.deadline:
            transfer.stop(complete=False)
            self._ended(transfer, errors.DeadlineExceeded("keepers", phase="transfer"), now)
        self._seen = -1

    def _look(self, now: float) -> None:
        hosts = self._channel.hosts
        self._seen = hosts.changes
        possible = hosts.own and not self._closed
        wanted = {state.host for state in self._sources.values()} - {0, hosts.own} if possible else set()
        if possible and self._asked_to_send():
            wanted.add(hosts.own)
        self._wanted = wanted
        latest = self._channel.commits.latest
        there: dict[int, MemberState] = {}
        for state in sorted(self._members.values(), key=lambda one: (latest not in one.held, one.member)):
            if state.member in self._dismissed or not state.host:
                continue
            first = there.setdefault(state.host, state)
            if state is not first or not (state.host in wanted or self._precious(state)):
                self._dismiss(state.member)
        for host in wanted - there.keys():
            self._ask(host, now)
        for host in self._asks.keys() - wanted:
            del self._asks[host]

    def _precious(self, keeper: MemberState) -> bool:
        """Whether it has something to keep, though no source is on its host."""
        commits = self._channel.commits
        if commits.main is not None and commits.main.payload.version in keeper.held:
            return True
        if commits.latest not in keeper.held:
            return False
        others = (one for one in self._channel.roster.holders(commits.latest) if not one.keeps)
        return keeper.host != self._channel.hosts.own or not any(others)

    def _ask(self, host: int, now: float) -> None:
        ask = self._asks.setdefault(host, _Ask())
        if now < ask.again_at:
            return
        out = self._channel.out
        if host == self._channel.hosts.own:
            out.append(StartKeeper(self._channel.config.name))
        else:
            here = [state for state in self._sources.values() if state.host == host]
            here.sort(key=lambda state: (self._channel.roster.suspect(state, now), state.member))
            out.append(Send(here[ask.tries % len(here)].member, wire.KeeperWanted()))
        ask.at, ask.again_at = now, now + min(START_MAX_S, START_S * 2**ask.tries)
        ask.tries += 1

    def _dismiss(self, member: Member) -> None:
        if member not in self._dismissed:
            self._dismissed.add(member)
            self._channel.out.append(Send(member, wire.KeeperOver()))

    # ------------------------------------------------------------ what the coordinator keeps, for other hosts

    def _asked_to_send(self) -> bool:
        """Whether only what the coordinator keeps is left of the newest version, and somebody elsewhere lacks it."""
        commits, roster, own = self._channel.commits, self._channel.roster, self._channel.hosts.own
        version, payload = commits.latest, commits.committed
        if payload is None or not self._channel.keeping.of(version):
            return False
        if any(not state.keeps or state.host != own for state in roster.holders(version)):
            return False
        if payload.part_owners and all(member in roster for member in payload.part_owners):
            return False  # they send it themselves
        lacking = any(state.host not in (0, own) for state in roster.lacking(version))
        return lacking and self._channel.keeping.has_all(version, payload.part_owners)

    def may_send(self) -> bool:
        """Whether one beside the coordinator can be expected to send what is kept there."""
        ask = self._asks.get(self._channel.hosts.own)
        return (ask is None or ask.tries <= TRIES) and self._asked_to_send()

    # ------------------------------------------------------------ mapping versions

    def awaited(self, payload: Payload, since: float, until: float, now: float) -> bool:
        """Whether a keeper is about to have a version that nobody but its publisher has.

        :param since: when the version was ready to be committed but for that. :param until: it must not wait longer.
        """
        holders = self._channel.roster.holders(payload.version)
        if payload.part_owners or len(holders) != 1 or now >= until:
            return False
        [source] = holders
        near = source.host == self._channel.hosts.own
        if source.member not in self._sources or payload.version not in source.places or near:
            return False
        here = [state for state in self._members.values() if state.host == source.host]
        if here:
            return now < since + AWAITED_S and any(self._able(state, now) for state in here)
        ask = self._asks.get(source.host)
        starts = ask is not None and ask.tries == 1 and now < ask.at + START_S
        return starts and not self._channel.roster.lacking(payload.version)  # targets that come get it sooner

    def _able(self, keeper: MemberState, now: float) -> bool:
        """Whether it may be given something now."""
        away = keeper.member in self._dismissed or self._channel.roster.suspect(keeper, now)
        return not away and keeper.host != 0 and now >= keeper.retry_at

    def _move(self, now: float) -> None:
        """Have the keepers that lack it get what is on its way, and what is committed."""
        commits = self._channel.commits
        main = commits.main.payload if commits.main is not None else None
        if self.transfer is not None and all(self.transfer.payload is not one for one in (commits.committed, main)):
            self.stop(self.transfer.payload, now)  # it has been overtaken
        if self.transfer is not None:
            return
        if main is not None and (main.filling is not None or main.part_owners):
            main = None
        for payload in (main, commits.committed):
            needers = self._needers(payload, now) if payload is not None else []
            if payload is not None and needers:
                self.transfer = Transfer(
                    self._channel,
                    payload,
                    needers,
                    kind="catch_up",
                    deadline=now + (MAP_S if self._whole(payload.version) else self._channel.config.deadline_s),
                    on_end=self._ended,
                )
                self.transfer.start(now)
                return

    def stop(self, payload: Payload | None, now: float) -> None:
        """Nobody needs these bytes any more."""
        transfer = self.transfer
        if transfer is not None and transfer.payload is payload:
            transfer.stop(complete=True)
            self._ended(transfer, None, now)

    def _needers(self, payload: Payload, now: float) -> list[Member]:
        version = payload.version
        lacking = [one for one in self._members.values() if version not in one.held and self._able(one, now)]
        lacking = [one for one in lacking if one.host in self._wanted]  # what the others have is all that they get
        if not lacking:
            return []
        if whole := self._whole(version):
            hosts = {one.host for one in whole if version in one.places}
            return [one.member for one in lacking if one.host in hosts]
        return [one.member for one in lacking if self._puts_together(one, payload)][:1]

    def _whole(self, version: int) -> list[MemberState]:
        """Those who have all of it, and those who stand in for them."""
        kept = [one for one in self._channel.keeping.of(version) if version in one.held]
        return [*self._channel.roster.holders(version), *kept]

    def _puts_together(self, keeper: MemberState, payload: Payload) -> bool:
        """Whether it should make a whole version of the parts."""
        roster, keeping, own = self._channel.roster, self._channel.keeping, self._channel.hosts.own
        if not payload.part_owners or self._channel.commits.catch_up.transfer is not None:
            return False
        if keeper.host == own:
            return self._asked_to_send()
        owners = [keeping.get(member) or roster.get(member) for member in payload.part_owners]
        here = all(one is not None and one.host == keeper.host and payload.version in one.parts for one in owners)
        return here and not roster.lacking(payload.version)

    def _ended(self, transfer: Transfer, error: errors.ReplicasError | None, now: float) -> None:
        channel = self._channel
        self.transfer = None
        if transfer.lane is not None:
            channel.close_lane(transfer.lane)
            transfer.lane = None
        channel.commits.assembled(transfer.payload)
        for member in transfer.asked:
            state = self._members.get(member)
            if state is None:
                continue
            if member in transfer.verified:
                state.failures = 0
                self._asks.pop(state.host, None)
            elif transfer.state == "failed":
                state.failures += 1
                state.retry_at = now + min(RETRY_MAX_S, RETRY_S * 2**state.failures)
                if state.failures >= TRIES:
                    self._dismiss(member)

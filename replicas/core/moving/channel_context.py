"""The state and callbacks that the parts of one channel share.

A part is given a :class:`ChannelContext` and the few other parts that it works with,
never the whole :class:`~replicas.core.channel_state.ChannelState`: its constructor
names all it can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from replicas.config.structs import ChannelConfig
from replicas.core.base.effects import Effect, Event, Past, Retried, Send
from replicas.core.members.hosts import Hosts, Keeping
from replicas.core.members.member_state import HighWaterMarks
from replicas.core.members.roster import Roster
from replicas.core.moving.lanes import Lanes
from replicas.core.moving.links import Links
from replicas.messages import FromCoordinator
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member


@dataclass(frozen=True, slots=True)
class ChannelContext:
    """The shared parts of one channel.

    :ivar out: the effects of the current event, in order.
    :ivar ids: unique numbers for attempts.
    :ivar quarantine: excludes a member from joint work.
    :ivar others_wait: whether a publish or an admission waits for the current publish
        to end.
    """

    term: int
    past: Past
    roster: Roster
    hosts: Hosts
    keeping: Keeping
    lanes: Lanes
    links: Links
    out: list[Effect]
    quarantine: Callable[[Member, str, float], None]
    others_wait: Callable[[float], bool]
    marks: HighWaterMarks = field(default_factory=HighWaterMarks)
    ids: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def config(self) -> ChannelConfig:
        return self.roster.config

    def send(self, member: Member, message: FromCoordinator) -> None:
        self.out.append(Send(member, message))

    def emit(self, event: Event) -> None:
        self.out.append(event)

    def emit_retried(self, reason: str, why: str = "") -> None:
        """Report another attempt of a transfer or an operation."""
        self.emit(Retried(self.config.name, reason, text_of(why, REASON_LENGTH)))

"""The state and callbacks that the parts of one channel share.

A part is given a :class:`ChannelContext` and the few other parts that it works with,
never the whole :class:`~replicas.core.channel_state.ChannelState`: its constructor
names all it can change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from replicas import errors
from replicas.common.backoff import Backoff
from replicas.config.structs import ChannelConfig
from replicas.core.base.effects import Effect, Event, Retried, Send
from replicas.core.base.ledger import Decision, DecisionKind, Ledger, Past
from replicas.core.members.hosts import Hosts, Keeping
from replicas.core.members.member_state import HighWaterMarks
from replicas.core.members.roster import Roster
from replicas.core.moving.links import Doubt, Links
from replicas.messages import FromCoordinator
from replicas.messages.bounds import REASON_LENGTH, text_of
from replicas.messages.identity import Member

REST = Backoff(1.0, 300.0)
"""How long versions are pulled, in seconds, after a broadcast has failed."""


BroadcastEnd = Callable[[errors.ReplicasError | None, float, float], None]
"""Called as ``on_end(error, form_s, now)`` at the end of a broadcast; ``error`` is None
after a success, ``form_s`` the time to form the process group."""
Broadcast = Callable[[int, tuple[Member, ...], str, float, BroadcastEnd, float], Callable[[str], None]]
"""Starts the broadcast of the slots of one attempt of a transfer, as
``broadcast(number, members, device, deadline, on_end, now)``.

``number``: of the attempt. ``members``: the holder first; each has offered a slot for
the attempt. ``device``: type of the device of the slots. Returns a function that
cancels the broadcast, without calling ``on_end``; it takes a reason.
"""


@dataclass(frozen=True, slots=True)
class ChannelContext:
    """The objects that the state machines of one channel share: members, effects, ...

    :ivar past: the decisions of earlier coordinators; its ledger goes on here.
    :ivar out: the effects of the current event, in order.
    :ivar ids: unique numbers for attempts.
    :ivar broadcast: starts the broadcast of a version.
    :ivar pull_secret: returns the secret with which members pull in one attempt.
    :ivar group_doubt: holds while versions are pulled, as a broadcast has failed.
    :ivar tell_all: tells each member of the commits that it is to know.
    :ivar others_wait: whether a publish or an admission waits for the current publish
        to end.
    """

    term: int
    past: Past
    roster: Roster
    hosts: Hosts
    keeping: Keeping
    links: Links
    out: list[Effect]
    broadcast: Broadcast
    pull_secret: Callable[[int], bytes]
    others_wait: Callable[[float], bool]
    tell_all: Callable[[], None]
    group_doubt: Doubt = field(default_factory=partial(Doubt, REST))
    marks: HighWaterMarks = field(default_factory=HighWaterMarks)
    ids: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def config(self) -> ChannelConfig:
        """The channel's config."""
        return self.roster.config

    @property
    def ledger(self) -> Ledger:
        """The decisions so far, also those whose write to disk is still queued."""
        return self.past.ledger

    def decide(self, kind: DecisionKind, version: int, **more: Any) -> None:
        """Apply a decision to the ledger now, and queue it for the decision log.

        The engine has it on disk before it applies any later effect.

        :param kind: such as ``commit`` or ``promote``.
        :param version: the version that it is about.
        :param more: fields of the :class:`~replicas.core.base.ledger.Decision`.
        """
        decision = Decision(kind, self.config.name, version, epoch=self.roster.epoch, term=self.term, **more)
        self.ledger.apply(decision)
        self.out.append(decision)

    def send(self, member: Member, message: FromCoordinator) -> None:
        """Queue a message to a member.

        The engine sends it after all earlier effects.
        """
        self.out.append(Send(member, message))

    def emit(self, event: Event) -> None:
        """Queue an event for the event log.

        The engine records it after all earlier effects.
        """
        self.out.append(event)

    def emit_retried(self, reason: str, why: str = "") -> None:
        """Queue the event that a transfer or an operation starts another attempt.

        :param reason: label: ``lost``, ``frozen``, ``failed``, ``refused`` or
            ``store``.
        :param why: why a process group was abandoned, as text; "" if none was.
        """
        self.emit(Retried(self.config.name, reason, text_of(why, REASON_LENGTH)))

"""Send every member a View of each new epoch.

A View carries the members that joined and left since the last one. While many members
join in a row, Views wait and collect them, so that 1,000 joins do not cost a million
messages.
"""

from __future__ import annotations

from replicas import messages as wire
from replicas.core.base.effects import Effect, EpochStarted, Send
from replicas.core.members.roster import Roster
from replicas.messages.identity import Member

WHOLE_VIEW = 32
"""Up to this many members, every View names all: a difference would save nothing."""
VIEWS_PER_S = 5_000
"""Long-run rate of Views, counted per receiving member; later changes wait."""
VIEWS_AT_ONCE = 2_000


class Views:
    """Sends the members of a channel each new membership, as a message View.

    It limits the rate, and remembers which membership it sent last.
    """

    def __init__(self, roster: Roster, out: list[Effect]) -> None:
        """Start with the roster's epoch as known to all members; send nothing.

        :param out: the channel's effects, to which Views (memberships) are added.
        """
        self._roster, self._out = roster, out
        self._epoch = roster.epoch
        self._members: frozenset[Member] = frozenset()
        self._credit = float(VIEWS_AT_ONCE)
        self._at = 0.0

    def send_views_if_due(self, now: float) -> None:
        """Queue a View to each member if the epoch is new and the rate limit allows it.

        Otherwise do nothing; a later call sends it.
        """
        if self._epoch == self._roster.epoch:
            return
        self._credit = min(float(VIEWS_AT_ONCE), self._credit + VIEWS_PER_S * (now - self._at))
        self._at = now
        if self._credit > 0:  # one View may overdraw it, or a large channel would wait for ever
            self._credit -= len(self._roster)
            self._publish(now)

    def _publish(self, now: float) -> None:
        """Queue a View of the present epoch to each member, and emit EpochStarted.

        Members that know the epoch of the last View get the difference, if that is
        shorter.
        """
        roster, known = self._roster, self._epoch
        members = tuple(state.member for state in roster.live)
        interval_s = roster.take_interval_to_send(now)
        view = wire.View(roster.epoch, members, heartbeat_interval_s=interval_s)
        change = view
        everybody = frozenset(members)
        if len(members) > WHOLE_VIEW:
            joined, left = sorted(everybody - self._members), sorted(self._members - everybody)
            if len(joined) + len(left) < len(members):  # else the whole View is shorter
                change = wire.View(roster.epoch, tuple(joined), known, tuple(left), interval_s)
        self._epoch, self._members = roster.epoch, everybody
        self._out.append(EpochStarted(roster.config.name, roster.epoch, members))
        for state in roster:
            # a difference needs the epoch before it
            self._out.append(Send(state.member, change if state.view_epoch == known else view))
            state.view_epoch = roster.epoch

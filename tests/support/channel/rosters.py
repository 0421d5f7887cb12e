"""What a roster knows by its indices, compared with what a walk over all its members
finds."""

from __future__ import annotations

from replicas.core.members.roster import Roster

__all__ = ["check_roster"]


def check_roster(roster: Roster) -> None:
    """:raises AssertionError: an index has gone its own way."""
    states = list(roster)
    known = [state for state in states if not state.observes]
    carriers = [state for state in states if state.is_target and state.carries]
    live = sorted((state for state in states if state.live), key=lambda state: state.member)
    assert roster.live == tuple(live)
    assert roster.targets == tuple(state for state in live if state in carriers)
    assert set(roster.not_live.values()) == {state for state in known if not state.live}
    for state in known:
        member = state.member
        assert roster.holder_of(member.name) is state
        same = [one for one in known if one.member.replica_name == member.replica_name]
        assert roster.replica(member.group, member.replica) == same
    for version in {version for state in states for version in state.held} | {0}:
        assert set(roster.holders.of(version)) == {state for state in states if version in state.held}
        assert roster.holders.lacking(version) == [state for state in carriers if version not in state.held]

"""The round of a target replica: its life by the table, under any history.

Covers: core/versions/load_rounds.py.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from replicas import messages as wire
from replicas.common.table import InvalidStep
from replicas.core.base.effects import Effect, ReplicaLoaded, Send
from replicas.core.base.membership import ROUND
from replicas.core.members.member_state import MemberState
from replicas.core.versions.load_rounds import LoadRounds, Newest, ReplicaView, Served
from replicas.messages.identity import Member, ProcessIdentity

HELLO = wire.Hello(1, "", "policy", "rollout", 0, 0, 2, "", 1, ProcessIdentity(1, 2, "b", 3))
SETTINGS = wire.ChannelSettings("target", 5.0, 2, "leader", "all", 1.0)


class Replica:
    """Two ranks of one target replica; each holds all that is committed until it is
    told otherwise."""

    def __init__(self) -> None:
        self.out: list[Effect] = []
        self.rounds = LoadRounds("policy", lambda group, replica: self.view(), self.out)
        self.ranks: dict[int, MemberState] = {}
        self.latest = 0
        self.meta: dict[str, object] | None = {}
        self.incarnations = 0

    @property
    def state(self) -> str:
        return self.rounds.of("rollout", 0).state

    def view(self) -> ReplicaView:
        return ReplicaView([self.ranks[rank] for rank in sorted(self.ranks)], 2)

    def join(self, rank: int, **from_before: int) -> None:
        """``from_before``: what it says in its Hello of the coordinator before."""
        self.incarnations += 1
        member = Member("rollout", 0, rank, str(self.incarnations))
        term = 1 if from_before else 0
        hello = msgspec.structs.replace(
            HELLO, rank=rank, incarnation=member.incarnation, resume_term=term, **from_before
        )
        state = MemberState(member, hello, SETTINGS, "127.0.0.1", 0.0, loaded=hello.loaded)
        if self.latest:
            state.held[self.latest] = "digest"
        self.ranks[rank] = state
        self.rounds.joined(state)
        self.advance()

    def lose(self, rank: int, *, in_order: bool = False) -> None:
        state = self.ranks.pop(rank)
        self.rounds.lost(state, in_order=in_order)
        self.advance()

    def commit(self) -> None:
        self.latest += 1
        for state in self.ranks.values():
            state.held[self.latest] = "digest"
        self.advance()

    def ask(self, *ranks: int, after: int = 0, at_least: float = 0, key: str = "") -> None:
        for rank in ranks:
            state = self.ranks[rank]
            self.rounds.ask(state.member, wire.ReceiveAsk(1, max(after, state.loaded), at_least, key))
        self.advance()

    def ask_again(self, *ranks: int) -> None:
        """For version 1, which is enough."""
        for rank in ranks:
            self.rounds.ask(self.ranks[rank].member, wire.ReceiveAsk(1, 0, 1))
        self.advance()

    def loaded(self, rank: int, version: int) -> None:
        self.rounds.loaded(self.ranks[rank], version)
        self.advance()

    def failed(self, rank: int) -> None:
        self.rounds.failed(self.ranks[rank], 1, "it has other shapes")
        self.advance()

    def advance(self) -> None:
        self.rounds.advance("rollout", 0, Newest(self.latest, self.meta))

    def granted(self) -> dict[int, int]:
        """The newest grant of each rank."""
        found = [sent for sent in self.out if isinstance(sent, Send) and isinstance(sent.message, wire.ReceiveGrant)]
        return {sent.member.rank: sent.message.version for sent in found if isinstance(sent.message, wire.ReceiveGrant)}

    def served(self) -> list[int]:
        """Versions that the whole replica served, in order."""
        return [effect.version for effect in self.out if isinstance(effect, ReplicaLoaded)]


@pytest.fixture
def replica() -> Replica:
    one = Replica()
    for rank in range(2):
        one.join(rank)
    return one


def test_from_the_first_ask_to_loaded_by_all(replica: Replica) -> None:
    assert replica.state == "idle"
    replica.ask(0)
    assert replica.state == "idle"  # nothing is committed
    replica.commit()
    assert replica.state == "loading"
    assert replica.granted() == {0: 1}
    replica.loaded(0, 1)
    assert replica.state == "loading"
    replica.commit()
    replica.ask(0)
    assert replica.granted() == {0: 1}, "the other rank has yet to load version 1"
    replica.ask(1)
    assert replica.granted() == {0: 1, 1: 1}
    replica.loaded(1, 1)
    assert replica.granted() == {0: 2, 1: 1}
    replica.ask(1)
    replica.loaded(1, 2)
    replica.loaded(0, 2)
    assert replica.state == "loaded"
    assert replica.served() == [1, 0, 2]


def test_an_assigned_version_waits_for_its_ranks(replica: Replica) -> None:
    replica.ask(0)
    replica.ranks[1].held[1] = "digest"
    replica.latest = 1
    replica.advance()
    assert replica.state == "idle", "a rank does not hold it"
    replica.ranks[0].held[1] = "digest"
    replica.advance()
    assert replica.state == "loading"


def test_a_lost_rank_tears_a_loaded_round_and_the_new_one_loads_the_newest(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    replica.loaded(0, 1)
    replica.loaded(1, 1)
    assert replica.state == "loaded"
    replica.lose(1)
    assert replica.state == "loading"
    assert replica.rounds.of("rollout", 0).loaded == 0
    replica.join(1)
    replica.ask(1)
    replica.loaded(1, 1)
    assert replica.state == "loaded"
    assert replica.served() == [1, 0, 1]


def test_a_rank_that_has_loaded_a_version_and_left_has_begun_it_for_the_others(replica: Replica) -> None:
    replica.commit()
    replica.ask(0)
    replica.loaded(0, 1)
    replica.lose(0, in_order=True)
    replica.commit()
    replica.ask(1)
    assert replica.granted()[1] == 1, "the others of its life load what it has loaded"
    replica.loaded(1, 1)
    replica.ask(1)
    assert replica.granted()[1] == 1, "a newer version is loaded by all, or by none"


def test_a_version_that_a_lost_rank_had_loaded_binds_nobody(replica: Replica) -> None:
    replica.commit()
    replica.ask(0)
    replica.loaded(0, 1)
    replica.lose(0)
    replica.commit()
    replica.join(0)
    replica.ask(0, 1)
    assert replica.granted() == {0: 2, 1: 2}


def test_partial_until_all_serve_the_same(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    replica.loaded(0, 1)
    replica.failed(1)
    assert replica.rounds.of("rollout", 0).partial
    replica.commit()
    replica.ask(0, 1)
    assert replica.granted() == {0: 2, 1: 2}
    assert replica.state == "partial"
    replica.loaded(0, 2)
    assert replica.state == "partial"
    replica.loaded(1, 2)
    assert replica.state == "loaded"


def test_a_rank_that_comes_back_with_the_old_version_makes_it_whole_again(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    replica.loaded(0, 1)
    replica.loaded(1, 1)
    replica.commit()
    replica.ask(0)
    replica.failed(1)
    assert replica.state == "partial"
    replica.lose(1)
    replica.join(1, loaded=1)
    assert replica.state == "assigned"
    assert replica.rounds.of("rollout", 0).loaded == 1
    replica.ask(1)
    assert replica.state == "loading"


def test_under_a_new_coordinator_the_round_goes_on() -> None:
    replica = Replica()
    replica.latest = 4
    replica.join(0, loaded=3, assigned=4)
    assert replica.state == "loading"
    replica.join(1, loaded=4)
    replica.loaded(0, 4)
    assert replica.state == "loaded"
    replica = Replica()
    replica.latest = 4
    replica.join(0, loaded=4)
    assert replica.state == "assigned"
    replica.join(1, loaded=4)
    assert replica.state == "loaded"


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_had_not_heard_what_they_are_to_load_are_told_by_a_new_coordinator(first: int) -> None:
    replica = Replica()
    replica.latest = 4
    for rank in (first, 1 - first):
        replica.join(rank, **({"assigned": 4, "loaded": 3} if rank == 0 else {"loaded": 3}))
    told = {sent.member.rank for sent in replica.out if isinstance(sent, Send) and sent.message == wire.Assigned(4)}
    assert 1 in told


def test_a_rank_that_has_loaded_a_version_need_not_keep_it_for_the_others(replica: Replica) -> None:
    replica.commit()
    replica.ask(0)
    replica.loaded(0, 1)
    replica.commit()
    del replica.ranks[0].held[1]
    replica.ask(0, 1)
    assert replica.granted() == {0: 1, 1: 1}
    replica.loaded(1, 1)
    assert replica.granted() == {0: 2, 1: 1}


def test_what_nobody_has_looked_at_is_given_back_and_the_newest_is_granted(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    assert replica.granted() == {0: 1, 1: 1}
    replica.commit()
    replica.ask(0)
    assert replica.granted() == {0: 1, 1: 1}, "the other rank may be loading it"
    replica.ask(0, 1)
    assert replica.granted() == {0: 2, 1: 2}
    replica.loaded(0, 2)
    replica.commit()
    replica.ask(1)
    assert replica.granted() == {0: 2, 1: 2}, "the other rank serves it"


def test_a_rank_that_has_given_up_asking_does_not_hold_the_round(replica: Replica) -> None:
    """Its ask was granted while it said so."""
    replica.commit()
    replica.ask(0)
    replica.rounds.cancel_ask(replica.ranks[0].member, 1)
    replica.commit()
    replica.ask(1)
    assert replica.granted() == {0: 1, 1: 2}


def test_a_replica_that_has_given_everything_back_is_not_loading(replica: Replica) -> None:
    replica.commit()
    replica.ask(0)
    assert replica.rounds.loading("rollout", 0)
    replica.ranks[0].draining = replica.ranks[1].draining = True
    replica.commit()
    replica.ask(0)
    assert not replica.rounds.loading("rollout", 0)
    assert replica.granted() == {0: 1}, "it is granted nothing new while it is drained"


def test_at_least_a_number(replica: Replica) -> None:
    """Of a replica that was started again while version 2 was committing."""
    replica.commit()
    replica.ask(0, 1, at_least=2)
    assert replica.granted() == {}
    replica.commit()
    assert replica.granted() == {0: 2, 1: 2}


def test_at_least_a_number_in_what_the_publisher_said(replica: Replica) -> None:
    replica.ask(0, 1, at_least=10.5, key="step")
    for said in (10, "11", True, None, float("nan")):
        replica.meta = {"step": said, "other": 99}
        replica.commit()
        assert replica.granted() == {}, said
    replica.meta = {"step": 11}
    replica.commit()
    assert replica.granted() == {0: replica.latest, 1: replica.latest}


def test_a_version_that_is_enough_is_granted_again(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    for rank in range(2):
        replica.loaded(rank, 1)
    replica.out.clear()
    replica.ask_again(0)
    assert replica.granted() == {0: 1}
    replica.loaded(0, 1)
    replica.commit()
    replica.ask_again(0)
    assert replica.granted() == {0: 1}, "the other rank repeats the step first"
    replica.out.clear()
    replica.ask_again(1)
    assert replica.granted() == {1: 1, 0: 2}, "the same, and then both go on"
    replica.loaded(1, 1)
    replica.ask_again(1)
    assert replica.granted() == {0: 2, 1: 2}
    assert replica.state == "loading"


def test_a_rank_that_goes_on_without_repeating_holds_nobody_up(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    for rank in range(2):
        replica.loaded(rank, 1)
    replica.ask_again(0)
    replica.loaded(0, 1)
    replica.commit()
    replica.ask(1)
    assert replica.granted() == {0: 1, 1: 2}


@pytest.mark.parametrize("gone", ["lost", "dropped"])
def test_what_a_rank_is_owed_ends_with_it(replica: Replica, gone: str) -> None:
    replica.commit()
    replica.ask(0, 1)
    for rank in range(2):
        replica.loaded(rank, 1)
    replica.ask_again(0)
    replica.loaded(0, 1)
    if gone == "lost":
        replica.lose(1)
        replica.join(1)
        replica.ask(1)
        replica.loaded(1, 1)
    else:
        del replica.ranks[1].held[1]
        replica.commit()
    replica.ask_again(0, 1)
    assert replica.granted() == ({0: 1, 1: 1} if gone == "lost" else {0: 2, 1: 2})


def test_with_unequal_bounds_the_highest_counts_for_all(replica: Replica) -> None:
    replica.ask(0, at_least=1)
    replica.ask(1, at_least=3)
    replica.commit()
    replica.commit()
    assert replica.granted() == {}
    replica.commit()
    assert replica.granted() == {0: 3, 1: 3}


def test_a_bound_that_is_given_up_holds_nobody_up(replica: Replica) -> None:
    replica.commit()
    replica.ask(1, at_least=9)
    replica.ask(0)
    assert replica.granted() == {}
    replica.rounds.cancel_ask(replica.ranks[1].member, 1)
    replica.advance()
    assert replica.granted() == {0: 1}


def test_a_rank_may_decline_what_another_one_has_begun_with_and_the_next_is_for_both(replica: Replica) -> None:
    replica.commit()
    replica.ask(0)
    replica.ask(1, at_least=2)
    assert replica.granted() == {0: 1, 1: 1}
    replica.ask(1, at_least=2, after=1)
    replica.commit()
    assert replica.granted() == {0: 1, 1: 1}, "the other rank may be loading it"
    replica.loaded(0, 1)
    assert replica.granted() == {0: 1, 1: 1}, "the other rank may be at work with it"
    replica.ask(0)
    assert replica.granted() == {0: 2, 1: 2}


def test_a_rank_that_runs_ahead_asks_for_the_next_round(replica: Replica) -> None:
    """Its bound is not that of the round which the others have yet to load."""
    replica.commit()
    replica.ask(0, at_least=1)
    replica.loaded(0, 1)
    replica.ask(0, at_least=2)
    replica.ask(1, at_least=1)
    assert replica.granted() == {0: 1, 1: 1}
    replica.loaded(1, 1)
    replica.commit()
    assert replica.granted() == {0: 2, 1: 1}


def test_what_the_publisher_said_may_become_known_later() -> None:
    """To a coordinator that has started again, which asks a holder."""
    rounds = LoadRounds("policy", lambda group, replica: ReplicaView([], 0), [])
    newest = Newest(4)
    assert not newest.is_enough(wire.ReceiveAsk(1, 0, -5, "step"))
    rounds.take_due(Served(newest))
    rounds.ask(Member("rollout", 0, 0, "a"), wire.ReceiveAsk(1, 0, 3, "step"))
    assert rounds.take_due(Served(newest)) == [("rollout", 0)]
    assert rounds.take_due(Served(newest)) == []
    assert rounds.take_due(Served(Newest(4, {"step": 3}))) == [("rollout", 0)]


def test_without_ranks_it_is_over_and_the_next_ones_begin_anew(replica: Replica) -> None:
    replica.commit()
    replica.ask(0, 1)
    replica.failed(0)
    round_ = replica.rounds.of("rollout", 0)
    replica.lose(0)
    replica.lose(1)
    assert round_.state == "over"
    assert not replica.rounds._of_replica
    replica.join(0)
    replica.join(1)
    assert replica.state == "idle"
    replica.ask(0, 1)
    assert replica.state == "loading"


def test_what_cannot_happen_has_no_row() -> None:
    with pytest.raises(
        InvalidStep, match="a round that is idle cannot take grant; possible: assign, load_failed, emptied"
    ):
        ROUND.next("idle", "grant")
    with pytest.raises(InvalidStep, match="a round that is loaded cannot take grant"):
        ROUND.next("loaded", "grant")


@pytest.mark.parametrize("seed", range(20))
def test_any_history_has_its_rows(seed: int) -> None:
    """Also one that no honest member makes: no message may end in a step that the table
    does not know."""
    choose = random.Random(seed)
    replica = Replica()
    for _ in range(200):
        rank, version = choose.randrange(2), choose.randint(0, replica.latest)
        match choose.choice(("join", "lose", "commit", "ask", "loaded", "loaded", "failed", "drop")):
            case "join" if rank not in replica.ranks:
                before = {"loaded": version, "assigned": choose.randint(0, replica.latest + 1)}
                replica.join(rank, **(before if choose.random() < 0.5 else {}))
            case "lose" if rank in replica.ranks and choose.random() < 0.5:
                replica.lose(rank)
            case "commit":
                replica.commit()
            case "ask" if rank in replica.ranks:
                if choose.random() < 0.2:
                    replica.ask_again(rank)
                else:
                    replica.ask(rank, at_least=choose.choice((0, 0, replica.latest, replica.latest + 1)))
            case "loaded" if rank in replica.ranks:
                replica.loaded(rank, version)
            case "failed" if rank in replica.ranks and choose.random() < 0.3:
                replica.failed(rank)
            case "drop" if rank in replica.ranks:
                replica.ranks[rank].held.pop(version, None)
        loaded = {state.loaded for state in replica.ranks.values()}
        if replica.state == "loaded":
            assert loaded == {replica.rounds.of("rollout", 0).version}
            assert len(replica.ranks) == 2
    for rank in set(range(2)) - set(replica.ranks):
        replica.join(rank)
    replica.commit()
    for rank in range(2):  # whatever it was: from here on it is served
        replica.ask(rank)
        replica.loaded(rank, replica.latest)
    assert replica.state == "loaded"

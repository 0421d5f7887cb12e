"""Free lanes, step by step: how they become free, what ends that, and who is told what when a turn fails."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core import free_lanes
from replicas.core.roster import GroupShape
from tests.support.channel_world import peer_config
from tests.support.free_members import FreeMember, FreeWorld


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_lanes, "STREAK", 2)


def free_world(count: int = 3, on_lost: str = "drop") -> tuple[FreeWorld, list[FreeMember]]:
    """Peers whose lane is free."""
    world = FreeWorld(peer_config(on_lost=on_lost), {"peer": GroupShape(replicas=count, heartbeat_timeout_s=20.0)})
    for replica in range(count):
        world.join(f"peer/{replica}/0")
    sims = world.sims()
    for _ in range(2):
        assert not any(sim.lane for sim in sims)
        call(sims, "barrier")
        world.run()
    assert all(sim.lane is not None for sim in sims)
    return world, sims


def call(sims: list[FreeMember], kind: str = "all_reduce", **more: object) -> dict[FreeMember, int]:
    return {sim: sim.post(kind, **more) for sim in sims}  # type: ignore[arg-type]  # by name


def errors_of(sims: list[FreeMember], posts: dict[FreeMember, int]) -> list[str]:
    """Kind of each one's error; empty for a success."""
    kinds = []
    for sim in sims:
        error = sim.ends[posts[sim]].error
        kinds.append("" if error is None else error.kind)
    return kinds


def names(end: wire.OperationEnd) -> list[str]:
    assert end.receipt is not None, end.error
    return [member.name for member in end.receipt.members]


ALL = ["peer/0/0", "peer/1/0", "peer/2/0"]


# ---------------------------------------------------------------- going well


def test_what_goes_well_is_not_told() -> None:
    world, sims = free_world()
    posts = call(sims)
    while world.move_sidecars():
        pass
    assert errors_of(sims, posts) == ["", "", ""]
    assert not any(sim.outbox for sim in sims)


def test_a_turn_that_takes_long_is_posted_and_taken_back() -> None:
    world, sims = free_world()
    posts = call(sims[:2])
    world.run()
    assert all(world.state.waits(sim.member) for sim in sims[:2])
    assert not world.state.waits(sims[2].member)
    posts |= call(sims[2:])
    world.run()
    assert errors_of(sims, posts) == ["", "", ""]
    assert not any(world.state.waits(sim.member) for sim in sims)
    assert all(sim.lane is not None for sim in sims), "it is still free"


def test_the_first_rank_counts() -> None:
    world, sims = free_world()
    for _ in range(3):
        call(sims)
        world.run()
    before = world.state.operations.totals["ok"]
    world.join("peer/3/0")
    world.run()
    assert world.state.operations.totals["ok"] == before + 3


# ---------------------------------------------------------------- recall


def test_another_kind_of_call_ends_it_without_harm_and_it_takes_longer_to_come_back() -> None:
    world, sims = free_world()
    lanes = len(world.sim_lanes)
    posts = call(sims, "all_gather")
    world.run()
    assert errors_of(sims, posts) == ["", "", ""]
    assert len(world.state.lanes) == 1
    for count in range(1, 5):
        assert not any(sim.lane for sim in sims), count
        call(sims)
        world.run()
    assert len(world.sim_lanes) == lanes + 1
    assert {lane.lane for lane in world.sim_lanes.values()} == {sims[0].goes[0].lane}, "the same lane, free once more"


def test_a_newcomer_waits_for_the_recall_alone() -> None:
    world, sims = free_world()
    late = world.join("peer/3/0")
    world.run()
    assert world.state.roster.get(late.member).live  # type: ignore[union-attr]  # it is there
    assert not any(sim.lane for sim in sims)
    everyone = [*sims, late]
    posts = call(everyone)  # type: ignore[arg-type]  # all of them are simulated in this way
    world.run()
    assert len(names(sims[0].ends[posts[sims[0]]])) == 4


def test_a_newcomer_waits_for_the_turn_under_way() -> None:
    world, sims = free_world()
    posts = call(sims[:2])
    late = world.join("peer/3/0")
    for sim in sims:
        while world.down(sim) or world.up(sim):
            pass
    assert not world.state.roster.get(late.member).live  # type: ignore[union-attr]  # it is there
    posts |= call(sims[2:])
    world.run()
    world.advance(2.0)
    state = world.state.roster.get(late.member)
    assert state is not None
    assert state.live
    posts |= call([late])  # type: ignore[list-item]  # it is simulated in this way
    world.run()
    assert errors_of(sims, posts) == ["", "", ""]


def test_some_run_ahead_and_one_has_asked() -> None:
    """Its call came before it heard of the freedom, say. The lane is closed, and they meet in another one."""
    world, sims = free_world()
    sims[2].lane = None
    posts = call(sims)
    world.run()
    assert errors_of(sims, posts) == ["", "", ""]
    assert names(sims[2].ends[posts[sims[2]]]) == ALL


# ---------------------------------------------------------------- when a turn fails


def test_somebody_has_applied_it_so_it_has_happened_for_all() -> None:
    world, sims = free_world()
    posts = call(sims)
    for sim in sims:
        sim.get_ready()
    assert sims[0].vote()
    world.lose(sims[1])
    world.run()
    assert names(sims[2].ends[posts[sims[2]]]) == ALL
    assert len(sims[2].goes) == len(posts), "it was not run again"


def test_nobody_has_applied_it_and_one_is_gone_so_it_is_run_again() -> None:
    world, sims = free_world()
    posts = call(sims)
    for sim in sims:
        sim.get_ready()
    world.lose(sims[1])
    world.run()
    for sim in (sims[0], sims[2]):
        end = sim.ends[posts[sim]]
        assert names(end) == [ALL[0], ALL[2]]
        assert end.receipt is not None
        assert end.receipt.reasons == {ALL[1]: "its process ended"}


def test_all_are_ready_and_there() -> None:
    world, sims = free_world()
    posts = call(sims)
    for sim in sims:
        sim.get_ready()
    sims[1].break_lane()
    world.run()
    assert [names(sim.ends[posts[sim]]) for sim in sims] == [ALL] * 3
    assert all(len(sim.goes) == 3 for sim in sims), "it was not run again"


def test_one_was_not_ready_so_it_is_run_again_for_all() -> None:
    world, sims = free_world()
    posts = call(sims)
    sims[0].get_ready()
    sims[1].break_lane()
    world.run()
    assert [names(sim.ends[posts[sim]]) for sim in sims] == [ALL] * 3
    assert all(len(sim.goes) == 4 for sim in sims)
    assert len(world.state.lanes) == 1


def test_two_turns_one_of_which_has_happened() -> None:
    world, sims = free_world()
    first, second = call(sims), call(sims)
    for sim in sims:
        sim.get_ready()
    sims[0].vote()
    sims[2].break_lane()
    world.run()
    for posts in (first, second):
        assert [names(sim.ends[posts[sim]]) for sim in sims] == [ALL] * 3
    goes = [[go.post for go in sim.goes[2:]] for sim in sims]
    assert goes == [[first[sim], second[sim], second[sim]] for sim in sims]


def test_a_loss_is_an_error_where_the_config_says_so() -> None:
    world, sims = free_world(on_lost="raise")
    posts = call(sims)
    sims[0].get_ready()
    world.lose(sims[1])
    world.run()
    rest = [sims[0], sims[2]]
    assert errors_of(rest, posts) == ["PeersLost"] * 2
    error = sims[0].ends[posts[sims[0]]].error
    assert error is not None
    assert error.members == (ALL[1],)


def test_they_were_asked_for_different_things() -> None:
    world, sims = free_world()
    posts = call(sims[:2]) | call(sims[2:], shape=(3,))
    world.run()
    assert errors_of(sims, posts) == ["RanksDisagree"] * 3
    posts = call(sims)
    world.run()
    assert errors_of(sims, posts) == [""] * 3


def test_a_kind_that_runs_ahead_against_one_that_does_not() -> None:
    world, sims = free_world()
    posts = call(sims[:2]) | call(sims[2:], "all_gather")
    world.run()
    assert errors_of(sims, posts) == ["RanksDisagree"] * 3


def test_a_step_that_has_passed() -> None:
    world, sims = free_world()
    call(sims, step=5)
    world.run()
    posts = call(sims, step=5)
    world.run()
    assert errors_of(sims, posts) == ["Gone"] * 3


def test_the_steps_are_known_to_one_that_joins_later() -> None:
    world, sims = free_world()
    call(sims, step=5)
    world.run()
    late = world.join("peer/3/0")
    world.run()
    posts = call([late], step=5)  # type: ignore[list-item]  # it is simulated in this way
    world.run()
    error = late.ends[posts[late]].error  # type: ignore[index]  # the same
    assert error is not None
    assert error.kind == "Gone"


# ---------------------------------------------------------------- silence


def test_a_frozen_member_is_left_behind_and_hears_of_it() -> None:
    world, sims = free_world()
    frozen = sims[1]
    posts = call([sims[0], sims[2]])
    world.advance(6.0, frozen=(frozen,))
    for sim in (sims[0], sims[2]):
        assert names(sim.ends[posts[sim]]) == [ALL[0], ALL[2]]
    world.advance(3.0)
    posts = call(sims)
    world.run()
    assert errors_of([frozen], posts) == ["Gone"]


def test_a_frozen_member_that_had_applied_a_turn_keeps_it() -> None:
    world, sims = free_world()
    frozen = sims[1]
    first = call(sims)
    for sim in sims:
        sim.get_ready()
    for sim in sims:
        sim.vote()
    second = call([sims[0], sims[2]])
    world.advance(6.0, frozen=(frozen,))
    assert names(frozen.ends[first[frozen]]) == ALL
    assert names(sims[0].ends[second[sims[0]]]) == [ALL[0], ALL[2]]


def test_one_that_was_ready_when_it_froze_hears_that_it_has_happened() -> None:
    world, sims = free_world()
    frozen = sims[1]
    posts = call(sims)
    for sim in sims:
        sim.get_ready()
    sims[0].vote()
    for lane in world.sim_lanes.values():
        lane.dead.add(frozen.member)
    world.advance(6.0, frozen=(frozen,))
    assert names(sims[2].ends[posts[sims[2]]]) == ALL
    world.advance(6.0)
    frozen.break_lane()
    world.run()
    assert names(frozen.ends[posts[frozen]]) == ALL


def test_a_silent_member_does_not_keep_others_from_joining() -> None:
    world, sims = free_world()
    late = world.join("peer/3/0")
    world.advance(6.0, frozen=(sims[1],))
    state = world.state.roster.get(late.member)
    assert state is not None
    assert state.live


def test_one_that_never_answers_is_left_behind() -> None:
    world, sims = free_world()
    mute = sims[1]
    mute.mute = True
    posts = call([sims[0], sims[2]], "all_gather")
    world.advance(free_lanes.ANSWER_S + 12.0)
    state = world.state.roster.get(mute.member)
    assert state is not None
    for sim in (sims[0], sims[2]):
        assert names(sim.ends[posts[sim]]) == [ALL[0], ALL[2]]


def test_nonsense_harms_nobody() -> None:
    world, sims = free_world()
    bad = sims[1]
    for message in (
        wire.OperationRan(77, "ready"),
        wire.OperationPost(99, "all_reduce", (), 5.0, free="no.such", turn=3),
        wire.OperationRan(99, "ready"),
        wire.LaneUsed("no.such", 3, 5, 7, True),
        wire.LaneUsed(str(bad.lane and bad.lane.name), 1 << 40, 1 << 40, None, True),
    ):
        bad.outbox.append(message)
    world.run()
    world.lose(bad)
    world.advance(30.0)
    rest = [sims[0], sims[2]]
    posts = call(rest)
    world.run()
    assert [names(sim.ends[posts[sim]]) for sim in rest] == [[ALL[0], ALL[2]]] * 2

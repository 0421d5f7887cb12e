"""Histories of a channel of peers: what pairs with what, and that all get one
verdict.

Covers: core/operations/matching.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.members.roster import GroupShape
from replicas.core.operations import matching
from tests.support.channel_world import SimMember, World, peer_config


def peers(
    count: int, *, ranks: str = "leader", world_size: int = 1, **changes: object
) -> tuple[World, list[SimMember]]:
    world = World(peer_config(ranks, **changes), {"peer": GroupShape(replicas=count, world_size=world_size)})
    return world, [world.join(f"peer/{replica}/0", world_size=world_size) for replica in range(count)]


def kind_of(sim: SimMember, post: int) -> str:
    end = sim.ends[post]
    return "ok" if end.error is None else end.error.kind


def test_a_collective_runs_when_all_have_posted() -> None:
    world, (first, second) = peers(2)
    first.post("all_reduce")
    world.run()
    assert not first.ends
    second.post("all_reduce")
    world.run()
    receipt = first.ends[1].receipt
    assert receipt is not None
    assert [m.name for m in receipt.members] == ["peer/0/0", "peer/1/0"]
    assert kind_of(second, 1) == "ok"


def test_it_waits_for_peers_that_have_yet_to_join_for_the_first_time() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    first = world.join("peer/0/0")
    first.post("all_reduce")
    world.run()
    assert not first.ends
    second = world.join("peer/1/0")
    second.post("all_reduce")
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "ok"


def test_the_deadline_of_a_wait_names_who_is_missing() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    first = world.join("peer/0/0")
    first.post("barrier", deadline_s=3.0)
    world.advance(4.0)
    assert kind_of(first, 1) == "DeadlineExceeded"
    assert first.ends[1].error is not None
    assert first.ends[1].error.message == "barrier did not begin in time: waited for peer/1/0"


def test_the_lane_is_formed_once() -> None:
    world, sims = peers(3)
    for _ in range(4):
        for sim in sims:
            sim.post("all_reduce")
        world.run()
    assert sum(isinstance(m, wire.LaneForm) for m in sims[0].seen) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"kind": "all_reduce"}, {"kind": "barrier"}),
        ({"kind": "all_reduce", "shape": (2,)}, {"kind": "all_reduce", "shape": (3,)}),
        ({"kind": "all_reduce", "reduce_op": "sum"}, {"kind": "all_reduce", "reduce_op": "max"}),
        ({"kind": "broadcast", "root": "peer/0/0"}, {"kind": "broadcast", "root": "peer/1"}),
        ({"kind": "all_reduce", "step": 4}, {"kind": "all_reduce", "step": 5}),
    ],
)
def test_peers_that_post_different_things_all_hear_of_it(one: dict[str, object], other: dict[str, object]) -> None:
    world, (first, second) = peers(2)
    first.post(**one)  # type: ignore[arg-type]  # by name
    second.post(**other)  # type: ignore[arg-type]  # by name
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "RanksDisagree"
    first.post("barrier")
    second.post("barrier")
    world.run()
    assert kind_of(first, 2) == kind_of(second, 2) == "ok"


def test_one_root_may_be_named_in_several_ways() -> None:
    world, (first, second) = peers(2)
    for kind in ("broadcast", "reduce"):
        first.post(kind, root="peer/0/0")
        second.post(kind, root="peer/0")
        world.run()
    assert [kind_of(sim, number) for sim in (first, second) for number in (1, 2)] == ["ok"] * 4


def test_a_step_that_failed_may_be_tried_again() -> None:
    world, (first, second) = peers(2)
    for sim in (first, second):
        sim.mute = True
        sim.post("all_reduce", step=3, deadline_s=5.0)
    world.advance(6.0)
    assert kind_of(first, 1) == kind_of(second, 1) == "DeadlineExceeded"
    for sim in (first, second):
        sim.mute = False
        sim.post("all_reduce", step=3)
    world.run()
    assert kind_of(first, 2) == kind_of(second, 2) == "ok"


def test_a_call_that_waits_is_refused_when_its_step_passes() -> None:
    world, (first, second) = peers(2)
    for sim in (first, second):
        sim.post("all_reduce", step=3)
    world.up(first)
    world.up(second)
    late = second.post("all_reduce", step=2)
    world.run()
    assert kind_of(second, late) == "Gone"
    assert kind_of(first, 1) == "ok"


def test_a_step_that_has_passed_is_gone() -> None:
    world, (first, second) = peers(2)
    for sim in (first, second):
        sim.post("all_reduce", step=3)
    world.run()
    world.lose(second)
    again = world.join("peer/1/0")
    again.post("all_reduce", step=0)
    world.run()
    assert kind_of(again, 1) == "Gone"
    assert not first.inbox
    for sim, number in ((first, 2), (again, 2)):
        assert sim.post("all_reduce", step=4) == number
    world.run()
    assert kind_of(first, 2) == kind_of(again, 2) == "ok"


def test_a_death_before_the_start_leaves_the_others_to_go_on() -> None:
    world, (first, second, third) = peers(3)
    first.post("all_reduce")
    second.post("all_reduce")
    world.run()
    world.lose(third)
    world.run()
    receipt = first.ends[1].receipt
    assert receipt is not None
    assert [m.name for m in receipt.members] == ["peer/0/0", "peer/1/0"]


def test_on_lost_raise_fails_what_waits() -> None:
    world, (first, second) = peers(2, on_lost="raise")
    first.post("all_reduce")
    world.run()
    world.lose(second)
    world.run()
    assert kind_of(first, 1) == "PeersLost"


def test_send_and_recv_pair_in_order_and_do_not_wait_for_other_peers() -> None:
    world, (first, second, third) = peers(3)
    first.post("recv", root="peer/1", segments=())
    first.post("recv", root="peer/2", segments=())
    third.post("send", root="peer/0")
    world.run()
    assert kind_of(first, 2) == kind_of(third, 1) == "ok"
    assert 1 not in first.ends
    second.post("send", root="peer/0")
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "ok"


def test_recv_takes_the_senders_shape_or_refuses_another() -> None:
    world, (first, second) = peers(2)
    first.post("recv", root="peer/1", segments=())
    second.post("send", root="peer/0", shape=(5, 5))
    world.run()
    assert first.goes[0].segments[0] == (wire.Segment("float32", (5, 5)),)
    first.post("recv", root="peer/1", shape=(4,))
    second.post("send", root="peer/0", shape=(3,))
    world.run()
    assert kind_of(first, 2) == kind_of(second, 2) == "RanksDisagree"


def test_a_peer_known_to_be_lost_is_refused_at_once_and_reachable_when_it_is_back() -> None:
    world, (first, second) = peers(2)
    world.lose(second)
    first.post("recv", root="peer/1", segments=())
    world.run()
    assert kind_of(first, 1) == "PeersLost"
    again = world.join("peer/1/0")
    first.post("recv", root="peer/1", segments=())
    again.post("send", root="peer/0")
    world.run()
    assert kind_of(first, 2) == "ok"


def test_a_wait_for_a_peer_that_never_joined_says_how_many_there_are() -> None:
    """Its group may be scaled up, so that is no error from the start."""
    world, (first, _) = peers(2)
    for deadline_s, root in enumerate(("peer/7", "peer/x", "peer/1"), start=1):
        first.post("recv", root=root, segments=(), deadline_s=float(deadline_s))
    world.run()
    world.advance(5.0)
    never = " (it has never joined; its group has 2 replicas)"
    for post, text in ((1, f"peer/7/0{never}"), (2, f"peer/x/0{never}"), (3, "peer/1/0")):
        end = first.ends[post]
        assert end.error is not None
        assert (end.error.kind, end.error.message) == (
            "DeadlineExceeded",
            f"recv did not begin in time: waited for {text}",
        )


@pytest.mark.parametrize(("root", "hint"), [("peer/0", "name another peer"), ("other/0", "see channel.members")])
def test_who_can_be_no_peer_is_refused_with_a_remedy(root: str, hint: str) -> None:
    world, (first, _) = peers(2)
    first.post("recv", root=root, segments=())
    world.run()
    error = first.ends[1].error
    assert error is not None
    assert (error.kind, error.hint) == ("UsageError", hint)


def test_a_wait_for_a_peer_that_dies_ends_at_once() -> None:
    world, (first, second) = peers(2)
    first.post("recv", root="peer/1", segments=())
    world.run()
    world.lose(second)
    world.run()
    assert kind_of(first, 1) == "PeersLost"


def test_a_join_does_not_break_what_is_running() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    first, second = world.join("peer/0/0"), world.join("peer/1/0")
    second.mute = True
    for sim in (first, second):
        sim.post("all_reduce")
    world.run()
    late = world.join("peer/2/0")
    world.run()
    assert not first.ends
    late.post("all_reduce")
    world.run()
    assert not late.ends, "it takes part from the next operation on"


def test_each_rank_has_a_lane_of_its_own() -> None:
    world = World(peer_config("each"), {"peer": GroupShape(replicas=2, world_size=2)})
    sims = {(r, k): world.join(f"peer/{r}/{k}", world_size=2) for r in range(2) for k in range(2)}
    for replica in range(2):
        sims[replica, 1].post("all_reduce")
    world.run()
    assert kind_of(sims[0, 1], 1) == kind_of(sims[1, 1], 1) == "ok"
    assert not any(isinstance(m, wire.LaneForm) for m in sims[0, 0].seen)


def test_others_than_leaders_are_told_that_they_take_no_part() -> None:
    world = World(peer_config("leader"), {"peer": GroupShape(replicas=1, world_size=2)})
    other = world.join("peer/0/1", world_size=2)
    other.post("barrier")
    world.run()
    assert kind_of(other, 1) == "UsageError"


def test_a_root_that_nobody_has() -> None:
    world, (first, second) = peers(2)
    for sim in (first, second):
        sim.post("broadcast", root="peer/9")
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "UsageError"
    first.post("send", root="nobody/0")
    first.post("send", root="peer/0")
    world.run()
    assert kind_of(first, 2) == kind_of(first, 3) == "UsageError"


def test_scatter_needs_a_tensor_for_each_member() -> None:
    world, (first, second) = peers(2)
    for sim in (first, second):
        sim.post("scatter", root="peer/0")
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "UsageError"


def test_a_lane_that_forms_over_a_dead_store_is_formed_over_the_next_one() -> None:
    world, (first, second) = peers(2)
    second.mute = True
    first.post("all_reduce")
    second.post("all_reduce")
    world.run()
    assert not first.ends
    second.mute = False
    world.state.store_moved(world.now)
    world._collect()
    world.run()
    assert kind_of(first, 1) == kind_of(second, 1) == "ok"
    assert len(world.state.lanes) == 1


def test_a_member_has_so_many_calls_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "POSTS_MAX", 20)
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    one = world.join("peer/0/0")
    for _ in range(21):
        one.post("barrier")
    world.run()
    ((post, end),) = one.ends.items()
    assert post == 21
    assert end.error is not None
    assert end.error.kind == "Busy"

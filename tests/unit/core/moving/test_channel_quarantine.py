"""A group that fails although everybody is alive: built again once, probed in pairs,
and the culprit served alone.

Covers: core/moving/attempt.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.base.effects import MemberLost, MemberQuarantined
from replicas.core.members.roster import GroupShape
from replicas.core.moving.lanes import culprits
from replicas.messages.identity import Member
from tests.support.channel_world import SimMember, World, peer_config


def publish(world: World, trainer: SimMember) -> int:
    number = trainer.publish()
    trainer.pack(number)
    world.advance(1.0)
    return number


def quarantined(world: World) -> list[str]:
    return [event.member.name for event in world.events if isinstance(event, MemberQuarantined)]


def lanes_asked_of(sim: SimMember) -> list[bool]:
    """Whether each lane that it was asked for was a probe."""
    return [message.probe for message in sim.seen if isinstance(message, wire.LaneForm)]


def cut_off(world: World, victim: SimMember) -> None:
    """Nothing goes between the victim and anyone."""
    for other in world.members.values():
        if other is not victim:
            world.bad_pairs.add(frozenset((victim.member.name, other.member.name)))


def test_the_one_that_works_with_nobody_is_found_and_the_others_commit() -> None:
    world = World()
    trainer, *targets = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0", "rollout/2/0")]
    cut_off(world, targets[1])
    number = publish(world, trainer)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0", "rollout/2/0"]
    assert receipt.lost == ("rollout/1/0",)
    assert "no process group of it works with" in receipt.reasons["rollout/1/0"]
    assert quarantined(world) == ["rollout/1/0"]
    assert not any(isinstance(event, MemberLost) for event in world.events), "nobody is evicted for it"
    assert lanes_asked_of(trainer)[:2] == [False, False], "built again once before anybody is probed"
    assert sum(lanes_asked_of(trainer)) == 3


def test_the_others_are_not_held_up_by_it_again_and_it_is_served_alone() -> None:
    world = World()
    trainer, good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    cut_off(world, bad)
    publish(world, trainer)
    before = len(lanes_asked_of(trainer))
    for _ in range(3):
        number = publish(world, trainer)
        assert trainer.verdicts[number].receipt is not None
    assert len(lanes_asked_of(trainer)) - before <= 1, "one lane for all three versions"
    world.bad_pairs.clear()
    world.advance(40.0)
    assert 4 in bad.held
    world.advance(1.0)
    number = publish(world, trainer)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0", "rollout/1/0"]
    assert good.held >= {5}


def test_a_source_that_can_reach_nobody_fails_its_publish_and_targets_keep_the_old_version() -> None:
    world = World()
    trainer, *targets = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    publish(world, trainer)
    cut_off(world, trainer)
    number = publish(world, trainer)
    error = trainer.verdicts[number].error
    assert error is not None
    assert error.members == ("trainer/0/0",)
    assert "no process group of it works" in error.message
    assert [target.commits for target in targets] == [[1], [1]]


def test_a_group_that_fails_without_a_culprit_fails_the_publish_after_a_last_attempt() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.breaks = True
    number = publish(world, trainer)
    error = trainer.verdicts[number].error
    assert error is not None
    assert "connection reset" in error.message
    assert quarantined(world) == []
    assert lanes_asked_of(trainer) == [False, False, True, False]
    target.breaks = False
    assert trainer.verdicts[publish(world, trainer)].receipt is not None


def test_wrong_digests_at_one_target_leave_that_one_behind() -> None:
    world = World()
    trainer, good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    bad.bad_digest = True
    number = publish(world, trainer)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert [member.name for member in receipt.members] == ["rollout/0/0"]
    assert "digests differ" in receipt.reasons["rollout/1/0"]
    assert good.commits == bad.commits == [1]


def test_a_member_that_a_preflight_names_is_left_out_at_once() -> None:
    world = World()
    trainer, _good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    number = trainer.publish()
    trainer.pack(number)
    while not any(isinstance(message, wire.LaneForm) for message in bad.inbox):
        world.up(trainer)
        world.down(trainer)
    lane = next(message.lane for message in bad.inbox if isinstance(message, wire.LaneForm))
    bad.inbox.clear()
    error = wire.WireError("Preflight", "10.0.0.9 cannot be reached", members=(bad.member.name,))
    trainer.outbox.append(wire.LaneFailed(lane, error))
    world.advance(1.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.reasons == {"rollout/1/0": "10.0.0.9 cannot be reached"}
    assert not any(lanes_asked_of(trainer))


def test_a_member_that_dies_while_pairs_are_probed_costs_nothing_more() -> None:
    world = World()
    trainer, good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    cut_off(world, bad)
    number = trainer.publish()
    trainer.pack(number)
    for _ in range(200):
        if sum(lanes_asked_of(trainer)):
            break
        for sim in (trainer, good, bad):
            world.down(sim)
            world.up(sim)
    world.lose(bad)
    world.advance(1.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.lost == ("rollout/1/0",)
    assert receipt.reasons == {"rollout/1/0": "its process ended"}
    assert len(world.state.lanes) == 1, "no probe is left open"
    assert good.held == {1}


def test_one_that_flaps_is_admitted_later_each_time_and_disturbs_nobody() -> None:
    world = World()
    trainer, good = world.join("trainer/0/0"), world.join("rollout/0/0")
    lanes = 0
    for round_ in range(12):
        flapper = world.join("rollout/1/0")
        number = trainer.publish()
        trainer.pack(number)
        world.run()
        world.lose(flapper)
        world.run()
        assert trainer.verdicts[number].receipt is not None
        if round_ == 5:
            lanes = len(lanes_asked_of(good))
    assert len(lanes_asked_of(good)) - lanes <= 8, "the last ones were not in a group with the others"
    steady = world.join("rollout/1/0")
    assert not steady.held
    world.advance(40.0)
    number = publish(world, trainer)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert len(receipt.members) == 2


def test_peers_go_on_without_one_that_works_with_nobody_and_try_again_with_it_later() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=4)})
    sims = [world.join(f"peer/{index}/0") for index in range(4)]
    cut_off(world, sims[2])
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(1.0)
    for sim, post in zip(sims, posts, strict=True):
        end = sim.ends[post]
        if sim is sims[2]:
            assert end.error is not None
            assert "no process group of it works" in end.error.message
        else:
            assert end.receipt is not None
            assert [member.replica for member in end.receipt.members] == [0, 1, 3]
            assert "no process group of it works" in end.receipt.reasons["peer/2/0"]
    assert quarantined(world) == ["peer/2/0"]
    world.bad_pairs.clear()
    world.advance(5.0)
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(1.0)
    receipts = [sim.ends[post].receipt for sim, post in zip(sims, posts, strict=True)]
    assert all(receipt is not None and len(receipt.members) == 4 for receipt in receipts)
    assert len(world.state.lanes) == 1


def members(count: int) -> list[Member]:
    return [Member("rollout", index, 0) for index in range(count)]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ([], []),
        ([(0, 1)], [1]),
        ([(0, 2), (1, 2), (2, 3)], [2]),
        ([(0, 1), (0, 2), (0, 3)], [0]),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)], [0, 1]),
    ],
)
def test_the_fewest_members_explain_the_bad_pairs(bad: list[tuple[int, int]], expected: list[int]) -> None:
    who = members(4)
    found = culprits(who, {(who[a], who[b]): "refused" for a, b in bad})
    assert sorted(member.replica for member in found) == expected


def test_a_source_is_not_kept_out_and_publishes_as_soon_as_it_can_reach_somebody() -> None:
    world = World()
    trainer, *targets = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    cut_off(world, trainer)
    assert trainer.verdicts[publish(world, trainer)].error is not None
    world.bad_pairs.clear()
    receipt = trainer.verdicts[publish(world, trainer)].receipt
    assert receipt is not None
    assert len(receipt.members) == len(targets)
    assert "trainer/0/0" in {state.member.name for state in world.state.roster.live}


@pytest.mark.slow
def test_one_that_works_alone_and_not_with_the_others_is_tried_with_them_more_and_more_seldom() -> None:
    world = World()
    trainer, good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    world.bad_pairs.add(frozenset((good.member.name, bad.member.name)))
    for _ in range(150):
        receipt = trainer.verdicts[publish(world, trainer)].receipt
        assert receipt is not None
        assert good.member in receipt.members
    assert 3 <= len(quarantined(world)) <= 8
    world.bad_pairs.clear()
    for _ in range(300):
        receipt = trainer.verdicts[publish(world, trainer)].receipt
    assert receipt is not None
    assert len(receipt.members) == 2


def test_who_gives_is_no_culprit_when_a_preflight_names_another_one_too() -> None:
    world = World()
    trainer, good, bad = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    number = trainer.publish()
    trainer.pack(number)
    while not any(isinstance(message, wire.LaneForm) for message in bad.inbox):
        world.up(trainer)
        world.down(trainer)
    lane = next(message.lane for message in bad.inbox if isinstance(message, wire.LaneForm))
    bad.inbox.clear()
    names = (trainer.member.name, bad.member.name)
    trainer.outbox.append(wire.LaneFailed(lane, wire.WireError("Preflight", "they do not agree", members=names)))
    world.advance(1.0)
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.members == (good.member,)
    assert receipt.reasons == {"rollout/1/0": "they do not agree"}


def test_in_a_large_group_each_is_probed_with_four_others_and_the_culprit_is_found() -> None:
    world = World()
    trainer, *targets = [world.join("trainer/0/0"), *(world.join(f"rollout/{index}/0") for index in range(6))]
    cut_off(world, targets[3])
    receipt = trainer.verdicts[publish(world, trainer)].receipt
    assert receipt is not None
    assert receipt.lost == ("rollout/3/0",)
    assert quarantined(world) == ["rollout/3/0"]
    assert sum(lanes_asked_of(trainer)) == 4


def test_a_sender_that_fails_after_all_have_the_version_is_not_probed() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    world.run()
    trainer.breaks = True
    number = trainer.publish()
    trainer.pack(number)
    for lanes, quick, slow in ((2, trainer, target), (3, target, trainer)):  # who is the first to tell
        while len(lanes_asked_of(target)) < lanes and number not in trainer.verdicts:
            while world.down(quick) or world.up(quick):
                pass
            if not world.down(slow):
                world.up(slow)
    assert lanes_asked_of(target) == [False, False]
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.members == (target.member,)
    assert quarantined(world) == []


def test_a_lane_that_fails_without_a_word_of_one_of_its_members_is_that_ones_fault() -> None:
    world = World()
    trainer, near, far = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    world.advance(1.0)
    number = trainer.publish(deadline_s=120.0)
    trainer.pack(number)
    world.run(frozen=(far,))
    [lane] = [message.lane for message in near.seen if isinstance(message, wire.LaneForm)]
    world.now += 15.0
    for sim in (trainer, near):
        world.state.roster.heard(sim.member, world.now)
    near.outbox.append(wire.LaneFailed(lane, wire.WireError("SyncError", "connection reset")))
    world.run(frozen=(far,))
    receipt = trainer.verdicts[number].receipt
    assert receipt is not None
    assert receipt.reasons == {"rollout/1/0": "no sign of life"}
    assert not any(lanes_asked_of(near))


def test_a_peer_that_dies_while_it_is_tried_leaves_no_lane_behind() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=4)})
    sims = [world.join(f"peer/{index}/0") for index in range(4)]
    cut_off(world, sims[2])
    for sim in sims:
        sim.post("all_reduce")
    world.advance(0.5)
    assert quarantined(world) == ["peer/2/0"]
    for _ in range(20):
        if len(world.state.lanes) > 1:
            break
        world.advance(0.5, frozen=tuple(sims))
    assert len(world.state.lanes) > 1
    world.lose(sims[2])
    world.run()
    assert len(world.state.lanes) == 1
    assert len(world.swept) == len(set(world.swept))

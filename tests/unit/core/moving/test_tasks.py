"""Hosts that pull a version: each delivery goes its own way, in virtual time.

Covers: core/moving/task.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import CaughtUp, MemberLost, SyncEnded, WrongBytes
from replicas.core.members.hosts import LOCATE_S
from replicas.core.members.member_state import Held
from replicas.core.members.roster import GroupShape
from replicas.core.moving.attempt import _newest_base
from replicas.core.moving.paths import IMAGE, TransferPlan
from replicas.core.moving.transfer import PULL_TRIES
from tests.support.channel_world import SimMember, World, channel_config
from tests.unit.core.versions.test_channel_images import PARTS

TCP = channel_config(transport="tcp", deadline_s=60.0)


def world_of(*machines: str, config: object = TCP) -> tuple[World, SimMember, list[SimMember]]:
    """A trainer on machine ``a``, and a rollout on each of these."""
    world = World(config)  # type: ignore[arg-type]  # a config
    trainer = world.join("trainer/0/0", machine="a", address="10.0.0.1")
    targets = [
        world.join(f"rollout/{index}/0", machine=machine, address=f"10.0.0.{ord(machine) - ord('a') + 1}")
        for index, machine in enumerate(machines)
    ]
    world.run()
    return world, trainer, targets


def publish(world: World, trainer: SimMember) -> wire.PublishEnd | None:
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    return trainer.verdicts.get(number)


def offers(sim: SimMember, role: str) -> list[wire.TransferOffer]:
    return [message for message in sim.seen if isinstance(message, wire.TransferOffer) and message.role == role]


def members(end: wire.PublishEnd | None) -> list[str]:
    assert end is not None
    assert end.receipt is not None, end.error
    return [member.name for member in end.receipt.members]


def test_one_member_of_a_host_pulls_and_the_others_map() -> None:
    world, trainer, (here, first, second) = world_of("a", "b", "b")
    assert members(publish(world, trainer)) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]
    assert [len(offers(one, "pull")) for one in (here, first, second)] == [0, 1, 0]
    assert [len(offers(one, "map")) for one in (here, first, second)] == [1, 0, 1]
    assert len(offers(trainer, "serve")) == 1
    assert not any(isinstance(message, wire.LaneForm) for sim in world.members.values() for message in sim.seen)


def test_the_hosts_form_a_chain() -> None:
    world, trainer, targets = world_of("b", "c", "d", "e")
    publish(world, trainer)
    names = [[holder.name for holder in offers(one, "pull")[0].pulls[0].holders] for one in targets]
    assert names == [
        ["trainer/0/0"],
        ["rollout/0/0", "trainer/0/0"],
        ["rollout/1/0", "rollout/0/0", "trainer/0/0"],
        ["rollout/2/0", "rollout/1/0", "trainer/0/0"],
    ]


def test_nobody_serves_any_more_when_all_have_it() -> None:
    world, trainer, targets = world_of("b", "c")
    publish(world, trainer)
    assert not any(sim.serving for sim in (trainer, *targets))


def test_a_delivery_waits_until_a_holder_listens() -> None:
    world, trainer, (target,) = world_of("b")
    state = world.state.roster.get(trainer.member)
    assert state is not None
    state.carrier_port = 0
    assert publish(world, trainer) is None
    assert not offers(target, "pull")
    assert len(offers(trainer, "serve")) == 1, "which makes it start one"
    trainer.outbox.append(wire.CarrierUp(trainer.port))
    world.run()
    assert target.commits == [1]


def test_an_encrypted_version_is_pulled_from_who_has_told_its_certificate() -> None:
    world, trainer, (target,) = world_of("b", config=channel_config(transport="tcp", deadline_s=60.0, encrypt=True))
    assert publish(world, trainer) is None
    assert not offers(target, "pull")
    trainer.outbox.append(wire.CarrierUp(trainer.port, "0f" * 32))
    world.run()
    (offer,) = offers(target, "pull")
    assert [holder.certificate_hash for holder in offer.pulls[0].holders] == ["0f" * 32]
    assert target.commits == [1]


def test_members_are_told_whether_to_encrypt_and_at_which_port() -> None:
    world, trainer, (target,) = world_of("b", config=channel_config(transport="tcp", encrypt=True))
    world.state.roster.carry_port = 7100
    for sim in (trainer, target):
        state = world.state.roster.get(sim.member)
        assert state is not None
        told = world.state.welcome(state, 0).settings
        assert (told.pulls, told.encrypt, told.carry_port) == (True, True, 7100)


def test_far_hosts_come_last_and_have_a_chain_of_their_own() -> None:
    """A near leader may have taken bytes, and has no deltas for a far one then."""
    world, trainer, targets = world_of("b", "c", "d", "e")
    for number in (0, 2):
        state = world.state.roster.get(targets[number].member)
        assert state is not None
        state.rtt_s = 0.05
    assert len(members(publish(world, trainer))) == 4
    assert [held(one) for one in targets] == [
        ["trainer/0/0"],
        ["trainer/0/0"],
        ["rollout/0/0", "trainer/0/0"],
        ["rollout/1/0", "trainer/0/0"],
    ]


def held(sim: SimMember) -> list[str]:
    """From whom it was to pull, in order."""
    (offer,) = offers(sim, "pull")
    (pulls,) = offer.pulls
    return [holder.name for holder in pulls.holders]


def test_a_host_that_pulls_slowly_is_left_to_catch_up() -> None:
    world, trainer, (fast, slow) = world_of("b", "c")
    world.rates[frozenset((trainer.address, slow.address))] = 0.5  # 32 s for a version
    world.rates[frozenset((fast.address, slow.address))] = 0.5
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert trainer.verdicts == {}
    world.advance(8.0)
    assert members(trainer.verdicts[number]) == ["rollout/0/0"]
    assert "slow link" in str(world.state.roster.history) or slow.member.name in trainer.verdicts[number].receipt.lost  # type: ignore[union-attr]  # it has one
    world.advance(120.0)
    assert slow.commits == [1]
    assert any(isinstance(event, CaughtUp) for event in world.events)


def test_all_of_a_slow_host_are_left_to_catch_up_at_once() -> None:
    """Not one after the other, each of which would be waited for."""
    world, trainer, (fast, *slow) = world_of("b", "c", "c", "c")
    for one in (trainer, fast):
        world.rates[frozenset((one.address, slow[0].address))] = 0.5
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    world.advance(6.0)
    assert members(trainer.verdicts[number]) == ["rollout/0/0"]
    world.advance(180.0)
    assert all(one.commits == [1] for one in slow)


def test_a_puller_that_cannot_is_tried_again_and_then_left_behind() -> None:
    world, trainer, (good, cut) = world_of("b", "c")
    world.cuts |= {frozenset((one.address, cut.address)) for one in (trainer, good)}
    end = publish(world, trainer)
    assert members(end) == ["rollout/0/0"]
    assert end is not None
    assert end.receipt is not None
    assert end.receipt.lost == ("rollout/1/0",)
    assert len(offers(cut, "pull")) <= 2 * PULL_TRIES, "by the publish, and as it is caught up"
    assert not any(isinstance(event, MemberLost) for event in world.events)
    world.cuts.clear()
    world.advance(60.0)
    assert cut.commits == [1]


def test_another_holder_serves_when_the_source_dies() -> None:
    world, trainer, (first, second) = world_of("b", "c")
    second.stuck = True
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert 1 in first.held
    world.lose(trainer)
    second.stuck = False
    world.run()
    world.advance(10.0)
    assert first.commits == second.commits == [1]


def test_a_member_without_memory_is_left_out() -> None:
    world, trainer, (_, full) = world_of("b", "c")
    full.refuse = wire.WireError("NoCapacity", "no memory is left")
    end = publish(world, trainer)
    assert members(end) == ["rollout/0/0"]
    assert end is not None
    assert end.receipt is not None
    assert end.receipt.reasons == {"rollout/1/0": "no memory is left"}


def test_bytes_that_are_wrong_are_not_kept() -> None:
    world, trainer, (_, bad) = world_of("b", "c")
    bad.bad_digest = True
    end = publish(world, trainer)
    assert members(end) == ["rollout/0/0"]
    assert end is not None
    assert end.receipt is not None
    assert "digests differ" in end.receipt.reasons["rollout/1/0"]


def test_what_came_wrong_before_its_digest_was_known_is_mended() -> None:
    world, trainer, (_, bad) = world_of("b", "c")
    bad.bad_bytes = True
    number = trainer.publish()
    trainer.stream(number)
    world.run()
    assert [offer.digest for offer in offers(bad, "pull")] == [""]
    trainer.fill(number)
    world.run()
    assert members(trainer.verdicts[number]) == ["rollout/0/0", "rollout/1/0"]
    first, again = offers(bad, "pull")
    assert (first.transfer, again.digest) == (again.transfer, "digest-1")
    wrong = [event for event in world.events if isinstance(event, WrongBytes)]
    assert [(event.member.name, event.holder) for event in wrong] == [("rollout/1/0", "rollout/0/0")]
    end = trainer.verdicts[number].receipt
    assert end is not None
    assert end.wire_nbytes == 2 * 16
    (record,) = [event.record for event in world.events if isinstance(event, SyncEnded)]
    assert record.pulled == {"rollout/0/0": {"trainer/0/0": 16}, "rollout/1/0": {"rollout/0/0": 16}}


def test_the_lost_puller_delays_nobody() -> None:
    world, trainer, (first, _) = world_of("b", "c")
    first.stuck = True
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert number not in trainer.verdicts
    world.lose(first)
    world.run()
    assert members(trainer.verdicts[number]) == ["rollout/1/0"]


def test_a_frozen_puller_is_left_out() -> None:
    world, trainer, (first, _) = world_of("b", "c")
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(first,))
    world.advance(LOCATE_S, frozen=(first,))
    assert members(trainer.verdicts[number]) == ["rollout/1/0"]
    world.advance(5.0)
    assert first.commits == [1]


@pytest.mark.parametrize("size", [1, 4])
def test_versions_follow_each_other(size: int) -> None:
    world, trainer, targets = world_of(*"bcde"[:size])
    for version in range(1, 5):
        publish(world, trainer)
        assert {one.commits[-1] for one in targets} == {version}
    ended = [event for event in world.events if isinstance(event, SyncEnded)]
    assert [event.record.outcome for event in ended] == ["committed"] * 4


def parts_world(*machines: str) -> tuple[World, list[SimMember], list[SimMember]]:
    """Two trainer ranks on machines ``a`` and ``b``, each with a part."""
    config = channel_config(sources=(ChannelRole("trainer", "all"),), transport="tcp", deadline_s=60.0)
    world = World(config, {"trainer": GroupShape(world_size=2)})
    trainers = [
        world.join(f"trainer/0/{rank}", world_size=2, machine=machine, address=f"10.0.0.{rank + 1}")
        for rank, machine in enumerate("ab")
    ]
    targets = [
        world.join(f"rollout/{index}/0", machine=machine, address=f"10.0.0.{ord(machine) - ord('a') + 1}")
        for index, machine in enumerate(machines)
    ]
    world.run()
    return world, trainers, targets


def publish_parts(world: World, trainers: list[SimMember]) -> wire.PublishEnd | None:
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, part in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=part)
    world.run()
    return trainers[0].verdicts.get(numbers[0])


def test_each_owner_serves_its_part_and_parts_of_ones_own_host_are_copied() -> None:
    world, trainers, (here, far, last) = parts_world("a", "c", "d")
    assert members(publish_parts(world, trainers)) == ["rollout/0/0", "rollout/1/0", "rollout/2/0"]
    assert [offers(one, "serve")[0].part for one in trainers] == [0, 1]
    pulls = [
        {pull.part: [one.name for one in pull.holders] for pull in offers(one, "pull")[0].pulls}
        for one in (here, far, last)
    ]
    assert pulls == [
        {1: ["trainer/0/1"]},
        {0: ["trainer/0/0"], 1: ["rollout/0/0", "trainer/0/1"]},
        {0: ["rollout/1/0", "trainer/0/0"], 1: ["rollout/1/0", "rollout/0/0", "trainer/0/1"]},
    ]
    assert [place.part for place in offers(here, "pull")[0].places] == [0]
    assert offers(far, "pull")[0].places == ()


def test_owners_need_not_reach_each_other() -> None:
    world, trainers, (far,) = parts_world("c")
    world.cuts.add(frozenset(trainer.address for trainer in trainers))
    assert members(publish_parts(world, trainers)) == ["rollout/0/0"]
    assert far.held == {1}


def test_an_owner_that_is_lost_ends_the_publish() -> None:
    world, trainers, (far,) = parts_world("c")
    world.cuts.add(frozenset((trainers[1].address, far.address)))
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, part in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=part)
    while not offers(far, "pull"):
        assert any(world.up(sim) or world.down(sim) for sim in (*trainers, far))
    world.lose(trainers[1])
    world.run()
    error = trainers[0].verdicts[numbers[0]].error
    assert error is not None
    assert (error.kind, error.members) == ("PeersLost", ("trainer/0/1",))


def test_deltas_are_to_the_version_that_both_ends_hold() -> None:
    world, trainer, targets = world_of("b", "c")
    for _ in range(2):
        publish(world, trainer)
    late = world.join("rollout/2/0", machine="d", address="10.0.0.4")
    world.advance(2.0)
    publish(world, trainer)
    assert [offer.base for offer in offers(trainer, "serve")] == [0, 1, 2]
    assert all([offer.base for offer in offers(one, "pull")] == [0, 1, 2] for one in targets)
    assert [(offer.version, offer.base) for offer in offers(late, "pull")] == [(2, 0), (3, 2)]


@pytest.mark.parametrize(
    ("pulling", "base"), [({1: "a"}, (1, "a")), ({1: "a", 2: "b"}, (2, "b")), ({2: "x"}, (0, "")), ({}, (0, ""))]
)
def test_who_has_missed_versions_takes_a_delta_to_an_older_one(pulling: dict[int, str], base: tuple[int, str]) -> None:
    """Where the holder still has that, with the same bytes."""
    world, trainer, (far, away) = world_of("b", "c")
    held = {trainer: {1: "a", 2: "b", 3: "c"}, far: pulling, away: {3: "c"}}
    for sim, versions in held.items():
        state = world.state.roster.get(sim.member)
        assert state is not None
        state.held = Held(versions)
    plan = TransferPlan("image", pulls={far.member: {IMAGE: (trainer.member,)}})
    assert _newest_base(world.state.roster, plan, 4) == base


def test_a_link_that_is_cut_is_not_tried_again_by_the_next_version() -> None:
    """Also when the version came over another one."""
    world, trainer, (first, second) = world_of("b", "c")
    world.cuts |= {frozenset((first.address, second.address))}
    assert members(publish(world, trainer)) == ["rollout/0/0", "rollout/1/0"]
    assert [holder.name for holder in offers(second, "pull")[-1].pulls[0].holders] == ["rollout/0/0", "trainer/0/0"]
    assert members(publish(world, trainer)) == ["rollout/0/0", "rollout/1/0"]
    assert [holder.name for holder in offers(second, "pull")[-1].pulls[0].holders] == ["trainer/0/0"]


def test_a_holder_whose_carrier_has_died_has_no_bad_link() -> None:
    world, trainer, (first, _) = world_of("b", "c")
    first.stuck = True
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    trainer.serving.clear()
    first.stuck = False
    world.run()
    assert not world.state.links
    assert members(trainer.verdicts[number]) == ["rollout/0/0", "rollout/1/0"]


@pytest.mark.parametrize("how", ["lost", "cannot"])
def test_nobody_waits_for_a_holder_that_will_never_serve(how: str) -> None:
    world, trainer, (target,) = world_of("b")
    state = world.state.roster.get(trainer.member)
    assert state is not None
    state.carrier_port = 0
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert not offers(target, "pull")
    if how == "lost":
        world.lose(trainer)
        world.run()
        assert not any(main for main in (world.state.commits.main,))
        return
    (offer,) = offers(trainer, "serve")
    error = wire.WireError("SyncError", "carrier 5: it did not listen within 30 s and was killed")
    trainer.outbox.append(wire.TransferFailed(offer.transfer, error))
    world.run()
    end = trainer.verdicts[number]
    assert end.error is not None
    assert "it did not listen" in end.error.message


def test_the_rate_of_a_delivery_that_has_stood_still_is_unknown() -> None:
    """It may have left a holder that gave nothing, and says little for a moment."""
    world, trainer, (target,) = world_of("b")
    target.stuck = True
    publish(world, trainer)
    main = world.state.commits.main
    assert main is not None
    (one,) = main.attempt.of("taking", "offered")
    rates = []
    for received in (100, 200, 220, 220, 230, 330, 430):
        world.now += 1.0
        one.note_received(received, world.now)
        rates.append(round(one.rate()))
    assert rates == [0, 100, 100, 0, 0, 100, 100]


def test_a_holder_with_wrong_bytes_is_asked_once() -> None:
    """Also by who is caught up, from targets before trainers."""
    world, trainer, (liar,) = world_of("b")
    publish(world, trainer)
    liar.forges = True
    late = world.join("rollout/1/0", machine="c", address="10.0.0.3")
    world.run()
    world.advance(5.0)
    assert 1 in late.held
    assert not late.serving, "it would keep the slot with the wrong bytes for ever"
    assert [holder.name for holder in offers(late, "pull")[0].pulls[0].holders] == ["rollout/0/0", "trainer/0/0"]
    assert [holder.name for holder in offers(late, "pull")[1].pulls[0].holders] == ["trainer/0/0"]
    assert len(offers(late, "pull")) == 2


def test_one_that_would_copy_a_part_from_a_lost_neighbour_is_not_offered_it() -> None:
    """The other part comes from a holder whose carrier starts only then."""
    config = channel_config(sources=(ChannelRole("trainer", "all"),), deadline_s=60.0)
    world = World(config, {"trainer": GroupShape(world_size=2)})
    trainers = [
        world.join(f"trainer/0/{rank}", world_size=2, machine=machine, address=f"10.0.0.{rank + 1}")
        for rank, machine in enumerate("ab")
    ]
    target = world.join("rollout/0/0", machine="a", address="10.0.0.1")
    world.run()
    state = world.state.roster.get(trainers[1].member)
    assert state is not None
    state.carrier_port = 0
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, manifest in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=manifest)
    world.run()
    assert not offers(target, "pull")
    world.lose(trainers[0])
    trainers[1].outbox.append(wire.CarrierUp(trainers[1].port))
    world.run()
    error = trainers[1].verdicts[numbers[1]].error
    assert error is not None
    assert error.kind == "PeersLost"
    assert not offers(target, "pull")


def test_who_pulls_what_nobody_serves_is_told_to_stop() -> None:
    """Else its slot stays reserved until the deadline of the publish."""
    world, trainer, (target,) = world_of("b")
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(target,))
    (offer,) = offers(trainer, "serve")
    trainer.outbox.append(wire.TransferFailed(offer.transfer, wire.WireError("Gone", "its memory is gone")))
    world.run()
    (pull,) = offers(target, "pull")
    assert wire.TransferCancel(pull.transfer) in target.seen

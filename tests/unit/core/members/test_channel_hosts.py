"""Members of one host map one memory; between hosts every byte goes once; who uses
whose memory is known.

Covers: core/members/hosts.py, core/moving/paths.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import CaughtUp, SyncEnded
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.hosts import LOCATE_S, NEWCOMERS_S
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import GroupShape
from replicas.core.moving.paths import IMAGE, plan
from tests.support.channel_world import SimMember, World, channel_config


def publish(world: World, *trainers: SimMember) -> None:
    world.run()
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number in zip(trainers, numbers, strict=True):
        trainer.pack(number)
    world.run()


def published(world: World, trainer: SimMember) -> wire.ReceiptData:
    publish(world, trainer)
    return trainer.receipt(trainer.publishes)


def host_of(world: World, sim: SimMember) -> int:
    state = world.state.roster.get(sim.member)
    assert state is not None
    return state.host


def kinds(sim: SimMember) -> list[str]:
    """What it was asked to do for transfers, in order."""
    roles = [m.role if isinstance(m, wire.TransferOffer) else "lane" for m in sim.seen if _moves(m)]
    return list(dict.fromkeys(roles))


def _moves(message: wire.FromCoordinator) -> bool:
    return isinstance(message, wire.TransferOffer | wire.LaneForm)


def released(sim: SimMember) -> list[int]:
    return [message.version for message in sim.seen if isinstance(message, wire.Released)]


def committed(world: World) -> list[int]:
    return [decision.version for decision in world.decisions]


# ---------------------------------------------------------------- who is where


def test_members_of_one_host_map_and_form_no_group() -> None:
    world = World()
    trainer, *targets = [world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    world.run()
    assert len({host_of(world, sim) for sim in (trainer, *targets)}) == 1
    receipt = published(world, trainer)
    assert len(receipt.members) == 2
    assert receipt.phases["map"] == 0.001
    assert kinds(trainer) == [], "a publisher's slot is pinned, and nothing is asked of it"
    assert [kinds(target) for target in targets] == [["map"], ["map"]]


def test_bytes_are_what_moved() -> None:
    """To targets of the publisher's host nothing is sent, to each other host once; and
    once more to who comes later there."""
    world = World()

    def sent() -> list[int]:
        return [event.record.moved_nbytes for event in world.events if isinstance(event, SyncEnded)]

    trainer = world.join("trainer/0/0", machine="a")
    world.join("rollout/0/0", machine="a")
    world.run()
    assert published(world, trainer)
    assert sent() == [0]
    for number in (1, 2):
        world.join(f"rollout/{number}/0", machine="b")
    world.run()
    served = [event for event in world.events if isinstance(event, CaughtUp)]
    assert sum(event.moved_nbytes for event in served) == 16
    assert {name for event in served for name, nbytes in event.moved_to.items() if nbytes} <= {"rollout/1", "rollout/2"}
    assert [sum(event.moved_to.values()) for event in served] == [event.moved_nbytes for event in served]
    assert sorted(member.name for event in served for member in event.members) == ["rollout/1/0", "rollout/2/0"]
    assert published(world, trainer)
    assert sent() == [0, 16]


def test_a_record_says_who_held_the_version_up() -> None:
    """The replicas that took longest, the slowest first, and why others were lost."""
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    near, far = world.join("rollout/0/0", machine="a"), world.join("rollout/1/0", machine="b")
    frozen = world.join("rollout/2/0", machine="c")
    world.run()
    trainer.pack(trainer.publish())
    world.run(frozen=(far, frozen))
    world.advance(1.0, frozen=(far, frozen))
    world.advance(30.0, frozen=(frozen,))
    (record,) = [event.record for event in world.events if isinstance(event, SyncEnded)]
    assert (record.outcome, record.publisher, record.error) == ("committed", "trainer/0", "")
    assert list(record.held) == [far.member.replica_name, near.member.replica_name]
    assert record.held["rollout/1"] >= 1.0 > record.held["rollout/0"]
    assert record.reasons.keys() == set(record.lost) == {frozen.member.name}
    assert all(record.reasons.values())


def test_a_record_of_a_failure_says_why_and_where_its_time_went() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    world.join("rollout/0/0", machine="a")
    world.run()
    trainer.publish(deadline_s=5.0)  # and never packs it
    world.run()
    world.advance(10.0)
    (record,) = [event.record for event in world.events if isinstance(event, SyncEnded)]
    assert record.outcome == "deadline_exceeded"
    assert "trainer/0/0 did not pack it" in record.error
    assert record.phases["pack"] == pytest.approx(record.seconds)


def test_a_host_gets_every_byte_once() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a")
    near = world.join("rollout/0/0", machine="a")
    far = [world.join(f"rollout/{number}/0", machine="b") for number in (1, 2, 3)]
    world.run()
    receipt = published(world, trainer)
    assert kinds(near) == ["map"]
    assert kinds(trainer) == ["serve"]
    assert sorted(map(tuple, (kinds(sim) for sim in far))) == [("map",), ("map",), ("pull",)]
    assert receipt.wire_nbytes == 16
    publish(world, trainer)
    assert committed(world) == [1, 2]
    assert sum(len(sim.received) for sim in (near, *far)) == 2


def test_transport_group_forces_the_process_group() -> None:
    world = World(channel_config(transport="group"))
    trainer, target = [world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0")]
    publish(world, trainer)
    assert kinds(target) == ["receive", "lane"]
    assert not any(isinstance(message, wire.Locate) for message in target.seen)


def test_what_looks_alike_is_not_one_host_unless_memory_can_be_read() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="b")
    world.run()
    assert any(isinstance(message, wire.Locate) for message in target.seen), "boot id, namespace and user are equal"
    assert host_of(world, trainer) != host_of(world, target)


def test_a_newcomer_that_does_not_say_where_it_is_gets_everything_sent() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    target.mute = True
    world.run()
    assert host_of(world, target) == 0
    assert not world.state.roster.targets, "it is not admitted before it is known where it is"
    world.advance(LOCATE_S + 1)
    target.mute = False
    assert host_of(world, target) != host_of(world, trainer)
    publish(world, trainer)
    assert target.commits == [1]


def test_who_has_joined_takes_part_in_the_next_publish() -> None:
    """Though its answer comes after the publish; one that is frozen costs a second."""
    world = World()
    trainer, first = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    world.run()
    second, frozen = world.join("rollout/1/0", machine="a"), world.join("rollout/2/0", machine="a")
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(second, frozen))
    assert trainer.verdicts == {}
    world.run(frozen=(frozen,))
    assert trainer.verdicts == {}, "it waits for the other one, too"
    world.advance(NEWCOMERS_S, frozen=(frozen,))
    verdict = trainer.verdicts[number]
    assert verdict.receipt is not None
    assert [member.name for member in verdict.receipt.members] == ["rollout/0/0", "rollout/1/0"]
    assert first.commits == second.commits == [1]
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(frozen,))
    assert first.commits == second.commits == [1, 2], "one that is frozen is waited for once"


def test_the_host_is_found_though_its_first_members_have_gone() -> None:
    world = World()
    first = world.join("rollout/0/0", machine="a")
    world.run()
    late = world.join("rollout/1/0", machine="a")
    world.lose(first)
    world.run()
    third = world.join("rollout/2/0", machine="a")
    world.run()
    assert host_of(world, late) == host_of(world, third) != 0


def test_one_that_cannot_map_is_sent_the_bytes() -> None:
    world = World()
    trainer, good, bad = [world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    bad.unmappable = True
    receipt = published(world, trainer)
    assert not receipt.lost
    assert set(kinds(bad)) == {"map", "pull"}
    assert good.received == []
    assert host_of(world, bad) != host_of(world, good)
    publish(world, trainer)
    assert committed(world) == [1, 2]
    assert kinds(bad).count("map") == 1


def test_one_without_descriptors_left_is_left_behind() -> None:
    world = World()
    trainer, _, poor = [world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    poor.refuse = wire.WireError("NoCapacity", "too many open files")
    receipt = published(world, trainer)
    assert receipt.lost == ("rollout/1/0",)
    assert "too many open files" in receipt.reasons["rollout/1/0"]


# ---------------------------------------------------------------- losses


def test_a_frozen_reader_holds_up_nobody_but_itself() -> None:
    world = World()
    trainer, good, frozen = [world.join(name, machine="a") for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    for _ in range(20):
        world.run(frozen=(frozen,))
        world.advance(0.5, frozen=(frozen,))
    receipt = trainer.receipt(number)
    assert receipt.lost == (frozen.member.name,)
    assert receipt.seconds < 3.5 + 1.5, "three heartbeats"
    offers = [message for message in good.seen if isinstance(message, wire.TransferOffer)]
    assert len(offers) == 1, "the others had it long since"


def test_the_death_of_a_reader_restarts_nothing() -> None:
    world = World()
    trainer, near, far = (
        world.join("trainer/0/0", machine="a"),
        world.join("rollout/0/0", machine="a"),
        world.join("rollout/1/0", machine="b"),
    )
    near.stuck = True
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    world.run()
    assert number not in trainer.verdicts
    world.lose(near)
    world.run()
    assert trainer.verdicts[number].receipt is not None
    assert sum(isinstance(message, wire.TransferOffer) for message in far.seen) == 1


def test_the_committed_version_survives_its_source_on_the_host() -> None:
    world = World()
    trainer, first = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    publish(world, trainer)
    world.lose(trainer)
    late = world.join("rollout/1/0", machine="a")
    world.run()
    assert kinds(late) == ["map"], "from the other reader"
    world.lose(first)
    third = world.join("rollout/2/0", machine="a")
    world.run()
    assert kinds(third) == ["map"]
    far = world.join("rollout/3/0", machine="b")
    world.run()
    assert kinds(far) == ["pull"]


def test_the_source_dies_before_anyone_has_mapped_it() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    publish(world, trainer)
    number = trainer.publish()
    trainer.pack(number)
    while not isinstance(target.inbox[-1] if target.inbox else None, wire.TransferOffer):
        assert world.up(trainer) or world.down(trainer)
    world.lose(trainer)
    world.run()
    assert committed(world) == [1]
    again = world.join("trainer/0/0", machine="a")
    receipt = published(world, again)
    assert receipt.version == 3


# -------------------------------------------------------------- sent while it is packed


def streaming_world(*far: str, stuck: bool = False) -> tuple[World, SimMember, SimMember, list[SimMember], int]:
    """A trainer with a target on its own host and others elsewhere; it has begun to
    fill a slot."""
    world = World()
    trainer, near = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    others = [world.join(f"rollout/{index}/0", machine=where) for index, where in enumerate(far, 1)]
    world.run()
    for other in others:
        other.stuck = stuck
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    world.run()
    return world, trainer, near, others, number


def sent(world: World, trainer: SimMember, *others: SimMember) -> None:
    """All bytes are in the slot, and have come to the others; it has not said so."""
    trainer.published.add(1)
    world.run()
    assert all(other.held == {1} for other in others)


def test_other_hosts_get_it_while_it_is_packed_and_nobody_maps_half_a_version() -> None:
    world, trainer, near, (leader, second), number = streaming_world("b", "b")
    assert kinds(leader) == ["pull"]
    sent(world, trainer, leader)
    assert kinds(near) == kinds(second) == []
    assert not world.decisions, "whether it is right is not known before the publisher's digest"
    trainer.fill(number)
    world.run()
    receipt = trainer.receipt(number)
    assert len(receipt.members) == 3
    assert kinds(near) == kinds(second) == ["map"]
    assert [sim.commits for sim in (near, leader, second)] == [[1]] * 3


def test_a_publish_that_fails_while_it_is_sent_is_nobodys_version() -> None:
    world, trainer, near, (far,), number = streaming_world("b")
    sent(world, trainer, far)
    trainer.outbox.append(wire.PackFailed(number, wire.WireError("SyncError", "mine")))
    world.run()
    assert trainer.verdicts[number].error is not None
    assert not world.decisions
    assert far.held == near.held == set()
    receipt = published(world, trainer)
    assert receipt.version == 2


@pytest.mark.parametrize("far", ["", "b"])
def test_a_publisher_that_dies_while_it_fills(far: str) -> None:
    world, trainer, near, others, _ = streaming_world(*far, stuck=True)
    world.lose(trainer)
    world.run()
    assert not world.decisions
    for other in others:
        other.stuck = False
    again = world.join("trainer/0/0", machine="a")
    receipt = published(world, again)
    assert len(receipt.members) == 1 + len(far)
    assert near.commits[-1] == receipt.version


@pytest.mark.parametrize("agree", [True, False])
def test_a_publisher_that_dies_when_all_of_it_was_sent(agree: bool) -> None:
    """Before it has told its digest: the version lives on if all who got it agree."""
    world, trainer, near, (second, third), _ = streaming_world("b", "c")
    third.bad_digest = not agree
    sent(world, trainer, second, third)
    world.lose(trainer)
    world.run()
    assert committed(world) == ([1] if agree else [])
    assert [sim.held for sim in (near, second, third)] == [{1} if agree else set()] * 3


def test_a_version_that_its_publisher_never_says_to_be_full_fails_at_the_deadline() -> None:
    """Though all of it was sent; the next one works."""
    world, trainer, near, (far,), number = streaming_world("b")
    sent(world, trainer, far)
    world.advance(61.0)
    assert trainer.verdicts[number].error is not None
    assert far.held == near.held == set()
    published(world, trainer)
    assert far.commits == near.commits == [2]


def test_wrong_bytes_that_were_sent_while_it_was_packed_are_not_committed_at_that_target() -> None:
    world, trainer, near, (far,), number = streaming_world("b")
    far.bad_digest = True
    sent(world, trainer, far)
    state = world.state.roster.get(far.member)
    assert state is not None
    assert 1 not in state.held, "what it has received is not believed yet"
    trainer.fill(number)
    world.run()
    assert near.commits == [1]
    receipt = trainer.receipt(number)
    assert (receipt.members, receipt.lost) == ((near.member,), (far.member.name,))


# ---------------------------------------------------------------- memory that is lent


def test_the_owner_is_told_when_nobody_uses_an_older_version() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    publish(world, trainer)
    assert released(trainer) == []
    publish(world, trainer)
    assert released(trainer) == [1], "the target let go of it when the second was committed"
    assert released(target) == []


def test_a_frozen_readers_memory_is_not_waited_for() -> None:
    world = World(groups={"rollout": GroupShape(heartbeat_timeout_s=10.0)})
    trainer, frozen = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    world.join("rollout/1/0", machine="a")
    publish(world, trainer)
    number = trainer.publish()
    trainer.pack(number)
    for _ in range(10):
        world.run(frozen=(frozen,))
        world.advance(0.5, frozen=(frozen,))
    assert trainer.verdicts[number].receipt is not None
    world.run(frozen=(frozen,))
    assert released(trainer) == [1], "the frozen one may have it mapped for ever"


# ---------------------------------------------------------------- parts


PARTS = [
    PartManifest((TensorSpec("weight", "float32", (4,)),), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)
]


def publish_parts(world: World, trainers: list[SimMember]) -> wire.ReceiptData:
    world.run()
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, part in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=part)
    world.run()
    return trainers[0].receipt(numbers[0])


def parts_world(machines: tuple[str, str]) -> tuple[World, list[SimMember]]:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine=machines[rank]) for rank in range(2)]
    return world, trainers


def test_parts_of_ones_own_host_are_copied_there() -> None:
    world, trainers = parts_world(("a", "a"))
    targets = [world.join(f"rollout/{number}/0", machine="a") for number in range(2)]
    publish_parts(world, trainers)
    assert [kinds(target) for target in targets] == [["pull"], ["map"]]
    (offer,) = [message for message in targets[0].seen if isinstance(message, wire.TransferOffer)]
    assert (offer.pulls, [place.part for place in offer.places]) == ((), [0, 1])
    assert [kinds(trainer) for trainer in trainers] == [[], []]


@pytest.mark.parametrize("target_machine", ["a", "b", "c"])
def test_parts_of_other_hosts_are_pulled_from_their_owners(target_machine: str) -> None:
    world, trainers = parts_world(("a", "b"))
    target = world.join("rollout/0/0", machine=target_machine)
    second = world.join("rollout/1/0", machine=target_machine)
    publish_parts(world, trainers)
    assert kinds(second) == ["map"]
    (offer,) = [message for message in target.seen if isinstance(message, wire.TransferOffer)]
    local = [place.part for place in offer.places]
    assert local == {"a": [0], "b": [1], "c": []}[target_machine]
    pulls = {pull.part: [holder.name for holder in pull.holders] for pull in offer.pulls}
    assert pulls == {part: [f"trainer/0/{part}"] for part in range(2) if part not in local}
    assert [bool(kinds(trainer)) for trainer in trainers] == [part in pulls for part in range(2)]


# ---------------------------------------------------------------- the plan


def state(name: str, host: int, *, place: bool = True) -> MemberState:
    world = World()
    sim = world.join(name)
    found = world.state.roster.get(sim.member)
    assert found is not None
    found.host = host
    if place:
        found.places[1] = wire.SlotPlace(1, 1, 1, 1, 1)
    return found


def test_a_holder_whose_place_is_unknown_only_sends() -> None:
    holder, needer = state("trainer/0/0", 1, place=False), state("rollout/0/0", 1)
    found = plan(1, [needer], [holder], [])
    assert found is not None
    assert (found.pulls, found.maps) == ({needer.member: {IMAGE: (holder.member,)}}, {})


def test_nobody_has_it() -> None:
    assert plan(1, [state("rollout/0/0", 1)], [], []) is None


def test_the_chain_goes_from_host_to_host() -> None:
    needers = [state(f"rollout/{number}/0", host) for number, host in enumerate((4, 2, 4, 3, 2))]
    for by_group in (True, False):
        found = plan(1, needers, [state("trainer/0/0", 1)], [], by_group=by_group)
        assert found is not None
        chain = [member.name for member in found.broadcast or (*found.servers, *found.pulls)]
        assert chain == ["trainer/0/0", "rollout/1/0", "rollout/3/0", "rollout/0/0"]
        assert {member.name for member in found.waiting} == {"rollout/2/0", "rollout/4/0"}
        assert bool(found.broadcast) == by_group != bool(found.pulls)


class GoneOnce(SimMember):
    """Its first look at what it is to map finds nothing."""

    looks = 0

    def _map(self, offer: wire.TransferOffer) -> None:
        self.looks += 1
        if self.looks == 1:
            self.outbox.append(wire.TransferFailed(offer.transfer, wire.WireError("Gone", "it is not there")))
        else:
            super()._map(offer)


def test_what_is_gone_at_the_first_look_is_looked_for_once_more() -> None:
    world = World()
    world.member_type = GoneOnce
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="a")
    receipt = published(world, trainer)
    assert receipt.members == (target.member,)
    assert kinds(target) == ["map"]
    assert host_of(world, target) == host_of(world, trainer)


def test_a_lane_that_fails_when_its_bytes_have_moved_costs_nothing_but_the_lane() -> None:
    """On GPUs: the second member of a host copies what the first has received."""
    world = World(channel_config(staging="device"))
    trainer = world.join("trainer/0/0", machine="a", cuda_devices=("GPU-1",))
    leader, second = (world.join(f"rollout/{index}/0", machine="b", cuda_devices=("GPU-2",)) for index in range(2))
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    world.run(frozen=(second,))
    assert leader.held == {1}
    [lane] = [message.lane for message in leader.seen if isinstance(message, wire.LaneForm)]
    leader.outbox.append(wire.LaneFailed(lane, wire.WireError("SyncError", "its sidecar ended")))
    world.run(frozen=(second,))
    assert wire.LaneDrop(lane) in leader.seen
    world.run()
    receipt = trainer.receipt(number)
    assert receipt.members == (leader.member, second.member)
    assert len([message for message in leader.seen if isinstance(message, wire.LaneForm)]) == 1


def test_kept_memory_is_no_source_for_other_hosts() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)))
    first, second = (world.join(f"trainer/0/{rank}", world_size=2, machine="a") for rank in range(2))
    near, far = world.join("rollout/0/0", machine="a"), world.join("rollout/1/0", machine="b")
    world.run()
    states = {state.member: state for state in world.state.roster}
    one, two = states[first.member], states[second.member]
    for sim in (first, second):
        place = sim.place(1)
        assert place is not None
        states[sim.member].places[1] = place
    kept = {first.member, second.member}
    for holders, owners in (([one], []), ([], [one, two])):
        assert plan(1, [states[near.member]], holders, owners, kept=kept) is not None
        assert plan(1, [states[far.member]], holders, owners, kept=kept) is None


def test_who_has_all_parts_on_its_own_host_pulls_none() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine="a") for rank in range(2)]
    near, far = world.join("rollout/0/0", machine="a"), world.join("rollout/1/0", machine="b")
    world.run()
    spec = TensorSpec("weight", "float32", (4,))
    for rank, trainer in enumerate(trainers):
        piece = Piece(0, (2 * rank,), (2,), 0)
        trainer.pack(trainer.publish(), manifest=PartManifest((spec,), (), (piece,)))
    world.run()
    assert near.held == far.held == {1}
    [here], [there] = ([m for m in sim.seen if isinstance(m, wire.TransferOffer)] for sim in (near, far))
    assert (here.pulls, len(here.places)) == ((), 2)
    assert ([pull.part for pull in there.pulls], there.places) == ([0, 1], ())

"""One broken link: bytes go round it, nobody healthy is lost for it, and it is in use
again after it was healed.

Covers: core/moving/links.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import MemberLost
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.member_state import MemberState
from replicas.core.members.roster import GroupShape
from replicas.core.moving.links import DOUBT
from replicas.core.versions.catch_up import REACH_S
from tests.support.channel_world import NBYTES, SimMember, World, channel_config

CAUGHT_UP_S = 6.0
"""After its link works again a member has the newest version."""
TRAINER, NEAR, FAR = "10.0.0.1", "10.0.0.2", "10.0.0.3"
PARTS = [
    PartManifest((TensorSpec("weight", "float32", (4,)),), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)
]


def three_hosts() -> tuple[World, SimMember, SimMember, SimMember]:
    world = World()
    trainer = world.join("trainer/0/0", machine="a", address=TRAINER)
    near = world.join("rollout/0/0", machine="b", address=NEAR)
    far = world.join("rollout/1/0", machine="c", address=FAR)
    world.run()
    world.advance(1.0)
    return world, trainer, near, far


def publish(world: World, trainer: SimMember, deadline_s: float = 40.0) -> tuple[float, wire.PublishEnd]:
    """How long it takes, and its verdict."""
    number, began = trainer.publish(deadline_s=deadline_s), world.now
    trainer.pack(number)
    while number not in trainer.verdicts:
        world.advance(0.5)
    return world.now - began, trainer.verdicts[number]


def members(end: wire.PublishEnd) -> list[str]:
    assert end.receipt is not None, end.error
    return [member.name for member in end.receipt.members]


def holders_of(sim: SimMember) -> list[str]:
    """From whom it was to pull last."""
    offers = [message for message in sim.seen if isinstance(message, wire.TransferOffer) and message.role == "pull"]
    return [holder.name for holder in offers[-1].pulls[0].holders]


def lost(world: World) -> list[str]:
    return [event.member.name for event in world.events if isinstance(event, MemberLost)]


@pytest.mark.parametrize("idle", [True, False], ids=["while idle", "before the first"])
@pytest.mark.parametrize("link", [(TRAINER, NEAR), (TRAINER, FAR), (NEAR, FAR)])
def test_bytes_go_round_a_broken_link(link: tuple[str, str], idle: bool) -> None:
    world, trainer, near, far = three_hosts()
    if idle:
        publish(world, trainer)
    world.cuts.add(frozenset(link))
    took, end = publish(world, trainer)
    assert members(end) == ["rollout/0/0", "rollout/1/0"]
    assert took <= 5.0
    version = max(near.held)
    assert version in far.held
    for _ in range(10):
        took, end = publish(world, trainer)
        assert members(end) == ["rollout/0/0", "rollout/1/0"], "no publish suffers from it again"
        assert took <= 0.5
        world.advance(3.0)
    assert lost(world) == []
    world.cuts.clear()
    world.advance(30.0)
    assert members(publish(world, trainer)[1]) == ["rollout/0/0", "rollout/1/0"]
    assert holders_of(near) == ["trainer/0/0"], "all over each link, as before"
    assert holders_of(far) == ["rollout/0/0", "trainer/0/0"]


def test_who_cannot_be_reached_is_left_out_by_name_and_caught_up_when_the_link_is_back() -> None:
    world, trainer, near, far = three_hosts()
    publish(world, trainer)
    world.cuts |= {frozenset((TRAINER, FAR)), frozenset((NEAR, FAR))}
    took, end = publish(world, trainer)
    assert took <= 5.0
    assert members(end) == ["rollout/0/0"]
    assert end.receipt is not None
    assert end.receipt.lost == ("rollout/1/0",)
    assert "rollout/1/0" in end.receipt.reasons
    for _ in range(5):
        took, end = publish(world, trainer)
        assert (took, members(end)) == (0.5, ["rollout/0/0"])
        world.advance(7.0)
    latest = max(near.held)
    assert latest not in far.held
    world.cuts.clear()
    world.advance(CAUGHT_UP_S)
    assert latest in far.held
    world.advance(1.0)
    assert members(publish(world, trainer)[1]) == ["rollout/0/0", "rollout/1/0"]


@pytest.mark.parametrize("connect_s", [0.0, 4.5])
@pytest.mark.parametrize("cut_s", [60.0, 61.5, 63.0, 64.5, 300.0])
def test_who_was_cut_off_for_long_is_caught_up_soon_after_its_link_works(cut_s: float, connect_s: float) -> None:
    """And meanwhile is asked little, and delays nobody."""
    world, trainer, near, far = three_hosts()
    world.connect_s = connect_s
    world.cuts |= {frozenset((TRAINER, FAR)), frozenset((NEAR, FAR))}
    publish(world, trainer)
    before = len(far.seen)
    world.advance(cut_s)
    assert not far.held
    tries = sum(isinstance(one, wire.TransferOffer) for one in far.seen[before:])
    assert 1 <= tries <= cut_s / REACH_S + 3
    joiner = world.join("rollout/2/0", machine="d", address="10.0.0.4")
    world.advance(1.0)
    assert joiner.held == near.held
    world.cuts.clear()
    world.advance(CAUGHT_UP_S)
    assert far.held == near.held
    world.advance(1.0)
    assert len(members(publish(world, trainer)[1])) == 3


def test_the_only_link_of_a_source_fails_the_publish_soon_and_names_its_ends() -> None:
    world = World()
    trainer = world.join("trainer/0/0", machine="a", address=TRAINER)
    target = world.join("rollout/0/0", machine="b", address=NEAR)
    world.advance(1.0)
    publish(world, trainer)
    world.cuts.add(frozenset((TRAINER, NEAR)))
    took, end = publish(world, trainer)
    assert took <= 5.0
    assert end.error is not None
    assert "trainer/0/0" in end.error.message
    assert "rollout/0/0" in end.error.message
    assert lost(world) == []
    world.cuts.clear()
    world.advance(4.0)
    assert members(publish(world, trainer)[1]) == ["rollout/0/0"]
    assert target.commits == [1, 3]


def test_a_joiner_behind_a_broken_link_is_caught_up_over_somebody_else() -> None:
    world, trainer, _, _ = three_hosts()
    publish(world, trainer)
    world.lose(trainer)
    world.cuts.add(frozenset((NEAR, "10.0.0.4")))
    late = world.join("rollout/2/0", machine="d", address="10.0.0.4")
    world.advance(2.0)
    assert late.held == {1}


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_a_version_in_parts_goes_round_a_broken_link(transport: str) -> None:
    config = channel_config(sources=(ChannelRole("trainer", "all"),), transport=transport)
    world = World(config, {"trainer": GroupShape(world_size=2)})
    trainers = [world.join(f"trainer/0/{rank}", world_size=2, machine="a", address=TRAINER) for rank in range(2)]
    near = world.join("rollout/0/0", machine="b", address=NEAR)
    far = world.join("rollout/1/0", machine="c", address=FAR)
    world.advance(1.0)
    world.cuts.add(frozenset((TRAINER, FAR)))
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, manifest in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=manifest)
    world.advance(5.0)
    assert near.held == far.held == {1}


def test_a_link_over_which_nothing_comes_any_more_is_broken_and_not_slow() -> None:
    """Also where it is known how fast it usually is: whoever is behind it gets the
    version from somebody else."""
    for link in ((TRAINER, NEAR), (TRAINER, FAR), (NEAR, FAR)):
        world, trainer, _, _ = three_hosts()
        for pair in ((TRAINER, NEAR), (TRAINER, FAR), (NEAR, FAR)):
            world.rates[frozenset(pair)] = NBYTES / 2.0
        publish(world, trainer)
        publish(world, trainer)
        world.holes.add(frozenset(link))
        took, end = publish(world, trainer)
        assert members(end) == ["rollout/0/0", "rollout/1/0"], link
        assert took <= 10.0


@pytest.mark.parametrize("link", [(TRAINER, NEAR), (TRAINER, FAR), (NEAR, FAR)])
def test_a_link_over_which_nothing_moves_is_left_alone_for_longer_each_time(link: tuple[str, str]) -> None:
    """As one on which large packets are lost. It is broken and not slow: nobody behind
    it is left out.
    """
    world, trainer, _, _ = three_hosts()
    publish(world, trainer)
    world.holes.add(frozenset(link))
    suffered = 0
    for _ in range(50):
        took, end = publish(world, trainer)
        assert members(end) == ["rollout/0/0", "rollout/1/0"]
        assert took <= 5.0
        suffered += took > 1.0
        world.advance(2.0)
    if link != (TRAINER, FAR):  # over which nothing goes as long as the others work
        assert 2 <= suffered <= 8, "it is tried again, and seldom"


def state_of(world: World, sim: SimMember) -> MemberState:
    state = world.state.roster.get(sim.member)
    assert state is not None
    return state


def test_a_broken_link_to_a_host_that_is_gone_is_forgotten() -> None:
    world, trainer, near, far = three_hosts()
    world.cuts.add(frozenset((NEAR, FAR)))
    publish(world, trainer)
    assert not world.state.links.works(state_of(world, near), state_of(world, far), world.now)
    world.lose(far)
    world.cuts.clear()
    world.advance(0.5)
    assert not world.state.links
    again = world.join("rollout/1/0", machine="c", address=FAR, generation=2)
    assert world.state.links.works(state_of(world, near), state_of(world, again), world.now)


def test_a_version_that_went_over_a_link_ends_its_doubt() -> None:
    world, trainer, _, far = three_hosts()
    links, pair = world.state.links, (TRAINER, FAR)
    ends = state_of(world, trainer), state_of(world, far)
    links.doubt([pair], "refused", world.now)
    assert not links.works(*ends, world.now)
    links.clear_doubt([pair])
    assert links.works(*ends, world.now)
    assert not links


def test_a_link_is_in_doubt_for_longer_each_time() -> None:
    world, trainer, _, far = three_hosts()
    links, ends, now = world.state.links, (state_of(world, trainer), state_of(world, far)), world.now
    waits = []
    for _ in range(10):
        began = now
        links.doubt([(TRAINER, FAR), (FAR, TRAINER)], "refused", now)  # by both of its ends
        while not links.works(*ends, now):
            now += 1.0
        waits.append(now - began)
    assert waits == sorted(waits)
    assert waits[0] <= 5.0
    assert waits[-1] == DOUBT.max_s


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_ranks_of_a_source_need_not_reach_each_other(transport: str) -> None:
    """Where no process group of them all forms, their parts are pulled."""
    config = channel_config(sources=(ChannelRole("trainer", "all"),), transport=transport)
    world = World(config, {"trainer": GroupShape(world_size=2)})
    trainers = [
        world.join(f"trainer/0/{rank}", world_size=2, machine=f"{rank}", address=address)
        for rank, address in enumerate((TRAINER, NEAR))
    ]
    far = world.join("rollout/0/0", machine="c", address=FAR)
    world.advance(1.0)
    world.cuts.add(frozenset((TRAINER, NEAR)))
    numbers = [trainer.publish() for trainer in trainers]
    for trainer, number, manifest in zip(trainers, numbers, PARTS, strict=True):
        trainer.pack(number, manifest=manifest)
    world.advance(5.0)
    assert trainers[0].verdicts[numbers[0]].error is None
    assert far.held == {1}

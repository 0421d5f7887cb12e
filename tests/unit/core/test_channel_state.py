"""Histories of a weight channel: what is committed, who is told what, and who gets
which version.

Covers: core/base/effects.py, core/channel_state.py, core/members/views.py,
core/moving/channel_context.py, core/versions/commits.py, core/versions/load_watches.py.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from replicas import errors
from replicas import messages as wire
from replicas.config.structs import ChannelRole
from replicas.core.base.effects import CaughtUp, LoadFailed, MemberLost, ReplicaLoaded, Retried
from replicas.core.base.manifest import PartManifest, Piece, TensorSpec
from replicas.core.members.roster import GroupShape
from replicas.core.members.views import WHOLE_VIEW
from replicas.core.moving.channel_context import REST
from replicas.messages.bounds import REASON_LENGTH, REASONS_MAX, TEXT_LENGTH
from replicas.messages.identity import ProcessIdentity
from tests.support.channel_world import SimMember, World, channel_config

GROUP = channel_config(transport="group")


def publish(world: World, *sims: object, **more: object) -> None:
    for sim in sims:
        number = sim.publish(**more)  # type: ignore[attr-defined]  # SimMember
        sim.pack(number)  # type: ignore[attr-defined]  # SimMember


def test_a_version_commits_when_every_target_holds_it() -> None:
    world = World()
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    publish(world, trainer)
    world.run()
    receipt = trainer.receipt(1)
    assert [m.name for m in receipt.members] == ["rollout/0/0", "rollout/1/0"]
    assert receipt.version == 1
    assert receipt.lost == ()
    assert world.decisions[0].digest == "digest-1"
    assert first.commits == second.commits == trainer.commits == [1]


def test_without_targets_it_commits_on_the_source_alone() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    publish(world, trainer)
    world.run()
    assert trainer.verdicts[1].receipt is not None
    assert world.decisions[0].digest == "digest-1"


def test_the_lane_is_kept_for_the_next_version_and_reformed_after_a_join() -> None:
    world = World(GROUP)
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    for _ in range(3):
        publish(world, trainer)
        world.run()
    assert sum(isinstance(m, wire.LaneForm) for m in target.seen) == 1
    world.join("rollout/1/0")
    world.run()
    publish(world, trainer)
    world.run()
    assert sum(isinstance(m, wire.LaneForm) for m in trainer.seen) == 2


def test_a_chosen_version_that_is_not_newer_is_refused() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    publish(world, trainer, version=5)
    world.run()
    trainer.publish(version=5)
    world.run()
    error = trainer.error(2)
    assert error.kind == "StaleVersion"


def test_all_ranks_of_a_source_get_one_verdict() -> None:
    world = World(groups={"trainer": GroupShape(world_size=2)})
    leader, other = world.join("trainer/0/0", world_size=2), world.join("trainer/0/1", world_size=2)
    number = leader.publish()
    other.publish()
    other.pack(number, manifest=None)
    full = wire.WireError("NoCapacity", "the arena needs 5 GiB")
    leader.outbox.append(wire.PackFailed(number, full))
    world.run()
    for sim in (leader, other):
        error = sim.error(number)
        assert (error.kind, error.message, error.unanimous) == ("NoCapacity", "the arena needs 5 GiB", True)


def test_a_rank_that_begins_late_gets_the_same_verdict() -> None:
    world = World(groups={"trainer": GroupShape(world_size=2)})
    leader, other = world.join("trainer/0/0", world_size=2), world.join("trainer/0/1", world_size=2)
    publish(world, leader)
    world.run()
    other.publish()
    world.run()
    assert other.verdicts[1] == leader.verdicts[1]


def test_a_rank_that_joins_late_counts_from_where_its_replica_began() -> None:
    world = World(groups={"trainer": GroupShape(world_size=2)})
    leader = world.join("trainer/0/0", world_size=2)
    publish(world, leader)
    world.run()
    other = world.join("trainer/0/1", world_size=2)
    assert other.publish() == 1
    publish(world, leader)
    assert other.publish() == 2
    world.run()
    assert other.verdicts == leader.verdicts
    world.lose(other)
    assert world.join("trainer/0/1", world_size=2).publish() == 3, "one that joins again counts on"
    world.lose(leader)
    world.lose(next(iter(world.members.values())))
    assert world.join("trainer/0/0", world_size=2).publish() == 3, "and so does a replica that starts again"


@pytest.mark.parametrize("beginning", [False, True])
def test_a_rank_that_joins_once_more_is_paired_with_what_its_replica_has_under_way(beginning: bool) -> None:
    config = channel_config(sources=(ChannelRole("trainer", "all"),))
    world = World(config, {"trainer": GroupShape(world_size=2)})
    leader, other = world.join("trainer/0/0", world_size=2), world.join("trainer/0/1", world_size=2)
    spec = TensorSpec("weight", "float32", (4,))
    parts = [PartManifest((spec,), (), (Piece(0, (2 * rank,), (2,), 0),)) for rank in range(2)]
    for _ in range(2):
        for sim, part in zip((leader, other), parts, strict=True):
            sim.pack(sim.publish(), manifest=part)
        world.run()
    world.lose(other, "lease")
    number = leader.publish()
    if beginning:
        world.run()
    leader.pack(number, manifest=parts[0])
    world.run()
    other = world.join("trainer/0/1", world_size=2)
    other.pack(other.publish(), manifest=parts[1])
    world.run()
    assert leader.verdicts[number].receipt is not None, leader.verdicts
    assert [sim.publishes for sim in (leader, other)] == [3, 3]
    for sim, part in zip((leader, other), parts, strict=True):
        sim.pack(sim.publish(), manifest=part)
    world.run()
    assert leader.verdicts[4].receipt is not None
    assert other.verdicts[4] == leader.verdicts[4]


def test_ranks_that_choose_different_versions_disagree() -> None:
    world = World(groups={"trainer": GroupShape(world_size=2)})
    leader, other = world.join("trainer/0/0", world_size=2), world.join("trainer/0/1", world_size=2)
    leader.publish(version=3)
    other.publish(version=4)
    world.run()
    assert {sim.verdicts[1].error.kind for sim in (leader, other)} == {"RanksDisagree"}  # type: ignore[union-attr]  # both failed


def test_a_target_that_dies_in_mid_transfer_is_left_out() -> None:
    world = World()
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    second.mute = True
    publish(world, trainer)
    world.run()
    assert not trainer.verdicts
    world.lose(second)
    world.run()
    receipt = trainer.receipt(1)
    assert receipt.lost == ("rollout/1/0",)
    assert [m.name for m in receipt.members] == ["rollout/0/0"]
    assert first.commits == [1]


def test_on_lost_raise_fails_the_publish_and_the_next_one_works() -> None:
    world = World(channel_config(on_lost="raise"))
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    second.mute = True
    publish(world, trainer)
    world.run()
    world.lose(second)
    world.run()
    error = trainer.error(1)
    assert error.kind == "PeersLost"
    assert 'with on_lost = "raise" each target is needed' in error.hint
    assert first.commits == []
    publish(world, trainer)
    world.run()
    assert first.commits == [2]


def test_a_frozen_target_costs_seconds_and_no_eviction() -> None:
    world = World()
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    publish(world, trainer)
    world.advance(5.0, frozen=(second,))
    receipt = trainer.receipt(1)
    assert receipt.lost == ("rollout/1/0",)
    assert second.member in world.state.roster
    world.advance(3.0)
    assert 1 in second.held, "it is caught up when it wakes"
    assert first.commits == second.commits == [1]


@pytest.mark.parametrize("waits", ["nobody", "publisher", "newcomer"])
def test_a_silent_source_is_waited_for_unless_somebody_waits_for_its_end(waits: str) -> None:
    world = World()
    trainer, other = world.join("trainer/0/0"), world.join("trainer/1/0")
    target = world.join("rollout/0/0")
    world.run()
    number = trainer.publish()
    trainer.pack(number)
    world.say_all(trainer)
    if waits == "publisher":
        publish(world, other)
    elif waits == "newcomer":
        world.join("rollout/1/0")
    world.advance(10.0, frozen=(trainer,))
    assert target.commits == ([2] if waits == "publisher" else [])
    assert not world.state.roster.waiting(world.now)
    world.advance(3.0)
    assert (trainer.verdicts[number].receipt is not None) == (waits == "nobody")
    assert target.commits == {"nobody": [1], "publisher": [2], "newcomer": []}[waits]


def test_a_lease_that_runs_out_is_a_loss() -> None:
    world = World(groups={"rollout": GroupShape(heartbeat_timeout_s=10.0)})
    world.join("trainer/0/0")
    target = world.join("rollout/0/0")
    world.advance(11.0, frozen=(target,))
    assert [e.reason for e in world.events if isinstance(e, MemberLost)] == ["lease"]


def test_the_pause_of_the_coordinator_itself_evicts_nobody() -> None:
    world = World()
    target = world.join("rollout/0/0")
    world.now += 90.0
    world.state.roster.skip_pause(90.0, world.now)
    world.state.tick(world.now)
    assert target.member in world.state.roster


def test_the_source_dies_before_anyone_has_it_and_its_number_is_not_used_again() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.mute = True
    publish(world, trainer)
    world.run()
    world.lose(trainer)
    world.run()
    assert target.commits == []
    target.mute = False
    trainer = world.join("trainer/0/0")
    publish(world, trainer)
    world.run()
    assert target.commits == [2]


def moving(world: World, trainer: SimMember) -> None:
    """Everybody is at it; nobody has said yet that it is done."""
    targets = [sim for sim in world.members.values() if sim is not trainer]
    if world.config.transport == "group":
        world.run_to(wire.OperationGo)
        assert all(isinstance(sim.inbox[0], wire.OperationGo) for sim in (trainer, *targets))
        return
    for sim in targets:
        sim.stuck = True
    world.run()
    for sim in targets:
        assert sim.pulling
        sim.stuck = False


def gets_all(world: World, *sims: SimMember) -> None:
    """All bytes come to these; with a process group they say so at once."""
    if world.config.transport == "group":
        world.run(frozen=tuple(sim for sim in world.members.values() if sim not in sims))
    for sim in sims:
        sim.pull_on()
        assert 1 in sim.held


TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "group"])


@TRANSPORTS
def test_what_all_targets_have_whole_is_committed_when_the_source_dies_before_it_is_told(transport: str) -> None:
    world = World(channel_config(transport=transport))
    trainer, *targets = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    publish(world, trainer)
    moving(world, trainer)
    gets_all(world, *targets)
    assert not world.decisions
    world.lose(trainer)
    world.run()
    assert [decision.digest for decision in world.decisions] == ["digest-1"]
    assert [target.commits for target in targets] == [[1], [1]]


@TRANSPORTS
def test_what_one_target_has_whole_goes_on_to_the_others_when_the_source_dies(transport: str) -> None:
    world = World(channel_config(transport=transport))
    trainer, first, second = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    publish(world, trainer)
    moving(world, trainer)
    gets_all(world, first)
    world.lose(trainer)
    world.run()
    assert [decision.digest for decision in world.decisions] == ["digest-1"], "the source had told its digest"
    assert first.commits == second.commits == [1]


@TRANSPORTS
def test_what_no_target_has_whole_is_not_committed_when_the_source_dies(transport: str) -> None:
    world = World(channel_config(transport=transport))
    trainer, first, second = [world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0")]
    publish(world, trainer)
    moving(world, trainer)
    world.lose(trainer)
    world.run()
    assert not world.decisions
    assert first.held == second.held == set()
    again = world.join("trainer/0/0")
    publish(world, again)
    world.run()
    assert [decision.version for decision in world.decisions] == [2]


def test_a_verified_version_is_served_on_by_a_target_when_the_source_is_gone() -> None:
    world = World()
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    second.stuck = True
    publish(world, trainer)
    world.run()
    assert not world.decisions
    world.lose(trainer)
    second.stuck = False
    world.run()
    assert first.commits == second.commits == [1]


def test_a_late_joiner_is_caught_up_from_a_target_and_leaves_the_trainer_alone() -> None:
    world = World()
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run()
    late = world.join("rollout/1/0")
    world.run()
    assert late.held == {1}
    (caught_up,) = [event for event in world.events if isinstance(event, CaughtUp)]
    assert caught_up.pulled == {late.member.name: {first.member.name: 16}}


def test_a_join_waits_for_the_boundary_and_does_not_disturb_the_transfer() -> None:
    world = World()
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0")
    first.mute = True
    publish(world, trainer)
    world.run()
    epoch = world.state.roster.epoch
    late = world.join("rollout/1/0")
    world.run()
    assert world.state.roster.epoch == epoch
    world.lose(first)
    world.run()
    assert late.commits == [1]
    assert late.held == {1}


def test_a_target_without_memory_is_left_behind_and_the_others_go_on() -> None:
    world = World()
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    second.refuse = wire.WireError("NoCapacity", "no memory")
    publish(world, trainer)
    world.run()
    receipt = trainer.receipt(1)
    assert receipt.lost == ("rollout/1/0",)
    assert first.held == {1}
    second.refuse = None
    world.advance(5.0)
    assert second.held == {1}


@pytest.mark.parametrize("says", ["at the offer", "while bytes move", "of its sidecar"])
@pytest.mark.parametrize("targets", [1, 2])
def test_targets_without_memory_are_lost_targets(targets: int, says: str) -> None:
    """As if they had been killed: the trainer goes on."""
    world = World(GROUP if says == "of its sidecar" else None)
    trainer = world.join("trainer/0/0")
    sims = [world.join(f"rollout/{index}/0") for index in range(targets)]
    full = wire.WireError("NoCapacity", "no memory")
    publish(world, trainer)
    for sim in sims:
        sim.refuse, sim.stuck = (full, False) if says == "at the offer" else (None, True)
    world.run()
    for sim in sims if says != "at the offer" else ():
        sim.refuse = full
        if says == "of its sidecar" and sim is sims[0]:  # then all pull, and it has no memory for that, either
            lanes = [message.lane for message in sim.seen if isinstance(message, wire.LaneForm)]
            sim.outbox.append(wire.LaneFailed(lanes[-1], full))
        else:
            sim.outbox.append(wire.TransferFailed(next(iter(sim.pulling)), full))
        world.run()
    receipt = trainer.receipt(1)
    assert receipt.reasons == dict.fromkeys([sim.member.name for sim in sims], "no memory")
    for sim in sims:
        sim.refuse, sim.stuck = None, False
    world.advance(10.0)
    assert [sim.held for sim in sims] == [{1}] * targets


def test_a_version_that_no_target_has_room_for_is_no_commit_before_it_is_packed() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0", machine="a"), world.join("rollout/0/0", machine="b")
    target.refuse = wire.WireError("NoCapacity", "no memory")
    number = trainer.publish()
    world.run()
    trainer.stream(number)
    world.run()
    assert number not in trainer.verdicts
    trainer.fill(number)
    world.run()
    assert trainer.verdicts[number].receipt is not None
    assert world.decisions[0].digest == "digest-1"


@pytest.mark.parametrize("changes", [{"on_lost": "raise"}, {"min_targets": 1}])
def test_where_no_target_may_be_lost_the_error_names_who_has_no_memory(changes: dict[str, object]) -> None:
    world = World(channel_config(**changes))
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.refuse = wire.WireError("NoCapacity", "no memory")
    publish(world, trainer)
    world.run()
    error = trainer.error(1)
    assert (error.kind, error.message, error.members) == ("NoCapacity", "rollout/0/0: no memory", ("rollout/0/0",))


def test_a_wrong_digest_is_never_committed() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.bad_digest = True
    publish(world, trainer)
    world.run()
    assert "digests differ at rollout/0/0" in trainer.error(1).message
    assert world.decisions == []


def test_what_a_failed_lane_has_not_brought_is_pulled() -> None:
    world = World(GROUP)
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run_to(wire.LaneForm)
    lane = next(m.lane for m in target.inbox if isinstance(m, wire.LaneForm))
    target.outbox.append(wire.LaneFailed(lane, wire.WireError("SyncError", "reset by peer")))
    world.run()
    receipt = trainer.receipt(1)
    assert receipt.members == (target.member,)
    assert sum(isinstance(m, wire.LaneForm) for m in target.seen) == 1
    assert [e.reason for e in world.events if isinstance(e, Retried)] == ["failed"]
    assert len(set(world.swept)) == len(world.swept) > 0


def test_a_lane_that_forms_over_a_dead_store_costs_nobody_the_version() -> None:
    world = World(GROUP)
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run_to(wire.LaneForm)
    for _ in range(3):  # no failure of anyone here, however often it happens
        world.state.store_moved(world.now)
        world._collect()
    world.run()
    receipt = trainer.receipt(1)
    assert (receipt.members, receipt.lost) == ((target.member,), ())
    world.advance(REST.after(1))
    for _ in range(2):
        publish(world, trainer)
        world.run()
        world.state.store_moved(world.now)
    assert target.commits == [1, 2, 3]
    assert sum(isinstance(m, wire.LaneForm) for m in target.seen) == 2, "a formed lane needs no store"


def test_a_version_waits_for_min_targets() -> None:
    world = World(channel_config(min_targets=2))
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.advance(5.0)
    assert not trainer.verdicts
    world.join("rollout/1/0")
    world.run()
    assert first.commits == [1]


def test_too_few_targets_until_the_deadline() -> None:
    world = World(channel_config(min_targets=2))
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer, deadline_s=5.0)
    world.advance(6.0)
    error = trainer.error(1)
    assert (error.kind, error.message) == (
        "PeersLost",
        "version 1 is not committed: 1 target replica joined, and min_targets = 2",
    )
    assert error.hint == "start or wait for more target replicas, or lower min_targets"
    assert first.commits == []


def test_min_targets_lost_on_the_way() -> None:
    world = World(channel_config(min_targets=2))
    trainer, first, second = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    second.stuck = True
    publish(world, trainer)
    world.run()
    world.lose(second)
    world.run()
    error = trainer.error(1)
    assert (error.kind, error.phase) == ("PeersLost", "acknowledge")
    assert error.hint == "start or wait for more target replicas, or lower min_targets"
    assert first.commits == []
    assert first.held == set()


def test_a_lost_rank_of_a_source_is_what_the_next_publish_needs() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    first, second = (world.join(f"trainer/0/{rank}", world_size=2) for rank in (0, 1))
    world.run()
    first.publish()
    world.run()
    world.lose(second)
    world.run()
    error = first.error(1)
    assert (error.kind, error.hint) == ("PeersLost", "publish again when this rank has rejoined")


def test_the_deadline_names_who_was_late() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    target.mute = True
    publish(world, trainer, deadline_s=10.0)
    world.advance(11.0)
    error = trainer.error(1)
    assert error.members == ("rollout/0/0",)
    assert (error.kind, error.phase) == ("Busy", "offer")


@pytest.mark.parametrize(
    ("joins", "publishes", "phase", "words"),
    [
        (True, True, "pack", "did not pack it within 5.0 s"),
        (True, False, "begin", "did not call publish within 5.0 s"),
        (False, False, "begin", "did not join within 5.0 s"),
    ],
)
def test_a_rank_that_never_packs_ends_by_the_deadline(joins: bool, publishes: bool, phase: str, words: str) -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    first = world.join("trainer/0/0", world_size=2)
    second = world.join("trainer/0/1", world_size=2) if joins else None
    if second is not None and publishes:
        second.publish(deadline_s=5.0)
    publish(world, first, deadline_s=5.0)
    world.advance(6.0)
    error = first.error(1)
    assert (error.kind, error.phase, error.members) == ("DeadlineExceeded", phase, ("trainer/0/1",))
    assert error.message == f"version 1: trainer/0/1 {words}"
    assert ("every rank of the source" in (error.hint or "")) == (not publishes)


def test_tensors_that_do_not_fit_the_manifest_are_refused_unless_asked_for() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    publish(world, trainer)
    world.run()
    other = PartManifest(tensors=(TensorSpec("weight", "float32", (5,)),), aliases=(), pieces=None)
    number = trainer.publish()
    trainer.pack(number, manifest=other)
    world.run()
    error = trainer.error(number)
    assert (error.kind, error.message) == (
        "ManifestMismatch",
        "the tensors of version 2 do not fit the manifest of channel 'policy': 'weight' was float32[4], is float32[5]",
    )


def test_parts_of_all_ranks_make_one_version() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    target = world.join("rollout/0/0")
    spec = TensorSpec("weight", "float32", (4,))
    for rank, sim in enumerate(ranks):
        part = PartManifest((spec,), (), (Piece(0, (2 * rank,), (2,), 0),))
        sim.pack(sim.publish(), manifest=part)
    world.run()
    assert target.held == {1}
    assert all(sim.verdicts[1].receipt is not None for sim in ranks)
    late = world.join("rollout/1/0")
    world.run()
    assert late.held == {1}


def test_ranks_of_a_replica_load_the_same_versions_in_lockstep() -> None:
    world = World(groups={"rollout": GroupShape(world_size=2)})
    trainer = world.join("trainer/0/0")
    ranks = [world.join(f"rollout/0/{rank}", world_size=2) for rank in range(2)]
    publish(world, trainer)
    world.run()
    ranks[0].ask()
    world.run()
    publish(world, trainer)
    world.run()
    ranks[0].ask()
    world.run()
    assert ranks[0].granted == [1], "the second round waits until both ranks have loaded the first"
    ranks[1].ask()
    world.run()
    assert ranks[1].granted == [1]
    ranks[1].ask()
    world.run()
    assert ranks[0].granted == ranks[1].granted == [1, 2]
    assert [e.version for e in world.events if isinstance(e, ReplicaLoaded)] == [1, 0, 2]


def test_a_round_waits_for_all_ranks_to_join() -> None:
    world = World(groups={"rollout": GroupShape(world_size=2)})
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0", world_size=2)
    publish(world, trainer)
    first.ask()
    world.run()
    assert first.granted == []
    second = world.join("rollout/0/1", world_size=2)
    second.ask()
    world.run()
    assert first.granted == second.granted == [1]


def test_a_failed_load_makes_the_replica_partial_until_it_loads_again() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    target.ask()
    world.run()
    world.state.receive(target.member, wire.LoadFailed(1, wire.WireError("InternalError", "boom")), world.now)
    assert world.state.load_rounds.of("rollout", 0).partial
    publish(world, trainer)
    target.ask()
    world.run()
    assert target.granted == [1, 2]
    assert not world.state.load_rounds.of("rollout", 0).partial


def refusing_world() -> tuple[World, SimMember, SimMember, SimMember]:
    """A trainer, and two targets of which the second looks at what it is granted."""
    world = World()
    trainer, other, target = world.join("trainer/0/0"), world.join("rollout/0/0"), world.join("rollout/1/0")
    target.loads = False
    publish(world, trainer)
    for member in (other, target):
        member.ask()
    world.run()
    target.look()
    publish(world, trainer)
    for member in (other, target):
        member.ask()
    world.run()
    return world, trainer, other, target


def test_a_replica_that_refuses_a_version_keeps_its_own_and_takes_the_next() -> None:
    world, trainer, other, target = refusing_world()
    target.keep_own("no weights for b")
    target.ask()
    world.run()
    round_ = world.state.load_rounds.of("rollout", 1)
    assert (round_.loaded, round_.partial, round_.failure) == (1, False, "version 2 was not loaded: no weights for b")
    assert target.granted == [1], "it is not offered the same one again"
    assert LoadFailed("policy", "rollout", 1, 2, "no weights for b", kept=True) in world.events
    publish(world, trainer)
    world.run()
    target.look()
    other.ask()
    world.run()
    assert target.granted == [1, 3]
    assert (round_.loaded, round_.failure) == (3, "")


def test_a_watch_of_a_refused_version_ends_with_the_reason_once_all_others_have_loaded_it() -> None:
    world, trainer, other, target = refusing_world()
    other.granted.clear()
    world.state.receive(other.member, wire.LoadFailed(2, wire.WireError("SyncError", "half")), world.now)
    target.keep_own("no weights for b")
    trainer.outbox.append(wire.WatchLoaded(7, 2))
    world.run()
    assert not [m for m in trainer.seen if isinstance(m, wire.WatchEnd)]
    other.ask()
    world.run()
    (end,) = [m for m in trainer.seen if isinstance(m, wire.WatchEnd)]
    assert (end.watch, end.version) == (7, 2)
    assert end.failed == {"rollout/1": "version 2 was not loaded: no weights for b"}


def test_the_next_receipt_says_which_replicas_failed_to_load_and_why() -> None:
    world, trainer, other, target = refusing_world()
    target.keep_own("no weights for b")
    world.state.receive(other.member, wire.LoadFailed(2, wire.WireError("SyncError", "half")), world.now)
    receipts = []
    for _ in range(2):
        publish(world, trainer)
        world.run()
        receipts.append(trainer.verdicts[trainer.publishes].receipt)
    found = [receipt.not_loaded for receipt in receipts if receipt is not None]
    assert found == [{"rollout/0": "version 2: half", "rollout/1": "version 2: no weights for b"}, {}]


def test_long_reasons_of_many_replicas_fit_into_a_receipt_and_into_the_end_of_a_watch() -> None:
    """Every rank of the source gets them, and is lost if it leaves too much unread."""
    world, count = World(), 100
    trainer, *targets = [world.join("trainer/0/0"), *(world.join(f"rollout/{one}/0") for one in range(count))]
    publish(world, trainer)
    for member in targets:
        member.loads = False
        member.ask()
    trainer.outbox.append(wire.WatchLoaded(7, 1))
    world.run()
    for member in targets:
        member.keep_own("é" * TEXT_LENGTH)
    world.run()
    publish(world, trainer)
    world.run()
    (end,) = [m for m in trainer.seen if isinstance(m, wire.WatchEnd)]
    receipt = trainer.receipt(2)
    for texts in (end.failed, receipt.not_loaded):
        assert texts.keys() == {f"rollout/{one}" for one in range(count)}, "they are counted"
        assert sum("éé" in text for text in texts.values()) == REASONS_MAX
        assert sum(map(len, texts.values())) < 2 * REASONS_MAX * REASON_LENGTH


def test_the_reason_of_a_target_that_is_left_behind_is_cut() -> None:
    world = World()
    trainer, target, _ = (world.join(name) for name in ("trainer/0/0", "rollout/0/0", "rollout/1/0"))
    target.refuse = wire.WireError("SyncError", "é" * TEXT_LENGTH)
    publish(world, trainer)
    world.run()
    receipt = trainer.receipt(1)
    assert receipt.lost == ("rollout/0/0",)
    (state,) = world.state.roster.states([target.member])
    for text in (receipt.reasons["rollout/0/0"], state.note):
        assert "éé" in text
        assert len(text) < 2 * REASON_LENGTH


def test_watching_for_loads() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    trainer.outbox.append(wire.WatchLoaded(7, 1))
    world.run()
    assert not [m for m in trainer.seen if isinstance(m, wire.WatchEnd)]
    target.ask()
    world.run()
    assert [(m.watch, m.version) for m in trainer.seen if isinstance(m, wire.WatchEnd)] == [(7, 1)]


def test_a_member_has_one_watch_and_it_goes_with_it() -> None:
    """It may poll, or be mad: that costs the others nothing."""
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    for number in range(1, 1001):
        trainer.outbox.append(wire.WatchLoaded(number, 1 + number % 2))
    world.run()
    publish(world, trainer)
    target.ask()
    world.run()
    assert [(m.watch, m.version) for m in trainer.seen if isinstance(m, wire.WatchEnd)] == [(1000, 1)]
    trainer.outbox.append(wire.WatchLoaded(1001, 2))
    world.run()
    assert len(world.state.watches) == 1
    world.lose(trainer)
    assert not world.state.watches


def test_what_was_loaded_by_all_stays_loaded_when_they_have_left() -> None:
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    target.ask()
    world.run()
    world.lose(target, "left")
    trainer.outbox.append(wire.WatchLoaded(7, 1))
    world.run()
    assert [m.watch for m in trainer.seen if isinstance(m, wire.WatchEnd)] == [7]


def test_a_second_join_fences_the_first() -> None:
    world = World()
    first = world.join("rollout/0/0")
    second = world.join("rollout/0/0")
    assert first.member not in world.state.roster
    assert second.member in world.state.roster


def test_a_group_without_a_part_in_the_channel_may_only_observe() -> None:
    world = World()
    with pytest.raises(errors.UnknownChannel, match=r'group "router" has no part in channel "policy"'):
        world.join("router/0/0")
    observer = world.join("router/0/0", observe=True)
    trainer = world.join("trainer/0/0")
    publish(world, trainer)
    world.run()
    assert observer.commits == [1]
    assert not observer.held
    world.lose(observer, "lease")
    world.lose(trainer, "lease")
    assert [one.observes for one in world.events if isinstance(one, MemberLost)] == [True, False]


def test_an_observer_takes_nobodys_place_and_its_world_is_not_asked_about() -> None:
    """It may be in a replica of several ranks, or say nothing of itself."""
    world = World()
    ranks = [world.join(f"rollout/0/{rank}", world_size=2) for rank in range(2)]
    world.lose(ranks[1], "left")
    observers = [
        world.join("rollout/0/0", observe=True),
        world.join("rollout/0/1", observe=True),
        world.join("rollout/0/7", observe=True),
        world.join("rollout/0/7", observe=True),
    ]
    world.run()
    assert all(one.member in world.state.roster for one in (ranks[0], *observers))
    assert 1 in world.state.roster.history.left["rollout", 0], "that rank has left, whoever looks on"
    with pytest.raises(errors.UsageError, match="replica must be 0 or more"):
        world.join("rollout/-1/0", observe=True)


def test_only_sources_publish() -> None:
    world = World()
    target = world.join("rollout/0/0")
    target.publish()
    world.run()
    assert target.error(1).kind == "UsageError"


def test_a_process_that_cannot_work_with_the_others_is_refused_at_the_door() -> None:
    world = World()
    trainer, target = (
        world.join("trainer/0/0", torch_version="2.13.0"),
        world.join("rollout/0/0", torch_version="2.13.1"),
    )
    with pytest.raises(errors.Preflight, match=r"rollout/1/0 .*2\.11.*trainer/0/0"):
        world.join("rollout/1/0", torch_version="2.11.0")
    publish(world, trainer)
    world.run()
    assert trainer.verdicts[1].receipt is not None
    assert target.held == {1}


def test_a_catch_up_that_is_slower_than_the_publishing_ends() -> None:
    world = World()
    trainer, first = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run()
    slow = world.join("rollout/1/0")
    slow.stuck = True  # in its catch-up: gets ready, and no byte moves
    world.run()
    running = world.state.commits.catch_ups[0].transfer
    assert running is not None
    slow.stuck = False
    publish(world, trainer)
    world.run()
    assert slow.held == {2}
    assert running.state == "complete"
    slow.ask()
    world.run()
    assert slow.granted == [2]
    assert not any(sim.serving for sim in world.members.values())
    assert first.held == {1, 2}


def test_nothing_follows_from_what_is_said_of_a_member_that_is_gone() -> None:
    """Its connection and its last messages end in any order."""
    world = World()
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    world.run()
    world.lose(target)
    world.run()
    state, seen = world.state, len(trainer.seen)
    state.receive(target.member, wire.ReceiveAsk(1, 0, 0), world.now)
    state.roster.disconnected(target.member, world.now)
    state.roster.connected(target.member, world.now)
    state.lose(target.member, "lease", world.now)
    world._collect()
    world.run()
    assert len(trainer.seen) == seen
    assert [event.reason for event in world.events if isinstance(event, MemberLost)] == ["exited"]


def test_a_member_of_before_that_comes_after_its_successor_is_fenced() -> None:
    world = World()
    first = world.join("rollout/0/0")
    world.run()
    world.restart()
    second = world.join("rollout/0/0")
    with pytest.raises(errors.Fenced, match="while this one was disconnected") as caught:
        world.rejoin(first)
    assert caught.value.hint == "join again"
    assert second.member in world.state.roster


def test_only_a_member_whose_identity_is_taken_hears_that_it_was_replaced() -> None:
    """An observer holds no identity: who has its name is another member."""
    world = World()
    observer, member = world.join("rollout/0/0", observe=True), world.join("rollout/0/0")
    world.run()
    other = msgspec.structs.replace(member.hello, process=ProcessIdentity(2, 2, "boot", 2))
    told = [world.state.roster.fenced_error(hello).message for hello in (observer.hello, member.hello, other)]
    lost, again, replaced = told
    assert lost.startswith("rollout/0/0 was declared lost")
    assert again == "this process joined again as rollout/0/0"
    assert replaced.startswith("another process joined as rollout/0/0")


def test_in_a_large_channel_members_are_told_who_came_and_went_and_newcomers_all() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    targets = [world.join(f"rollout/{index}/0") for index in range(WHOLE_VIEW + 4)]
    world.advance(1.0)
    world.lose(targets[0])
    late = world.join("rollout/99/0")
    world.advance(1.0)
    views = [message for message in trainer.seen if isinstance(message, wire.View)]
    known = set(views[0].members)
    for before, view in pairwise(views):
        if view.since:
            assert view.since == before.epoch
            known = (known | set(view.members)) - set(view.left)
        else:
            known = set(view.members)
    assert known == {state.member for state in world.state.roster.live}
    assert views[-1].since > 0
    assert len(views[-1].members) + len(views[-1].left) <= 2
    [first, *_] = [message for message in late.seen if isinstance(message, wire.View)]
    assert (first.since, late.member in first.members or len(first.members) > WHOLE_VIEW) == (0, True)


def test_views_of_joins_in_a_row_are_sent_together() -> None:
    world = World()
    trainer = world.join("trainer/0/0")
    world.run()
    for index in range(100):
        world.join(f"rollout/{index}/0")
    world.run()
    views = sum(isinstance(message, wire.View) for message in trainer.seen)
    assert views < 90
    assert len(world.state.roster.live) == 101
    world.advance(1.0)
    assert trainer.epoch == world.state.roster.epoch


def test_the_transport_that_the_config_names_is_taken() -> None:
    for backend in ("gloo", "nccl"):
        world = World(channel_config(transport="group", backend=backend))
        trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
        publish(world, trainer)
        world.run()
        assert [m.group.backend for m in target.seen if isinstance(m, wire.LaneForm)] == [backend]


def test_a_kept_lane_that_fails_between_two_versions_is_formed_anew() -> None:
    world = World(GROUP)
    trainer, target = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run()
    [lane] = [m.lane for m in target.seen if isinstance(m, wire.LaneForm)]
    trainer.outbox.append(wire.LaneFailed(lane, wire.WireError("SyncError", "its sidecar ended")))
    world.run()
    assert wire.LaneDrop(lane) in target.seen
    assert len(world.state.lanes) == 0
    publish(world, trainer)
    world.run()
    assert target.commits == [1, 2]
    assert len([m for m in target.seen if isinstance(m, wire.LaneForm)]) == 2


def test_a_rank_without_bytes_is_not_waited_for() -> None:
    world = World(channel_config(targets=(ChannelRole("rollout", "leader"),)))
    trainer, leader, other = world.join("trainer/0/0"), *(world.join(f"rollout/0/{r}", world_size=2) for r in range(2))
    publish(world, trainer)
    world.run()
    other.outbox.append(wire.Loaded(1, 0.1))
    other.outbox.append(wire.LoadFailed(1, wire.WireError("SyncError", "it has none")))
    leader.ask()
    world.run()
    assert (leader.granted, other.held) == ([1], set())
    assert world.state.load_rounds.of("rollout", 0).loaded == 1
    again = world.state.load_rounds.of("rollout", 0)
    leader.outbox.append(wire.Loaded(1, 0.1))  # once more
    world.run()
    assert (again.state, again.loaded) == ("loaded", 1)


def test_parts_of_a_rank_that_dies_while_they_move_end_the_publish() -> None:
    world = World(channel_config(sources=(ChannelRole("trainer", "all"),)), {"trainer": GroupShape(world_size=2)})
    ranks = [world.join(f"trainer/0/{rank}", world_size=2) for rank in range(2)]
    target = world.join("rollout/0/0")
    target.stuck = True
    spec = TensorSpec("weight", "float32", (4,))
    for number, rank in enumerate(ranks):
        rank.pack(rank.publish(), manifest=PartManifest((spec,), (), (Piece(0, (2 * number,), (2,), 0),)))
    world.run()
    assert world.state.commits.main is not None
    world.lose(ranks[1])
    target.stuck = False
    world.run()
    error = ranks[0].error(1)
    assert error.kind == "PeersLost"
    assert error.members == ("trainer/0/1",)
    assert world.decisions == []


class Odd(SimMember):
    """One that gives a version, and finds that it is not there any more, or not what it
    was."""

    odd = False

    def _answer(self, message: wire.FromCoordinator) -> None:
        if self.odd and isinstance(message, wire.TransferOffer) and message.role == "serve":
            error = wire.WireError("Gone", "its memory is gone")
            self.outbox.append(wire.TransferFailed(message.transfer, error))
        elif self.odd and isinstance(message, wire.OperationGo):
            self.outbox.append(wire.OperationDone(message.operation))
            self.outbox.append(wire.TransferDone(message.transfer, "another", 0.1, 0.01))
        else:
            super()._answer(message)


def test_a_holder_that_cannot_give_the_version_any_more_gives_way_to_another_one() -> None:
    """It counts as one without the version, and gets it again."""
    world = World()
    world.member_type = Odd
    trainer, holder = world.join("trainer/0/0"), world.join("rollout/0/0")
    publish(world, trainer)
    world.run()
    assert isinstance(holder, Odd)
    holder.odd = True
    late = world.join("rollout/1/0")
    while late.held != {1}:
        world.advance(0.5)
    holder.odd = False
    world.advance(10.0)
    assert late.held == {1}
    assert sum(version == 1 for version in holder.received) == 2
    assert {state.member for state in world.state.roster.holders.of(1)} == {trainer.member, holder.member, late.member}


def test_a_publisher_that_broadcasts_what_its_version_is_not_gives_way_to_who_has_copied_it() -> None:
    world = World(channel_config(staging="device"))
    world.member_type = Odd
    trainer, near = (world.join(name, machine="a", cuda_devices=("GPU-0",)) for name in ("trainer/0/0", "rollout/0/0"))
    far = world.join("rollout/1/0", machine="a", cuda_devices=("GPU-1",))
    world.run()
    for sim in (trainer, far):
        assert isinstance(sim, Odd)
        sim.odd = True
    publish(world, trainer)
    world.run()
    receipt = trainer.receipt(1)
    assert (receipt.members, receipt.digest) == ((near.member, far.member), "digest-1")
    pulls = [pull for m in far.seen if isinstance(m, wire.TransferOffer) for pull in m.pulls]
    assert [holder.name for pull in pulls for holder in pull.holders] == ["rollout/0/0"]
    assert {state.member for state in world.state.roster.holders.of(1)} == {near.member, far.member}


def test_only_those_who_were_not_heard_are_pardoned_for_the_silence() -> None:
    world = World()
    silent, heard = world.join("rollout/0/0"), world.join("rollout/1/0")
    world.state.roster.extend_leases({silent.member}, 5.0, world.now + 5.0)
    seen = [state.last_seen - world.now for state in world.state.roster.states([silent.member, heard.member])]
    assert seen == [5.0, 0.0]

"""Histories of operations that lose members, lanes or their coordinator: who gets which
verdict, and what is left behind.

Covers: core/operations/operation.py, core/operations/running.py.
"""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.base.effects import OperationEnded
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import SimMember, World, peer_config


def peers(count: int, **changes: object) -> tuple[World, list[SimMember]]:
    world = World(peer_config(**changes), {"peer": GroupShape(replicas=count)})  # type: ignore[arg-type]  # by name
    return world, [world.join(f"peer/{replica}/0") for replica in range(count)]


def verdict(sim: SimMember, post: int) -> str:
    end = sim.ends[post]
    return "ok" if end.error is None else end.error.kind


def receipt(sim: SimMember, post: int) -> wire.ReceiptData:
    found = sim.ends[post].receipt
    assert found is not None, sim.ends[post].error
    return found


def started(
    world: World, sims: list[SimMember], *, stuck: list[SimMember], kind: str = "all_reduce", **more: object
) -> None:
    """Post one operation everywhere; it hangs in ``stuck``."""
    for sim in stuck:
        sim.stuck = True
    for sim in sims:
        sim.post(kind, **more)  # type: ignore[arg-type]  # by name
    world.run()


# ---------------------------------------------------------------- losses


def test_survivors_run_it_again_from_what_was_posted() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]])
    assert not sims[0].ends
    before = sims[0].epoch
    world.lose(sims[1])
    world.run()
    first, again = sims[0].goes
    assert (first.attempt, again.attempt) == (1, 2)
    assert first.ref == again.ref
    assert first.operation != again.operation
    assert first.lane != again.lane
    assert (again.places, again.lane_ranks) == ((0, 2), (0, 1))
    found = receipt(sims[0], 1)
    assert found == receipt(sims[2], 1)
    assert [member.name for member in found.members] == ["peer/0/0", "peer/2/0"]
    assert found.lost == ("peer/1/0",)
    assert found.reasons == {"peer/1/0": "its process ended"}
    assert found.epoch > before
    assert set(found.phases) == {"wait", "form", "run", "retry"}
    assert found.seconds == pytest.approx(sum(found.phases.values()))


def test_with_on_lost_raise_everyone_hears_of_the_loss() -> None:
    world, sims = peers(3, on_lost="raise")
    started(world, sims, stuck=[sims[1]])
    world.lose(sims[1])
    world.run()
    for sim in (sims[0], sims[2]):
        error = sim.ends[1].error
        assert error is not None
        assert (error.kind, error.phase, error.members) == ("PeersLost", "transfer", ("peer/1/0",))


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather"])
def test_without_its_root_it_cannot_end(kind: str) -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]], kind=kind, root="peer/1")
    world.lose(sims[1])
    world.run()
    assert verdict(sims[0], 1) == verdict(sims[2], 1) == "PeersLost"
    for sim in (sims[0], sims[2]):
        sim.post("barrier")
    world.run()
    assert verdict(sims[0], 2) == verdict(sims[2], 2) == "ok"


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather"])
def test_without_another_member_the_root_is_found_again(kind: str) -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[0]], kind=kind, root="peer/1")
    world.lose(sims[0])
    world.run()
    assert [go.root for go in sims[1].goes] == [1, 0]
    assert verdict(sims[1], 1) == verdict(sims[2], 1) == "ok"


def test_one_that_had_said_done_is_not_needed_any_more() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[2]])
    world.lose(sims[0])
    world.run()
    assert not sims[1].ends
    assert len(sims[1].goes) == 1
    sims[2].outbox.append(wire.OperationDone(sims[2].goes[0].operation))
    world.run()
    assert [m.name for m in receipt(sims[1], 1).members] == ["peer/0/0", "peer/1/0", "peer/2/0"]
    assert verdict(sims[2], 1) == "ok"


def test_one_that_had_said_done_is_left_out_of_another_attempt() -> None:
    world, sims = peers(4)
    started(world, sims, stuck=[sims[2], sims[3]])
    world.lose(sims[0])
    world.run()
    sims[2].stuck = False
    world.lose(sims[3], "lease")
    world.run()
    found = receipt(sims[1], 1)
    assert found == receipt(sims[2], 1)
    assert [m.name for m in found.members] == ["peer/1/0", "peer/2/0"]
    assert found.reasons == {"peer/0/0": "its process ended", "peer/3/0": "no heartbeat came within heartbeat_timeout"}
    assert sims[1].goes[-1].places == (1, 2)


def test_losses_one_after_another_leave_the_last_one_alone() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=sims)
    world.lose(sims[0])
    world.run()
    sims[2].stuck = False
    world.lose(sims[1])
    world.run()
    assert [m.name for m in receipt(sims[2], 1).members] == ["peer/2/0"]


def test_a_death_while_the_lane_forms() -> None:
    world, sims = peers(3)
    sims[0].mute = True
    for sim in sims:
        sim.post("all_reduce")
    world.run()
    assert not sims[1].goes
    world.lose(sims[0])
    world.run()
    assert [m.name for m in receipt(sims[1], 1).members] == ["peer/1/0", "peer/2/0"]
    assert sims[1].goes[0].attempt == 1
    assert sims[1].goes[0].places == (1, 2)


def test_a_pair_ends_and_its_neighbours_in_the_lane_begin_again() -> None:
    world, sims = peers(4)
    for sim in sims:
        sim.post("barrier")
    world.run()
    sims[1].post("recv", root="peer/0", segments=())
    sims[3].post("recv", root="peer/2", segments=())
    sims[1].stuck = sims[3].stuck = True
    sims[0].stuck = True
    sims[0].post("send", root="peer/1")
    sims[2].post("send", root="peer/3")
    world.run()
    world.lose(sims[0])
    sims[3].stuck = False
    world.run()
    error = sims[1].ends[2].error
    assert error is not None
    assert (error.kind, error.members) == ("PeersLost", ("peer/0/0",))
    assert verdict(sims[2], 2) == verdict(sims[3], 2) == "ok"
    assert [(go.attempt, len(go.lane_ranks)) for go in sims[3].goes] == [(1, 4), (1, 2), (2, 2)]
    first, second = (go.lane for go in sims[3].goes[:2])
    assert first == second, "a pair uses the lane of all that has formed"


def test_segments_of_the_lost_fall_away() -> None:
    world, sims = peers(3)
    three = tuple(wire.Segment("float32", (size,)) for size in (1, 2, 3))
    started(world, sims, stuck=[sims[1]], kind="reduce_scatter", segments=three)
    world.lose(sims[1])
    world.run()
    assert sims[0].goes[-1].places == (0, 2)
    assert verdict(sims[2], 1) == "ok"
    # Lost before it began, but after the root had called: the same.
    sims[0].post("scatter", root="peer/0", segments=three[:2])
    world.run()
    world.lose(sims[2])
    world.run()
    assert verdict(sims[0], 2) == "ok"
    assert list(sims[0].goes[-1].places) == [0]


# ---------------------------------------------------------------- silence


def test_the_others_go_on_without_a_frozen_member() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]])
    world.advance(5.0, frozen=(sims[1],))
    found = receipt(sims[0], 1)
    assert found.lost == ("peer/1/0",)
    assert found.reasons["peer/1/0"].startswith("silent for ")
    for sim in (sims[0], sims[2]):
        sim.post("all_reduce")
    world.run(frozen=(sims[1],))
    assert verdict(sims[0], 2) == "ok", "the next one does not wait for it either"
    assert sims[1].member in world.state.roster, "it stays a member"

    sims[1].stuck = False
    sims[1].outbox.append(wire.OperationDone(sims[1].goes[0].operation))  # it wakes
    sims[1].post("all_reduce")
    world.advance(1.0)
    assert verdict(sims[1], 1) == "Gone"
    assert verdict(sims[1], 2) == "Gone", "it called this one before it could know what it had missed"
    for sim in sims:
        sim.post("barrier")
    world.run()
    assert [verdict(sim, 3) for sim in sims] == ["ok"] * 3
    assert len(receipt(sims[0], 3).members) == 3


@pytest.mark.parametrize(("changes", "found"), [({}, "ok"), ({"on_lost": "raise"}, "")])
def test_the_others_do_not_wait_for_the_call_of_one_that_cannot_be_heard(
    changes: dict[str, object], found: str
) -> None:
    world, sims = peers(3, **changes)
    world.advance(5.0, frozen=(sims[1],))
    sims[0].post("all_reduce")
    world.advance(1.0, frozen=(sims[1],))
    assert not sims[0].ends, "it waits for one that can be heard"
    sims[2].post("all_reduce")
    world.advance(1.0, frozen=(sims[1],))
    assert {verdict(sim, 1) if sim.ends else "" for sim in (sims[0], sims[2])} == {found}
    if found:
        assert [member.name for member in receipt(sims[0], 1).members] == ["peer/0/0", "peer/2/0"]
        sims[1].post("all_reduce")
        world.advance(1.0)
        assert verdict(sims[1], 1) == "Gone"


def test_a_root_that_cannot_be_heard_is_waited_for_before_it_has_called() -> None:
    world, sims = peers(3)
    for sim in (sims[0], sims[2]):
        sim.post("broadcast", root="peer/1")
    world.advance(8.0, frozen=(sims[1],))
    assert not sims[0].ends
    sims[1].post("broadcast", root="peer/1")
    world.advance(1.0)
    assert [verdict(sim, 1) for sim in sims] == ["ok"] * 3


def test_what_a_frozen_member_had_posted_ahead_is_not_paired_with_later_calls() -> None:
    world, sims = peers(3)
    sims[1].post("all_reduce", shape=(2,))
    sims[1].post("all_reduce", shape=(3,))
    sims[1].stuck = True
    for sim in (sims[0], sims[2]):
        sim.post("all_reduce", shape=(2,))
    world.run()
    world.advance(5.0, frozen=(sims[1],))
    assert verdict(sims[0], 1) == "ok"
    for sim in (sims[0], sims[2]):
        sim.post("all_reduce", shape=(3,))
    world.run(frozen=(sims[1],))
    sims[1].stuck = False
    world.advance(1.0)
    assert [verdict(sims[1], post) for post in (1, 2)] == ["Gone", "Gone"]
    for sim in sims:
        sim.post("all_reduce", shape=(4,))
    world.run()
    assert [verdict(sim, 3) for sim in sims] == ["ok"] * 3


def test_tags_say_by_themselves_what_was_missed() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]], step=1)
    world.advance(5.0, frozen=(sims[1],))
    for sim in (sims[0], sims[2]):
        sim.post("all_reduce", step=2)
    world.run(frozen=(sims[1],))
    sims[1].stuck = False
    world.advance(1.0)
    for sim in sims:
        sim.post("all_reduce", step=3)
    world.run()
    assert verdict(sims[1], 2) == verdict(sims[0], 3) == "ok"


def test_a_frozen_root_is_waited_for() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]], kind="broadcast", root="peer/1")
    world.advance(8.0, frozen=(sims[1],))
    assert not sims[0].ends
    sims[1].outbox.append(wire.OperationDone(sims[1].goes[0].operation))
    world.run()
    assert [verdict(sim, 1) for sim in sims] == ["ok"] * 3


def test_with_on_lost_raise_nobody_is_left_behind() -> None:
    world, sims = peers(2, on_lost="raise")
    started(world, sims, stuck=[sims[1]])
    world.advance(8.0, frozen=(sims[1],))
    assert not sims[0].ends


def test_when_nobody_can_be_heard_nobody_is_left_behind() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=sims)
    world.advance(8.0, heartbeats=False)
    assert not any(sim.ends for sim in sims)


def test_a_pair_does_not_wait_for_a_frozen_third_one_to_form_its_lane() -> None:
    world, sims = peers(3)
    frozen = (sims[2],)
    sims[0].post("send", root="peer/1")
    sims[1].post("recv", root="peer/0", segments=())
    world.run(frozen)
    assert verdict(sims[0], 1) == verdict(sims[1], 1) == "ok"


# -------------------------------------------------------- failures with everybody alive


def broken_pipe(phase: str = "transfer") -> wire.WireError:
    return wire.WireError("SyncError", "connection reset by peer", phase=phase)


def test_a_failure_is_tried_again_once_in_a_new_lane() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[sims[1]])
    sims[1].stuck = False
    sims[1].outbox.append(wire.OperationFailed(sims[1].goes[0].operation, broken_pipe()))
    sims[1].outbox.append(wire.LaneFailed(sims[1].goes[0].lane, broken_pipe()))
    world.run()
    assert [verdict(sim, 1) for sim in sims] == ["ok", "ok"]
    assert [go.attempt for go in sims[0].goes] == [1, 2]
    assert receipt(sims[0], 1).lost == ()
    assert world.tally.retries == {"outer": {"failed": 1}}


def test_a_second_failure_ends_it_for_all() -> None:
    world, sims = peers(2)
    sims[1].breaks = True
    posts = [sim.post("all_reduce") for sim in sims]
    world.run()
    (ended,) = [event for event in world.events if isinstance(event, OperationEnded)]
    for sim, post in zip(sims, posts, strict=True):
        error = sim.ends[post].error
        assert error is not None
        assert (error.kind, error.phase, error.members) == ("SyncError", "transfer", ("peer/0/0", "peer/1/0"))
        assert error.message.endswith("failed twice, though all its members live: connection reset")
        assert (ended.outcome, ended.error) == ("SyncError", error.message)
    sims[1].breaks = False
    posts = [sim.post("all_reduce") for sim in sims]
    world.run()
    assert [verdict(sim, post) for sim, post in zip(sims, posts, strict=True)] == ["ok", "ok"]


def test_who_failed_and_then_died_is_not_held_against_the_others() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=sims)
    sims[2].outbox.append(wire.OperationFailed(sims[2].goes[-1].operation, broken_pipe()))
    world.run()
    world.lose(sims[2])
    world.run()
    sims[0].stuck = sims[1].stuck = False
    sims[1].outbox.append(wire.OperationFailed(sims[1].goes[-1].operation, broken_pipe()))
    world.run()
    assert [go.attempt for go in sims[1].goes] == [1, 2, 3, 4]
    assert receipt(sims[0], 1) == receipt(sims[1], 1)
    assert receipt(sims[0], 1).lost == ("peer/2/0",)


@pytest.mark.parametrize("kind", ["UsageError", "NoCapacity", "Preflight"])
def test_a_refusal_is_the_verdict_of_all(kind: str) -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[sims[1]])
    sims[1].stuck = False
    refusal = wire.WireError(kind, "it does not fit", phase="transfer")
    sims[1].outbox.append(wire.OperationFailed(sims[1].goes[0].operation, refusal))
    world.run()
    assert [verdict(sim, 1) for sim in sims] == [kind] * 3
    for sim in sims:
        sim.post("barrier")
    world.run()
    assert [verdict(sim, 2) for sim in sims] == ["ok"] * 3


def test_a_lane_that_cannot_form_is_tried_again_once() -> None:
    world, sims = peers(2)
    sims[1].mute = True
    for sim in sims:
        sim.post("all_reduce")
    for _ in range(2):
        world.advance(0.5)
        lane = next(m.lane for m in reversed(sims[1].seen) if isinstance(m, wire.LaneForm))
        sims[1].outbox.append(wire.LaneFailed(lane, broken_pipe("form")))
    world.run()
    error = sims[0].ends[1].error
    assert error is not None
    assert (error.kind, error.phase) == ("SyncError", "form")


def test_a_lane_that_does_not_form_in_time_is_tried_until_the_deadline() -> None:
    world, sims = peers(2)
    sims[1].mute = True
    for sim in sims:
        sim.post("all_reduce", deadline_s=60.0)
    world.advance(45.0)
    assert not sims[0].ends
    assert world.tally.retries["outer"]["failed"] > 1
    sims[1].mute = False
    world.advance(20.0)
    assert [verdict(sim, 1) for sim in sims] == ["ok"] * 2


def test_a_failure_at_the_end_of_the_deadline_says_so() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[sims[1]], deadline_s=5.0)
    world.now += 4.9
    for sim in sims:
        world.state.roster.note_heard(sim.member, world.now)
    sims[1].outbox.append(wire.OperationFailed(sims[1].goes[0].operation, broken_pipe()))
    world.run()
    assert [verdict(sim, 1) for sim in sims] == ["DeadlineExceeded"] * 2
    assert sims[0].ends[1].error is not None
    assert sims[0].ends[1].error.message.endswith("connection reset by peer")


def test_the_deadline_names_the_phase_and_who_has_not_answered() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[sims[1]], deadline_s=3.0)
    world.advance(4.0)
    error = sims[0].ends[1].error
    assert error is not None
    assert (error.kind, error.phase, error.members) == ("DeadlineExceeded", "transfer", ("peer/1/0",))
    sims[1].mute = True
    for sim in sims:
        sim.post("all_reduce", deadline_s=3.0)
    world.advance(4.0)
    error = sims[0].ends[2].error
    assert error is not None
    assert (error.kind, error.phase, error.members) == ("DeadlineExceeded", "form", ("peer/1/0",))


# ---------------------------------------------------------------- unknown outcomes


def end_of_term(world: World, sims: list[SimMember]) -> None:
    """The coordinator is replaced, and everyone comes back to the new one."""
    world.restart()
    for sim in sims:
        world.rejoin(sim)
    world.advance(7.0)


@pytest.mark.parametrize("told", [True, False])
def test_a_new_coordinator_asks_those_who_know(told: bool) -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[])
    ref = sims[0].goes[0].ref
    end_of_term(world, sims)
    sims[0].post("all_reduce", applied=("0.9", ref) if told else ("0.9",))
    sims[1].post("all_reduce", unsettled=(ref,))
    world.run()
    assert wire.OperationSettled(ref, told) in sims[1].seen
    if not told:
        assert verdict(sims[0], 2) == verdict(sims[1], 2) == "ok"
        assert sims[1].seen.index(wire.OperationSettled(ref, False)) < sims[1].seen.index(sims[1].goes[-1])
        return
    error = sims[1].ends[2].error
    assert error is not None
    assert (error.kind, error.members) == ("Gone", ("peer/1/0",))
    assert f"operation {ref} of " in error.message
    assert 2 not in sims[0].ends, "the others wait for its next call"
    sims[1].post("all_reduce", applied=(ref,))
    world.run()
    assert verdict(sims[0], 2) == verdict(sims[1], 3) == "ok"


def test_nothing_is_settled_before_everyone_from_before_has_spoken() -> None:
    world, sims = peers(3)
    started(world, sims, stuck=[])
    ref = sims[0].goes[0].ref
    world.restart()
    for sim in sims:
        world.rejoin(sim)
    world.advance(5.0, frozen=(sims[2],))  # it has applied the operation, and cannot say so yet
    sims[0].post("all_reduce", unsettled=(ref,))
    sims[1].post("all_reduce", unsettled=(ref,))
    world.advance(5.0, frozen=(sims[2],))
    assert not any(isinstance(m, wire.OperationSettled) for m in sims[0].seen)
    world.advance(1.0)
    sims[2].post("all_reduce", applied=(ref,))
    world.run()
    for sim in sims[:2]:
        assert wire.OperationSettled(ref, True) in sim.seen
        assert verdict(sim, 2) == "Gone"


def test_a_coordinator_remembers_its_own_verdicts() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[])
    ref = sims[0].goes[0].ref
    sims[0].post("all_reduce")
    sims[1].post("all_reduce", unsettled=(ref,))
    world.run()
    assert verdict(sims[1], 2) == "Gone"


def test_an_operation_in_doubt_that_still_runs_is_waited_for() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[sims[1]], deadline_s=5.0)
    ref = sims[0].goes[0].ref
    for sim in sims:
        sim.post("barrier", unsettled=(ref,))
        sim.stuck = False
    world.run()
    assert len(sims[0].goes) == 1
    world.advance(6.0)
    assert [verdict(sim, 1) for sim in sims] == ["DeadlineExceeded"] * 2
    assert [verdict(sim, 2) for sim in sims] == ["ok"] * 2


# ---------------------------------------------------------------- those that come back


def test_flapping_peers_leave_nothing_behind() -> None:
    world, sims = peers(3)
    for turn in range(12):
        for sim in sims:
            sim.post("all_reduce")
        if turn % 3 == 0:
            sims[2].stuck = True
            world.run()
        elif turn % 3 == 1:
            sims[2].mute = True
            world.run()
        world.lose(sims[2])
        world.run()
        for sim in sims[:2]:
            assert verdict(sim, turn + 1) == "ok"
        world.now += 70.0  # beyond the time in which flapping is held against it
        for sim in sims[:2]:
            world.state.roster.note_heard(sim.member, world.now)
        sims[2] = world.join("peer/2/0")
        sims[2].posts = sims[0].posts
        world.advance(0.5)
    operations = world.state.operations
    assert operations.running == ()
    assert set(operations.matching._streams) <= {sim.member for sim in sims}
    assert not any(operations.matching._streams.values())
    assert not operations.matching._missed
    assert not operations._vanished
    assert len(world.state.lanes) <= 1
    opened = {form.group.prefix for form in sims[0].seen if isinstance(form, wire.LaneForm)}
    assert opened - set(world.swept) == {lane.prefix for lane in world.state.lanes._lanes.values()}
    assert len(world.swept) >= 8


def test_a_peer_that_is_back_pairs_with_the_present() -> None:
    world, sims = peers(2)
    started(world, sims, stuck=[sims[1]])
    again = world.join("peer/1/0")  # fences the one that hangs
    assert not again.ends
    again.post("barrier")
    world.run()
    assert [m.name for m in receipt(sims[0], 1).members] == ["peer/0/0"]
    sims[0].post("barrier")
    world.run()
    assert verdict(sims[0], 2) == verdict(again, 1) == "ok"


def test_a_join_gets_its_turn_between_collectives_that_never_pause() -> None:
    world = World(peer_config(), {"peer": GroupShape(replicas=2)})
    sims = [world.join("peer/0/0"), world.join("peer/1/0")]
    started(world, sims, stuck=sims)
    late = world.join("peer/2/0")
    late.post("all_reduce")
    for sim in sims:
        sim.post("all_reduce")
    world.run()
    assert len(sims[0].goes) == 1, "what is called now waits until the new one can take part"
    for sim in sims:
        sim.stuck = False
        sim.outbox.append(wire.OperationDone(sim.goes[0].operation))
    world.run()
    assert [len(receipt(sims[0], post).members) for post in (1, 2)] == [2, 3]
    assert verdict(late, 1) == "ok"

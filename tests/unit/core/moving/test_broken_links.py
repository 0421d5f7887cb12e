"""Peers of which two cannot reach each other, while all can reach the coordinator: an
operation of both ends with an error that names them, and the next one may succeed."""

from __future__ import annotations

import pytest

from replicas import messages as wire
from replicas.core.members.roster import GroupShape
from tests.support.channel_world import SimMember, World, peer_config


class MeetingMember(SimMember):
    """Its process groups do not form over a bad link, and say between whom. One that
    has formed stands still, and is told.

    ``slow``: bytes move, and are not there for long.
    """

    slow = False

    def _answer(self, message: wire.FromCoordinator) -> None:
        if isinstance(message, wire.OperationGo) and (self.slow or self.world.broken(message.lane)):
            self.goes.append(message)
            self.at_work[message.lane] = (self.world.now, wire.OperationGo(0, 0, message.lane, (), (), (), 0, 0.0))
            return
        if isinstance(message, wire.LaneForm):
            bad = [pair for pair in self.world.bad_pairs if pair <= frozenset(message.group.names)]
            if bad:
                one, other = sorted(bad[0])
                text = f"{other} cannot be reached by {one}: no connection within 1.5 s"
                self.outbox.append(
                    wire.LaneFailed(
                        message.lane,
                        wire.WireError(
                            "Preflight", text, phase="form", members=(one, other), hint="open all TCP ports"
                        ),
                    )
                )
                return
        super()._answer(message)

    def tell_pace(self) -> None:
        if not self.slow:
            super().tell_pace()
        for lane in self.at_work if self.slow else ():
            self.outbox.append(wire.LaneMoved(lane, 0.2, 0.001))


class MeetingWorld(World):
    member_type = MeetingMember


def peers(count: int = 3, *, worked: bool = True, **changes: object) -> tuple[World, list[SimMember]]:
    """``worked``: they have done an operation together."""
    world = MeetingWorld(peer_config(**changes), {"peer": GroupShape(replicas=count)})  # type: ignore[arg-type]  # by name
    sims = [world.join(f"peer/{replica}/0") for replica in range(count)]
    if worked:
        assert collective(world, sims) == ["ok"] * count
    return world, sims


def cut(world: World, one: SimMember, other: SimMember) -> None:
    """The link between the two breaks, with it the process groups that they have."""
    world.bad_pairs.add(frozenset((one.member.name, other.member.name)))


def collective(
    world: World, sims: list[SimMember], kind: str = "all_reduce", *, seconds: float = 0.5, **more: object
) -> list[str]:
    posts = [sim.post(kind, **more) for sim in sims]  # type: ignore[arg-type]  # by name
    world.advance(seconds)
    return [verdict(sim, post) for sim, post in zip(sims, posts, strict=True)]


def verdict(sim: SimMember, post: int) -> str:
    end = sim.ends.get(post)
    return "" if end is None else "ok" if end.error is None else end.error.kind


def failures(world: World) -> int:
    return world.tally.retries.get("outer", {}).get("failed", 0)


def error_of(sim: SimMember, post: int) -> wire.WireError:
    error = sim.ends[post].error
    assert error is not None
    return error


@pytest.mark.parametrize("on_lost", ["drop", "raise"])
def test_a_link_that_breaks_has_the_names_of_its_ends_and_nobody_is_left_out(on_lost: str) -> None:
    world, sims = peers(on_lost=on_lost)
    cut(world, sims[0], sims[1])
    assert collective(world, sims, seconds=6.0) == ["SyncError"] * 3, "no byte moves for some seconds"
    for sim in sims:
        error = error_of(sim, 2)
        assert (error.phase, error.members) == ("form", ("peer/0/0", "peer/1/0"))
        assert error.message == (
            "all_reduce failed twice, though all its members live: "
            "peer/1/0 cannot be reached by peer/0/0: no connection within 1.5 s"
        )
        assert error.hint == "open all TCP ports"
    assert [state.member for state in world.state.roster.live] == [sim.member for sim in sims]
    for _ in range(3):
        assert collective(world, sims) == ["SyncError"] * 3, "each call says so, soon"
    world.bad_pairs.clear()
    assert collective(world, sims) == ["ok"] * 3
    world.advance(1.0)
    assert len(world.state.lanes) == 1


def test_bytes_that_move_slowly_are_waited_for() -> None:
    world, sims = peers()
    for sim in sims:
        assert isinstance(sim, MeetingMember)
        sim.slow = True
    assert collective(world, sims, seconds=30.0) == ["", "", ""]
    for sim in sims:
        sim.outbox.append(wire.OperationDone(sim.goes[-1].operation))
    world.run()
    assert [verdict(sim, 2) for sim in sims] == ["ok"] * 3
    assert not world.tally.retries


def stands_still(world: World, sims: list[SimMember], address: str) -> wire.WireError:
    """A collective of all, in which the second of them waits for ``address``."""
    for sim in sims:
        sim.stuck = True
    posts = [sim.post("all_reduce") for sim in sims]
    for _ in range(20):
        for sim in sims:
            if sim.goes and not sim.ends.get(posts[0]):
                held_up = (address,) if sim is sims[1] else ()
                sim.outbox.append(wire.LaneMoved(sim.goes[-1].lane, 5.0, 0.001, held_up))
        world.advance(0.5)
    assert [verdict(sim, post) for sim, post in zip(sims, posts, strict=True)] == ["SyncError"] * 3
    return error_of(sims[0], posts[0])


def test_a_standstill_that_outlasts_a_retry_is_told_with_who_is_held_up() -> None:
    world, sims = peers()
    error = stands_still(world, sims, "10.0.0.3")
    text = "no byte has moved for 5.0 s between peer/0/0, peer/1/0, peer/2/0; bytes from peer/1/0 to 10.0.0.3 wait"
    assert error.message == f"all_reduce failed twice, though all its members live: {text}"
    assert error.members == ("peer/1/0",)
    assert "check the network between the hosts" in error.hint
    assert world.tally.retries == {"outer": {"failed": 2}}


def test_a_standstill_between_two_has_both_of_their_names() -> None:
    world = MeetingWorld(peer_config(), {"peer": GroupShape(replicas=3)})
    sims = [world.join(f"peer/{replica}/0", address=f"10.0.0.{replica}") for replica in range(3)]
    error = stands_still(world, sims, "10.0.0.2")
    assert error.message.endswith("; bytes from peer/1/0 to peer/2/0 at 10.0.0.2 wait")
    assert error.members == ("peer/1/0", "peer/2/0")


def test_bytes_that_stand_still_once_are_sent_again() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    posts = [sim.post("all_reduce") for sim in sims]
    world.advance(2.0)
    world.bad_pairs.clear()
    world.advance(4.0)
    assert [verdict(sim, post) for sim, post in zip(sims, posts, strict=True)] == ["ok"] * 3
    assert failures(world) == 1


def test_a_lane_that_cannot_form_again_over_a_broken_link() -> None:
    world, sims = peers()
    cut(world, sims[1], sims[2])
    for lane in world.state.lanes:
        world.state.operations.close_lane(lane, "failed", world.now)
    assert collective(world, sims) == ["SyncError"] * 3
    assert error_of(sims[0], 2).members == ("peer/1/0", "peer/2/0")


def test_a_group_that_never_worked_is_told_between_whom_there_is_no_way() -> None:
    world, sims = peers(worked=False)
    cut(world, sims[0], sims[1])
    assert collective(world, sims) == ["Preflight"] * 3
    assert error_of(sims[2], 1).members == ("peer/0/0", "peer/1/0")


def test_a_newcomer_that_cannot_reach_one_of_them_is_named_in_an_error_that_a_loop_outlives() -> None:
    world, sims = peers()
    world.lose(sims[0])
    assert collective(world, sims[1:]) == ["ok", "ok"]
    sims[0] = world.join("peer/0/0")
    cut(world, sims[0], sims[1])
    world.advance(0.5)
    assert collective(world, sims) == ["SyncError"] * 3
    world.lose(sims[0])
    assert collective(world, sims[1:]) == ["ok", "ok"]


# ---------------------------------------------------------------- pairs


def pair(world: World, one: SimMember, other: SimMember, seconds: float = 0.5) -> list[str]:
    posts = [one.post("send", root=other.member.replica_name)]
    posts.append(other.post("recv", root=one.member.replica_name, segments=()))
    world.advance(seconds)
    return [verdict(one, posts[0]), verdict(other, posts[1])]


@pytest.mark.parametrize("worked", [False, True])
def test_a_pair_is_not_concerned_with_the_links_of_others(worked: bool) -> None:
    world, sims = peers(worked=worked)
    cut(world, sims[0], sims[1])
    for lane in world.state.lanes:
        world.state.operations.close_lane(lane, "failed", world.now)
    assert pair(world, sims[0], sims[2]) == ["ok", "ok"]
    assert pair(world, sims[2], sims[1]) == ["ok", "ok"]


def test_a_pair_without_a_way_between_them_hears_so_and_nobody_else_does() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    assert pair(world, sims[0], sims[1], seconds=6.0) == ["SyncError", "SyncError"]
    assert pair(world, sims[0], sims[2]) == ["ok", "ok"]
    world.bad_pairs.clear()
    assert pair(world, sims[0], sims[1]) == ["ok", "ok"]


def test_a_pair_does_not_wait_for_one_that_is_alive_and_does_nothing() -> None:
    world, sims = peers()
    sims[2].mute = True
    for lane in world.state.lanes:
        world.state.operations.close_lane(lane, "failed", world.now)
    assert pair(world, sims[0], sims[1], seconds=4.0) == ["ok", "ok"]
    sims[2].mute = False
    world.advance(30.0)
    assert collective(world, sims) == ["ok"] * 3
    world.advance(1.0)
    assert len(world.state.lanes) == 1, "the pair's own is closed once there is one of all"


def test_an_overdue_operation_says_what_went_wrong_before() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    posts = [sim.post("all_reduce", deadline_s=10.0) for sim in sims]
    world.advance(2.0)
    world.bad_pairs.clear()
    for sim in sims:
        sim.stuck = True  # the next attempt forms, and nothing is heard of it
    world.advance(9.0)
    error = error_of(sims[0], posts[0])
    assert error.kind == "DeadlineExceeded"
    assert "an earlier attempt failed (no byte has moved for" in error.message


def test_under_a_new_coordinator_too_a_link_is_what_has_broken() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    for sim in world.restart():
        world.rejoin(sim)
    world.advance(15.0)
    assert collective(world, sims) == ["SyncError"] * 3

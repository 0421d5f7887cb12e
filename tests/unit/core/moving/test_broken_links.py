"""Peers of which two cannot reach each other, while all can reach the coordinator: the
others go on, and are whole again."""

from __future__ import annotations

from itertools import pairwise

import pytest

from replicas import messages as wire
from replicas.core.base.effects import MemberQuarantined
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
            self.at_work[message.lane] = (self.world.now, wire.TransferGo(0, message.lane, (), 0.0))
            return
        if isinstance(message, wire.LaneForm):
            bad = [pair for pair in self.world.bad_pairs if pair <= frozenset(message.names)]
            if bad:
                one, other = sorted(bad[0])
                text = f"{other} cannot be reached by {one}: no connection within 1.5 s"
                self.outbox.append(
                    wire.LaneFailed(message.lane, wire.WireError("Preflight", text, members=(one, other)))
                )
                return
        super()._answer(message)

    def tell_pace(self) -> None:
        if not self.slow:
            super().tell_pace()
        for lane in self.at_work if self.slow else ():
            self.outbox.append(wire.LaneMoved(lane, 9, 9, 0.2, 0.001))


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


def quarantined(world: World) -> list[str]:
    return [event.member.name for event in world.events if isinstance(event, MemberQuarantined)]


def live(world: World) -> list[str]:
    return [state.member.name for state in world.state.roster.live]


def failures(world: World) -> int:
    return world.tally.retries.get("outer", {}).get("failed", 0)


def probes(sim: SimMember) -> int:
    return sum(isinstance(message, wire.LaneForm) and message.probe for message in sim.seen)


def test_the_others_go_on_without_one_end_of_a_link_that_breaks() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    assert collective(world, sims, seconds=6.0) == ["ok", "Gone", "ok"], "no byte moves for some seconds"
    receipt = sims[0].ends[2].receipt
    assert receipt is not None
    assert receipt.seconds < 6
    assert receipt == sims[2].ends[2].receipt
    assert [member.name for member in receipt.members] == ["peer/0/0", "peer/2/0"]
    assert receipt.lost == ("peer/1/0",)
    assert "no process group of it works with peer/0/0" in receipt.reasons["peer/1/0"]
    error = sims[1].ends[2].error
    assert error is not None
    assert "no process group of it works with peer/0/0: peer/1/0 cannot be reached by peer/0/0" in error.message


def test_bytes_that_move_slowly_are_waited_for() -> None:
    world, sims = peers()
    for sim in sims:
        assert isinstance(sim, MeetingMember)
        sim.slow = True
    assert collective(world, sims, seconds=30.0) == ["", "", ""]
    for sim in sims:
        sim.outbox.append(wire.OperationDone(sim.goes[-1].operation, 30.0))
    world.run()
    assert [verdict(sim, 2) for sim in sims] == ["ok"] * 3
    assert not world.tally.retries


def test_a_standstill_that_is_nobodys_fault_ends_with_an_error_that_says_so() -> None:
    world, sims = peers()
    for sim in sims:
        sim.stuck = True
    posts = [sim.post("all_reduce") for sim in sims]
    for _ in range(60):
        for sim in sims:
            if sim.goes and not sim.ends.get(posts[0]):
                held_up = ("10.0.0.3",) if sim is sims[1] else ()
                sim.outbox.append(wire.LaneMoved(sim.goes[-1].lane, 0, 0, 5.0, 0.001, held_up))
        world.advance(0.5)
    assert [verdict(sim, 2) for sim in sims] == ["SyncError"] * 3
    error = sims[0].ends[2].error
    assert error is not None
    assert (
        "no byte has moved for 5.0 s between peer/0/0, peer/1/0, peer/2/0; held up: peer/1/0 to 10.0.0.3"
        in error.message
    )
    assert not quarantined(world)


def test_a_lane_that_cannot_form_again_over_a_broken_link() -> None:
    world, sims = peers()
    cut(world, sims[1], sims[2])
    world.state.store_moved(world.now)
    for lane in list(world.state.lanes._lanes.values()):
        world.state.operations.close_lane(lane, "failed", world.now)
    assert collective(world, sims) == ["ok", "ok", "Gone"]


def test_a_group_that_never_worked_is_told_between_whom_there_is_no_way() -> None:
    world, sims = peers(worked=False)
    cut(world, sims[0], sims[1])
    assert collective(world, sims) == ["Preflight"] * 3
    error = sims[2].ends[1].error
    assert error is not None
    assert error.members == ("peer/0/0", "peer/1/0")
    assert not quarantined(world)


def test_a_newcomer_that_cannot_reach_one_of_them_is_the_one_that_is_left_out() -> None:
    world, sims = peers()
    world.lose(sims[0])
    assert collective(world, sims[1:]) == ["ok", "ok"]
    sims[0] = world.join("peer/0/0")
    cut(world, sims[0], sims[1])
    world.advance(0.5)
    assert collective(world, sims) == ["Gone", "ok", "ok"]


def test_with_on_lost_raise_everyone_is_told() -> None:
    world, sims = peers(on_lost="raise")
    cut(world, sims[0], sims[1])
    found = collective(world, sims, seconds=6.0)
    assert set(found) <= {"PeersLost", "Preflight"}
    assert len(set(found)) == 1


@pytest.mark.parametrize("root", [0, 1])
def test_the_end_of_the_link_that_has_the_root_stays(root: int) -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    found = collective(world, sims, "broadcast", root=f"peer/{root}", seconds=6.0)
    assert found == ["ok" if index in (root, 2) else "Gone" for index in range(3)]


def test_the_others_pay_once_however_long_the_link_is_broken() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    collective(world, sims, seconds=6.0)
    paid = failures(world)
    for _ in range(120):
        assert collective(world, [sims[0], sims[2]]) == ["ok", "ok"]
    assert failures(world) == paid
    assert quarantined(world) == ["peer/1/0"]
    assert 3 <= probes(sims[2]) <= 30, "it is tried beside them, less often as time goes"
    assert len(world.state.lanes) <= 3


@pytest.mark.parametrize("outage_s", [4, 20, 40])
def test_all_are_together_again_soon_after_the_link_is_mended(outage_s: int) -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    collective(world, sims, seconds=6.0)
    for _ in range(outage_s):
        collective(world, [sims[0], sims[2]])
        world.advance(0.5)
    world.bad_pairs.clear()
    world.advance(5.0)
    assert live(world) == ["peer/0/0", "peer/1/0", "peer/2/0"]
    assert collective(world, [sims[1]]) == ["Gone"], "it hears once that it has missed something"
    assert collective(world, sims) == ["ok"] * 3


def test_a_new_process_behind_the_same_broken_link_disturbs_nobody() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    collective(world, sims, seconds=6.0)
    paid = failures(world)
    for _ in range(10):
        sims[1] = world.join("peer/1/0")
        for _ in range(3):
            assert collective(world, [sims[0], sims[2]]) == ["ok", "ok"]
    assert failures(world) == paid
    world.bad_pairs.clear()
    world.join("peer/1/0")
    world.advance(1.0)
    assert live(world) == ["peer/0/0", "peer/1/0", "peer/2/0"]


def test_a_program_that_joins_again_at_each_gone_hears_it_at_growing_intervals() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    collective(world, sims, seconds=6.0)
    told = []
    began = world.now
    while world.now < began + 60.0:
        sims[1] = world.join("peer/1/0")
        post = sims[1].post("all_reduce", deadline_s=300.0)
        while post not in sims[1].ends and world.now < began + 60.0:
            assert collective(world, [sims[0], sims[2]]) == ["ok", "ok"]
        if post in sims[1].ends:
            assert verdict(sims[1], post) == "Gone"
            told.append(world.now)
    waits = [later - earlier for earlier, later in pairwise(told)]
    assert 4 <= len(told) <= 8, told
    assert all(later > 1.5 * earlier for earlier, later in pairwise(waits)), waits
    world.bad_pairs.clear()
    world.advance(60.0)
    assert live(world) == ["peer/0/0", "peer/1/0", "peer/2/0"]
    assert verdict(sims[1], post) == "Gone", "it is not paired with an operation that began later"


def test_a_held_back_gone_stays_gone_when_another_peer_is_lost() -> None:
    world, sims = peers(4, on_lost="raise")
    cut(world, sims[0], sims[1])
    collective(world, sims, seconds=6.0)
    for _ in range(4):
        sims[1] = world.join("peer/1/0")
        post = sims[1].post("all_reduce", deadline_s=300.0)
        collective(world, [sims[0], sims[2], sims[3]])
    assert verdict(sims[1], post) == "", "held back"
    world.lose(sims[3])
    world.advance(60.0)
    assert verdict(sims[1], post) == "Gone"


def test_one_that_fails_each_time_among_the_others_comes_back_later_each_time() -> None:
    world, sims = peers()
    waits = []
    for _ in range(5):
        began = world.now
        world.state.quarantine(sims[1].member, "no process group of it works", world.now)
        while "peer/1/0" not in live(world):
            world.advance(0.5)
        waits.append(world.now - began)
        if len(waits) == 2:
            sims[1] = world.join("peer/1/0")
            world.advance(0.5)
    assert waits == sorted(waits)
    assert waits[-1] > 4 * waits[0], waits


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
    for lane in list(world.state.lanes._lanes.values()):
        world.state.operations.close_lane(lane, "failed", world.now)
    assert pair(world, sims[0], sims[2]) == ["ok", "ok"]
    assert pair(world, sims[2], sims[1]) == ["ok", "ok"]
    assert not quarantined(world)


def test_a_pair_without_a_way_between_them_hears_so_and_nobody_else_does() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    assert pair(world, sims[0], sims[1], seconds=6.0) == ["Preflight", "Preflight"]
    assert not quarantined(world)
    assert pair(world, sims[0], sims[2]) == ["ok", "ok"]
    world.bad_pairs.clear()
    assert pair(world, sims[0], sims[1]) == ["ok", "ok"]


def test_a_pair_does_not_wait_for_one_that_is_alive_and_does_nothing() -> None:
    world, sims = peers()
    sims[2].mute = True
    for lane in list(world.state.lanes._lanes.values()):
        world.state.operations.close_lane(lane, "failed", world.now)
    assert pair(world, sims[0], sims[1], seconds=4.0) == ["ok", "ok"]
    sims[2].mute = False
    world.advance(30.0)
    assert collective(world, sims) == ["ok"] * 3
    world.advance(1.0)
    assert len(world.state.lanes) == 1, "the pair's own is closed once there is one of all"


def test_an_overdue_operation_says_what_went_wrong_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    monkeypatch.setattr(world.state.operations, "_probe", lambda operation, error, now: True)
    posts = [sim.post("all_reduce", deadline_s=10.0) for sim in sims]
    world.advance(11.0)
    error = sims[0].ends[posts[0]].error
    assert error is not None
    assert error.kind == "DeadlineExceeded"
    assert "the previous attempt failed: no byte has moved for" in error.message


def test_under_a_new_coordinator_too_the_others_go_on() -> None:
    world, sims = peers()
    cut(world, sims[0], sims[1])
    for sim in world.restart():
        world.rejoin(sim)
    world.advance(15.0)
    assert collective(world, sims) == ["ok", "Gone", "ok"]

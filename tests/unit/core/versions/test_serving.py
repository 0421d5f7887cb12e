"""What is served is a decision: labels, candidates, canaries, rollbacks, leases; in
virtual time.

Covers: core/versions/serving.py, core/versions/steering.py, core/versions/recommits.py,
core/versions/contents.py, core/base/ledger.py.
"""

from __future__ import annotations

from functools import partial

import pytest

from replicas import errors
from replicas import messages as wire
from replicas.config.canary import CanaryConfig
from replicas.core.base.effects import VersionDecided
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import Steered, VersionOrder
from tests.support.channel_world import SimMember, World, channel_config


class Fleet:
    """A trainer and targets of one rank on one machine; what is served is promoted."""

    def __init__(self, targets: int = 3, **changes: object) -> None:
        config = channel_config(**{"follow": "promoted", "slots": 4, "deadline_s": 20.0, **changes})
        self.world = World(config, machine="a")
        self.trainer = self.world.join("trainer/0/0", machine="a")
        self.targets = [self.join(replica) for replica in range(targets)]
        self.world.run()
        self.asked = 0

    def join(self, replica: int) -> SimMember:
        return self.world.join(f"rollout/{replica}/0", machine="a")

    def publish(self) -> int:
        number = self.trainer.publish()
        self.trainer.pack(number)
        self.world.advance(1.0)
        self.ask()
        return self.trainer.receipt(number).version

    def ask(self) -> None:
        for sim in self.targets:
            sim.ask()
        self.world.run()

    def send(self, order: VersionOrder) -> Steered | errors.ReplicasError | None:
        """What came of it; None: nothing yet."""
        self.asked += 1
        self.world.state.order(order, partial(self.world.replies.__setitem__, self.asked), self.world.now)
        self.world._collect()
        self.world.advance(0.5)
        self.ask()
        found = self.world.replies.get(self.asked)
        assert found is None or isinstance(found, Steered | errors.ReplicasError)
        return found

    def do(self, order: VersionOrder) -> Steered:
        found = self.send(order)
        assert isinstance(found, Steered), found
        return found

    def refused(self, order: VersionOrder) -> errors.ReplicasError:
        """Nothing has changed by it."""
        before = self.labels, dict(self.world.ledger.leases), self.loaded
        found = self.send(order)
        assert isinstance(found, errors.ReplicasError), found
        assert before == (self.labels, dict(self.world.ledger.leases), self.loaded)
        return found

    def restart(self) -> None:
        for sim in self.world.restart():
            self.world.rejoin(sim)
        self.world.advance(4.0)
        self.ask()

    @property
    def loaded(self) -> list[int]:
        return [sim.loaded for sim in self.targets]

    @property
    def labels(self) -> dict[str, int]:
        return dict(self.world.ledger.labels)

    def told(self, what: str) -> list[int]:
        events = (one for one in self.world.events if isinstance(one, VersionDecided) and one.what == what)
        return [one.version for one in events]


def canary(**changes: object) -> Fleet:
    settings: dict[str, object] = {"group": "rollout", "soak_s": 60.0, **changes}
    return Fleet(canary=CanaryConfig(**settings))  # type: ignore[arg-type]  # by name


def served(fleet: Fleet) -> int:
    """A version that is served by all."""
    version = fleet.publish()
    fleet.do(orders.Promote(version=str(version)))
    assert fleet.loaded == [version] * len(fleet.targets)
    return version


# ---------------------------------------------------------------- promote


def test_a_committed_version_is_held_by_all_and_loaded_when_it_is_promoted() -> None:
    fleet = Fleet()
    assert fleet.publish() == 1
    assert fleet.loaded == [0, 0, 0]
    assert all(1 in sim.held for sim in fleet.targets)
    assert fleet.labels == {"candidate": 1}
    assert fleet.do(orders.Promote()).version == 1
    assert fleet.loaded == [1, 1, 1]
    assert fleet.labels == {"current": 1}
    fleet.publish()
    assert fleet.loaded == [1, 1, 1]
    assert fleet.labels == {"current": 1, "candidate": 2}
    assert all({1, 2} <= sim.held for sim in fleet.targets)
    fleet.do(orders.Promote())
    assert fleet.loaded == [2, 2, 2]
    assert fleet.labels == {"current": 2, "previous": 1}


def test_a_newer_version_replaces_the_candidate_and_the_trainer_waits_for_nobody() -> None:
    fleet = Fleet()
    served(fleet)
    for version in (2, 3, 4, 5):
        assert fleet.publish() == version
        assert fleet.labels == {"current": 1, "candidate": version}
    assert fleet.loaded == [1, 1, 1]
    assert all({1, 5} <= sim.held for sim in fleet.targets)
    fleet.do(orders.Promote())
    assert fleet.loaded == [5, 5, 5]


def test_who_joins_gets_what_is_served_and_holds_the_candidate() -> None:
    fleet = Fleet()
    served(fleet)
    fleet.publish()
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(3.0)
    fleet.ask()
    assert fleet.loaded == [1, 1, 1, 1]
    fleet.world.advance(3.0)
    assert {1, 2} <= fleet.targets[3].held
    fleet.do(orders.Promote())
    assert fleet.loaded == [2, 2, 2, 2]


def test_a_new_coordinator_goes_on_with_what_is_served() -> None:
    fleet = Fleet()
    served(fleet)
    fleet.publish()
    fleet.restart()
    assert fleet.loaded == [1, 1, 1]
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(5.0)
    fleet.ask()
    assert fleet.loaded == [1, 1, 1, 1]
    fleet.do(orders.Promote())
    assert fleet.loaded == [2, 2, 2, 2]


def test_a_channel_that_follows_the_newest_has_nothing_to_promote() -> None:
    fleet = Fleet(follow="newest")
    fleet.publish()
    assert fleet.loaded == [1, 1, 1]
    assert "nothing to promote" in str(fleet.refused(orders.Promote(version="1")))


# ---------------------------------------------------------------- roll back


@pytest.mark.parametrize("follow", ["newest", "promoted"])
def test_a_rollback_is_a_new_version_of_old_content_and_moves_no_bytes(follow: str) -> None:
    fleet = Fleet(follow=follow)
    serve = fleet.publish if follow == "newest" else lambda: served(fleet)
    serve()
    serve()
    before = [list(sim.received) for sim in fleet.targets]
    decided = fleet.do(orders.Rollback())
    assert (decided.version, decided.content_of) == (3, 1)
    assert fleet.loaded == [3, 3, 3]
    assert [list(sim.received) for sim in fleet.targets] == before
    assert fleet.labels == {"current": 3, "previous": 2}
    assert fleet.do(orders.Rollback()).content_of == 2, "and back again"
    assert fleet.loaded == [4, 4, 4]
    assert serve() == 5
    assert fleet.loaded == [5, 5, 5]


def test_who_lacks_the_content_gets_it_from_the_others() -> None:
    fleet = Fleet()
    served(fleet)
    served(fleet)
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(3.0)
    fleet.ask()
    assert 1 not in fleet.targets[3].held
    fleet.do(orders.Rollback(to="1"))
    fleet.world.advance(3.0)
    fleet.ask()
    assert fleet.loaded == [3, 3, 3, 3]


def test_a_rollback_takes_its_turn_between_publishes() -> None:
    """It waits for one that has begun, and those that begin later wait for it."""
    fleet = Fleet(follow="newest")
    fleet.publish()
    fleet.publish()
    begun = fleet.trainer.publish()
    fleet.world.run()
    assert fleet.send(orders.Rollback(to="1")) is None
    later = fleet.trainer.publish()
    fleet.trainer.pack(later)
    fleet.world.advance(1.0)
    assert fleet.trainer.verdicts.get(later) is None
    fleet.trainer.pack(begun)
    fleet.world.advance(2.0)
    receipts = [fleet.trainer.receipt(number).version for number in (begun, later)]
    assert receipts == [3, 5]
    found = fleet.world.replies[fleet.asked]
    assert isinstance(found, Steered)
    assert (found.version, found.content_of) == (4, 1)


def test_a_new_coordinator_knows_whose_content_it_is() -> None:
    fleet = Fleet()
    served(fleet)
    served(fleet)
    fleet.do(orders.Rollback())
    fleet.restart()
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(5.0)
    fleet.ask()
    assert fleet.loaded == [3, 3, 3, 3]


# ---------------------------------------------------------------- canary


def test_the_canary_alone_loads_the_candidate_until_it_is_promoted() -> None:
    fleet = canary()
    served(fleet)
    fleet.publish()
    assert fleet.loaded == [2, 1, 1]
    fleet.do(orders.Promote())
    assert fleet.loaded == [2, 2, 2]


@pytest.mark.parametrize(
    ("replicas", "share", "count"),
    [(1, 0.1, 1), (1, 0.34, 2), (2, 0.1, 2), (1, 0.9, 3), (1, 1 / 3, 1), (1, 2 / 3, 2), (1, None, 1)],
)
def test_a_canary_may_be_a_share_of_its_group(replicas: int, share: float | None, count: int) -> None:
    fleet = canary(replicas=replicas, share=share)
    served(fleet)
    fleet.publish()
    assert fleet.loaded == [2] * count + [1] * (3 - count)


def test_a_rejected_candidate_is_left_by_a_new_version_of_what_is_served() -> None:
    fleet = canary()
    served(fleet)
    fleet.publish()
    fleet.do(orders.Reject(why="it repeats itself"))
    fleet.world.advance(1.0)
    fleet.ask()
    assert fleet.loaded == [3, 3, 3]
    assert fleet.world.ledger.content(3) == 1
    assert fleet.world.ledger.why_rejected(2) == "it repeats itself"
    assert "it repeats itself" in str(fleet.refused(orders.Promote(version="2")))
    assert fleet.publish() == 4
    assert fleet.loaded == [4, 3, 3]


@pytest.mark.parametrize("restart", [False, True])
def test_a_healthy_canary_promotes_and_a_new_coordinator_keeps_its_clock(restart: bool) -> None:
    fleet = canary(promote="healthy")
    served(fleet)
    fleet.publish()
    fleet.world.advance(40.0)
    assert fleet.loaded == [2, 1, 1]
    if restart:
        fleet.restart()
    fleet.world.advance(15.0)
    fleet.ask()
    assert fleet.loaded == [2, 1, 1]
    fleet.world.advance(10.0)
    fleet.ask()
    assert fleet.loaded == [2, 2, 2]


def test_a_canary_that_is_lost_rejects_what_it_served() -> None:
    fleet = canary(promote="healthy")
    served(fleet)
    fleet.publish()
    fleet.world.lose(fleet.targets.pop(0))
    fleet.world.advance(1.0)
    fleet.ask()
    assert fleet.told("rejected") == [2]
    assert fleet.loaded == [3, 3]
    assert "lost while it served the version" in fleet.world.ledger.why_rejected(2)


def test_a_canary_that_dies_of_a_load_rejects() -> None:
    """Else it would die of it again and again."""
    fleet = canary(promote="healthy")
    served(fleet)
    fleet.targets[0].loads = False
    fleet.trainer.pack(fleet.trainer.publish())
    fleet.world.advance(1.0)
    assert fleet.targets[0].unlooked == 2, "it was granted the candidate, which it asked for before"
    fleet.world.lose(fleet.targets.pop(0))
    fleet.world.advance(1.0)
    fleet.ask()
    assert fleet.told("rejected") == [2]
    assert "lost while it loaded the version" in fleet.world.ledger.why_rejected(2)


@pytest.mark.parametrize("first", ["trainer", "target"])
def test_a_coordinator_that_lost_its_log_serves_what_targets_serve(first: str) -> None:
    fleet = Fleet()
    served(fleet)
    fleet.publish()
    sims = fleet.world.restart(keep_log=False)
    for sim in sorted(sims, key=lambda sim: sim.member.group == "trainer", reverse=first == "trainer"):
        fleet.world.rejoin(sim)
    fleet.world.advance(7.0)
    assert fleet.labels["current"] == 1
    fleet.targets.append(fleet.join(3))
    fleet.world.advance(5.0)
    fleet.ask()
    assert fleet.loaded == [1, 1, 1, 1]
    fleet.do(orders.Promote(version="2"))
    assert fleet.loaded == [2, 2, 2, 2]


def test_who_does_not_steer_is_told_nothing() -> None:
    fleet = Fleet(follow="newest", slots=2)
    fleet.publish()
    fleet.publish()
    messages = [message for sim in (fleet.trainer, *fleet.targets) for message in sim.seen]
    assert not any(isinstance(message, wire.Labels) for message in messages)


def test_a_canary_that_refuses_rejects() -> None:
    fleet = canary()
    served(fleet)
    fleet.targets[0].loads = False
    fleet.publish()
    fleet.targets[0].keep_own("it has other shapes")
    fleet.targets[0].loads = True
    fleet.world.advance(1.0)
    fleet.ask()
    assert fleet.told("rejected") == [2]
    assert fleet.loaded == [3, 3, 3]


def test_who_waits_for_the_loads_of_a_rejected_version_is_told() -> None:
    fleet = canary()
    served(fleet)
    fleet.publish()
    fleet.trainer.outbox.append(wire.WatchLoaded(1, 2))
    fleet.world.run()
    assert not any(isinstance(message, wire.WatchEnd) for message in fleet.trainer.seen)
    fleet.do(orders.Reject(why="it repeats itself"))
    (end,) = (message for message in fleet.trainer.seen if isinstance(message, wire.WatchEnd))
    assert end.failed == {"the coordinator": "it repeats itself"}


@pytest.mark.parametrize(("reward", "loaded"), [(0.9, [2, 2, 2]), (0.5, [3, 3, 3]), (0.7, [3, 3, 3])])
def test_a_score_decides(reward: float, loaded: list[int]) -> None:
    fleet = canary(promote="scored", metric="reward", min=0.6, not_below_current_by=0.05)
    served(fleet)
    fleet.do(orders.Score(version="current", scores={"reward": 0.8}))
    fleet.publish()
    fleet.do(orders.Score(version="candidate", scores={"length": 0.0}))
    assert fleet.loaded == [2, 1, 1]
    fleet.do(orders.Score(version="candidate", scores={"reward": reward}))
    fleet.world.advance(1.0)
    fleet.ask()
    assert fleet.loaded == loaded


def test_scores_are_means() -> None:
    fleet = Fleet()
    fleet.publish()
    for value in (1.0, 2.0, 6.0):
        fleet.do(orders.Score(version="1", scores={"reward": value}))
    fleet.restart()
    assert fleet.world.state.told.ledger.versions[1].scores["reward"].value == 3.0


# ---------------------------------------------------------------- leases and labels


def test_a_lease_keeps_a_version_until_its_time_is_over() -> None:
    fleet = Fleet(follow="newest", slots=3)
    fleet.publish()
    decided = fleet.do(orders.Hold(version="1", seconds=30.0, name="evaluation"))
    assert decided.until is not None
    for _ in range(3):
        fleet.publish()
    assert all(1 in sim.held for sim in fleet.targets)
    fleet.restart()
    fleet.publish()
    assert all(1 in sim.held for sim in fleet.targets)
    fleet.world.advance(30.0)
    assert fleet.told("released") == [1]
    fleet.publish()
    assert not any(1 in sim.held for sim in fleet.targets)


def test_the_lease_of_a_member_ends_with_it() -> None:
    fleet = Fleet(follow="newest", slots=3)
    fleet.publish()
    holder = fleet.targets.pop()
    fleet.world.state.order(orders.Hold(version="1"), (holder.member, 1), fleet.world.now)
    fleet.world._collect()
    fleet.world.run()
    assert holder.answers[1].decided is not None
    for _ in range(2):
        fleet.publish()
    assert all(1 in sim.held for sim in fleet.targets)
    fleet.world.lose(holder)
    fleet.world.advance(1.0)
    assert fleet.told("released") == [1]


def test_who_holds_a_lease_gets_the_version() -> None:
    """Also one that came later: an evaluation of what is not the newest any more."""
    fleet = Fleet(follow="newest", slots=3)
    fleet.publish()
    fleet.do(orders.Label(label="best", version="1"))
    fleet.publish()
    late = fleet.join(3)
    fleet.world.advance(3.0)
    assert 1 not in late.held
    fleet.world.state.order(orders.Hold(version="best"), (late.member, 1), fleet.world.now)
    fleet.world._collect()
    fleet.world.advance(3.0)
    assert {1, 2} <= late.held


def test_a_label_of_ones_own_keeps_and_moves_only_when_it_may() -> None:
    fleet = Fleet()
    served(fleet)
    fleet.do(orders.Label(label="best", version="1"))
    served(fleet)
    assert "points to version 1" in str(fleet.refused(orders.Label(label="best", version="2")))
    fleet.do(orders.Label(label="best", version="2", move=True))
    assert fleet.labels["best"] == 2
    fleet.do(orders.Label(label="best", version=""))
    assert "best" not in fleet.labels


@pytest.mark.parametrize(
    ("follow", "slots", "room"), [("promoted", 3, 0), ("promoted", 4, 1), ("newest", 2, 0), ("newest", 3, 1)]
)
def test_what_does_not_fit_is_refused_by_name(follow: str, slots: int, room: int) -> None:
    """Also the version that is served: it takes a slot of its own once another is."""
    fleet = Fleet(slots=slots, follow=follow)
    serve = partial(served, fleet) if follow == "promoted" else fleet.publish
    serve()
    for number in range(room):
        fleet.do(orders.Label(label=f"kept{number}", version="1"))
        fleet.do(orders.Hold(version="1"))
        serve()
    error = fleet.refused(orders.Label(label="best", version="current"))
    assert isinstance(error, errors.NoCapacity)
    assert f"can keep {room} versions beside those that are served and come next" in str(error)
    assert ("keeps version 1" in str(error)) == bool(room)
    assert "slots" in str(error)
    serve()


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (orders.Promote(version="9"), "no version 9"),
        (orders.Promote(version="best"), "no label 'best'"),
        (orders.Promote(version="current"), "serves version 2 already"),
        (orders.Promote(), "no label 'candidate'"),
        (orders.Reject(version="1"), "is not the candidate"),
        (orders.Rollback(to="2"), "serves version 2 already"),
        (orders.Release(name="evaluation"), "no lease 'evaluation'"),
        (orders.Label(label="current", version="1"), "cannot be used as a label"),
        (orders.Label(label="7", version="1"), "cannot be used as a label"),
        (orders.Label(label="best", version=""), "no label 'best'"),
        (orders.Score(version="7", scores={"reward": 1.0}), "no version 7"),
    ],
)
def test_a_wrong_order_names_what_is_there(order: VersionOrder, said: str) -> None:
    fleet = Fleet()
    served(fleet)
    served(fleet)
    assert said in str(fleet.refused(order))


def test_a_version_whose_content_is_gone_cannot_be_served() -> None:
    fleet = Fleet(follow="newest", slots=2)
    for _ in range(5):
        fleet.publish()
    error = fleet.refused(orders.Rollback(to="1"))
    assert isinstance(error, errors.Gone)
    assert "has version" in str(error)

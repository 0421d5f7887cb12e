"""Orders about versions from a rank: what it gets to load, and what is kept for it.

Covers: channel/versions/orders.py, messages/version_orders.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.channel import Channel
from replicas.testing import FakeRun
from tests.support.waits import eventually

PROMOTED: dict[str, Any] = {"sources": ["trainer"], "targets": ["rollout"], "follow": "promoted", "slots": 4}


@pytest.fixture
def run() -> Iterator[FakeRun]:
    with FakeRun({"policy": PROMOTED}) as run:
        yield run


@pytest.fixture
def newest() -> Iterator[FakeRun]:
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"], "slots": 3}}) as run:
        yield run


def publish(trainer: Channel, value: float) -> int:
    return trainer.publish({"weight": torch.full((8,), value)}).wait(30).version


def load(target: Channel, **bound: Any) -> tuple[int, float]:
    with target.receive(deadline=20, **bound).wait() as update:
        tensors = dict(update)
        return update.version, float(tensors["weight"][0])


def test_a_candidate_is_loaded_when_it_is_promoted(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.join("rollout")
    publish(trainer, 1.0)
    waiting = target.receive(deadline=20)
    with pytest.raises(TimeoutError):
        waiting.wait(0.3)
    assert target.latest == 0
    assert trainer.latest == 1
    decided = trainer.versions.promote().wait(10)
    assert (decided.channel, decided.version) == ("policy", 1)
    with waiting.wait(10) as update:
        assert update.version == 1
    assert target.versions.labels == {"current": 1}


def test_back_to_old_content_and_on_with_the_next(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.join("rollout")
    for value in (1.0, 2.0):
        publish(trainer, value)
        trainer.versions.promote().wait(10)
        assert load(target)[1] == value
    decided = trainer.versions.rollback().wait(10)
    assert (decided.version, decided.content_of) == (3, 1)
    assert load(target) == (3, 1.0)
    assert publish(trainer, 4.0) == 4
    trainer.versions.promote().wait(10)
    assert load(target) == (4, 4.0)


def test_after_a_rollback_only_what_differs_is_read(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.join("rollout")
    own = {"weight": torch.zeros(8), "bias": torch.zeros(4)}
    for value in (1.0, 2.0):
        trainer.publish({"weight": torch.full((8,), value), "bias": torch.ones(4)}).wait(30)
        trainer.versions.promote().wait(10)
        with target.receive(deadline=20).wait() as update:
            update.load_into(own)
    trainer.versions.rollback().wait(10)
    with target.receive(deadline=20).wait() as update:
        changed = [one.name for one in update.changes() if one.whole is not None or len(one.positions)]
        update.load_into(own)
    assert changed == ["weight"]
    assert own["weight"][0] == 1.0


def test_a_new_coordinator_goes_on(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.join("rollout")
    for value in (1.0, 2.0):
        publish(trainer, value)
        trainer.versions.promote().wait(10)
        load(target)
    trainer.versions.rollback().wait(10)
    run.restart_coordinator()
    assert load(target) == (3, 1.0)
    late = run.join("rollout", replica=1)
    assert load(late) == (3, 1.0)


def test_a_lease_is_a_block(newest: FakeRun) -> None:
    trainer, target = newest.join("trainer"), newest.join("rollout")
    publish(trainer, 1.0)
    with target.versions.hold(1, name="evaluation") as lease:
        assert (lease.version, lease.name, lease.until) == (1, "evaluation", None)
        for value in (2.0, 3.0, 4.0):
            publish(trainer, value)
            load(target)
        trainer.versions.rollback(1).wait(10)
        assert load(target) == (5, 1.0)
    with pytest.raises(errors.UsageError, match="no lease 'evaluation'"):
        trainer.versions.release("evaluation").wait(10)


def test_a_leased_version_is_read_beside_what_is_served(newest: FakeRun) -> None:
    trainer, target = newest.join("trainer"), newest.join("rollout")
    publish(trainer, 1.0)
    with target.versions.hold(1):
        for value in (2.0, 3.0):
            publish(trainer, value)
            load(target)
        with target.versions.read(1).wait(10) as update:
            assert float(dict(update)["weight"][0]) == 1.0
        assert target.version == 3
        assert load(target, at_least=3) == (3, 3.0)
    with pytest.raises(errors.Gone, match="does not have version 9 in memory"):
        target.versions.read(9).wait(10)


def test_a_lease_that_is_over_is_no_error_at_the_end_of_its_block(newest: FakeRun) -> None:
    trainer = newest.join("trainer")
    publish(trainer, 1.0)
    with trainer.versions.hold(1, seconds=0.05, name="short"):
        eventually(lambda: not any(one.leases for one in newest.status("policy").versions), "the lease is over")


def test_scores_and_labels_are_in_the_status(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.join("rollout")
    publish(trainer, 1.0)
    trainer.versions.promote().wait(10)
    with target.receive(deadline=20).wait() as update:
        update.report(reward=0.5).wait(10)
    trainer.versions.label("best", 1).wait(10)
    (version,) = run.status("policy").versions
    assert (version.number, version.labels, version.scores) == (1, ("current", "best"), {"reward": 0.5})
    assert (version.held, version.serving) == (2, ("rollout/0",))


def test_orders_can_be_awaited(run: FakeRun) -> None:
    trainer = run.join("trainer")
    publish(trainer, 1.0)

    async def steer() -> None:
        assert (await trainer.versions.promote()).version == 1
        async with trainer.versions.hold("current") as lease:
            assert lease.name == "lease-1"

    asyncio.run(steer())


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (lambda versions: versions.promote("best"), "no label 'best'"),
        (lambda versions: versions.promote(-1), "promote: version"),
        (lambda versions: versions.score(1, {"reward": float("nan")}), "score"),
        (lambda versions: versions.score(1, {"reward": "good"}), "score"),
        (lambda versions: versions.score(1, {}), "score"),
        (lambda versions: versions.hold(1, seconds=-1).wait(), "hold"),
        (lambda versions: versions.hold(1.5).wait(), "hold: version"),
    ],
)
def test_a_wrong_order_is_a_clear_error(run: FakeRun, order: Any, said: str) -> None:
    trainer = run.join("trainer")
    publish(trainer, 1.0)
    with pytest.raises(errors.UsageError, match=said):
        order(trainer.versions).wait(10)

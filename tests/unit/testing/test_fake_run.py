"""The faults of a fake run, and what it refuses.

tests/integration/channel/test_channel.py holds it to what a run does otherwise.

Covers: channel/session/connection.py, testing/fake_run.py, testing/virtual_target.py,
testing/fake_wire.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import replicas
from replicas import errors
from replicas.channel.session.connection import in_process
from replicas.coordinator import GroupShape
from replicas.testing import FakeRun
from tests.support.waits import eventually

LEASE_S = 2.5
"""Members send a heartbeat each second."""
ONE = {"weight": torch.ones(3)}


@pytest.fixture
def run() -> Iterator[FakeRun]:
    with FakeRun(groups={"rollout": GroupShape(2, heartbeat_timeout_s=LEASE_S)}) as found:
        yield found


def test_a_program_joins_by_its_environment(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in run.environ("rollout", 1).items():
        monkeypatch.setenv(name, value)
    with replicas.join("policy") as channel:
        assert (channel.member.name, channel.role) == ("rollout/1/0", "target")
        run.join("trainer").publish(ONE, meta={"step": 5}).wait()
        with channel.receive(at_least=("step", 5)).wait() as update:
            assert torch.equal(dict(update)["weight"], ONE["weight"])


@pytest.mark.slow
def test_a_step_that_is_repeated_gets_its_version_again(run: FakeRun) -> None:
    trainer, rollout = run.join("trainer"), run.join("rollout")
    bounds: list[int | tuple[str, float]] = [1, ("step", 2), 3]
    for step, bound in enumerate(bounds, start=1):
        trainer.publish(ONE, meta={"step": step}, deadline=20).wait(30)
        for _ in range(3):
            with rollout.receive(at_least=bound, deadline=20).wait(30) as update:
                assert update.version == step
                assert torch.equal(dict(update)["weight"], ONE["weight"])
        run.restart_coordinator()
    with pytest.raises(errors.DeadlineExceeded):
        rollout.receive(deadline=0.2).wait(30)  # without a bound, a newer one
    with pytest.raises(errors.DeadlineExceeded):
        rollout.receive(deadline=0.2, at_least=4).wait(30)
    assert rollout.version == 3


def test_a_member_that_can_share_no_memory_says_so_once_and_what_allows_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("replicas.channel.session.hub.find", lambda beacons: -1)
    with FakeRun() as run:
        run.join("trainer")
        run.join("rollout")

        def told() -> list[str]:
            return [text for text in caplog.messages if "cannot share memory" in text]

        eventually(lambda: len(told()) >= 2, "each member says so")  # their sessions find it out, aside
    assert len(told()) == 2, "one for each member"
    assert all("--network or --pid = host or container:NAME" in text for text in told())


def test_virtual_targets_load_each_version(run: FakeRun) -> None:
    trainer, target = run.join("trainer"), run.target("rollout")
    for step in (1, 2):
        trainer.publish({"weight": torch.full((3,), float(step))}).wait()
        assert trainer.loaded(step, deadline=20).wait() == step
        assert target.weights["weight"].tolist() == [float(step)] * 3
    assert target.versions == [1, 2]
    status = run.status()
    assert (status.committed_version, status.syncs, status.version_nbytes) == (2, {"committed": 2}, 12)
    assert status.committed_at is not None


def test_a_load_that_fails_is_reported(run: FakeRun) -> None:
    broken = threading.Event()
    broken.set()

    def load(update: replicas.Update) -> None:
        if broken.is_set():
            raise SystemExit("no memory")

    trainer, target = run.join("trainer"), run.target("rollout", load=load)
    trainer.publish(ONE).wait()
    with pytest.raises(errors.DeadlineExceeded):
        trainer.loaded(1, deadline=0.2).wait()
    broken.clear()
    trainer.publish(ONE).wait()
    assert trainer.loaded(2, deadline=20).wait() == 2
    assert target.versions == [2]


def test_a_version_that_is_refused_costs_a_replica_nothing_and_the_trainer_is_told(run: FakeRun) -> None:
    trainer, rollout = run.join("trainer"), run.join("rollout")
    trainer.publish({"w": torch.ones(3)}).wait(20)
    with rollout.receive().wait(20):
        pass
    trainer.publish({"w": torch.ones(3)}).wait(20)
    with rollout.receive().wait(20) as update:
        update.refuse(errors.ManifestMismatch("no weights for b"))
    assert rollout.version == 1
    with pytest.raises(errors.SyncError, match=r"refused by rollout/0: version 2 was not loaded: .*no weights for b"):
        trainer.loaded(2).wait(20)
    pending = rollout.receive()
    receipt = trainer.publish({"w": torch.ones(3)}).wait(20)
    assert receipt.not_loaded == {"rollout/0": "version 2: no weights for b"}
    assert receipt.metrics()["replicas/not_loaded"] == 1
    with pending.wait(20) as update:
        assert update.version == 3
    assert trainer.loaded(3).wait(20) == 3
    with pytest.raises(errors.UsageError, match="was reported as loaded before"):
        update.refuse("late")


def test_the_others_go_on_without_a_killed_member(run: FakeRun) -> None:
    trainer, first, second = run.join("trainer"), run.join("rollout"), run.target("rollout", 1)
    trainer.publish(ONE).wait()
    waiting = first.receive()
    waiting.wait().loaded()
    run.kill(first)
    receipt = trainer.publish(ONE).wait()
    assert [member.name for member in receipt.members] == ["rollout/1/0"]
    with pytest.raises(errors.Fenced, match="rollout/0/0 was declared lost"):
        first.receive()
    restarted = run.join("rollout")
    with restarted.receive(deadline=20).wait() as update:
        assert update.version == 2
    assert second.error is None


@pytest.mark.slow
def test_a_rank_that_died_before_its_part_does_not_add_one_of_another_step() -> None:
    """Its next process may have gone on from somewhere else."""
    policy = {"sources": [{"group": "trainer", "ranks": "all"}], "targets": ["rollout"]}
    with FakeRun({"policy": policy}) as run:
        first, second = (run.join("trainer", rank=rank, world_size=2) for rank in range(2))
        rollout = run.join("rollout")
        alone = first.publish({"x": torch.full((2,), 1.0)})
        run.kill(second)
        with pytest.raises(errors.PeersLost, match="trainer/0/1 was lost"):
            alone.wait(20)
        again = run.join("trainer", rank=1, world_size=2)
        both = first.publish({"x": torch.full((2,), 3.0)}), again.publish({"y": torch.full((2,), 3.0)})
        assert {one.wait(20).version for one in both} == {2}
        with rollout.receive().wait(20) as update:
            assert {name: tensor[0].item() for name, tensor in update} == {"x": 3.0, "y": 3.0}


def test_a_frozen_member_is_lost_when_its_lease_is_over(run: FakeRun) -> None:
    trainer, frozen, _ = run.join("trainer"), run.join("rollout"), run.target("rollout", 1)
    trainer.publish(ONE).wait()
    run.freeze(frozen)
    receipt = trainer.publish(ONE).wait()
    assert [member.name for member in receipt.members] == ["rollout/1/0"]
    run.thaw(frozen)
    with pytest.raises(errors.Fenced):
        frozen.receive(deadline=20).wait().loaded()
        frozen.receive(deadline=20).wait()


def test_a_member_that_wakes_in_time_is_not_lost(run: FakeRun) -> None:
    trainer, frozen = run.join("trainer"), run.join("rollout")
    trainer.publish(ONE).wait()
    run.freeze(frozen)
    pending = trainer.publish(ONE)
    assert not pending.done()
    run.thaw(frozen)
    assert [member.name for member in pending.wait().members] == ["rollout/0/0"]


@pytest.mark.parametrize("how", [{"transport": "group"}, {"staging": "device"}])
def test_a_channel_whose_bytes_need_processes_has_them_mapped(how: dict[str, str]) -> None:
    with FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"], **how}}) as run:
        trainer, target = run.join("trainer"), run.target("rollout")
        assert trainer.publish(ONE, deadline=20).wait(30).version == 1
        assert trainer.loaded(1, deadline=20).wait(30) == 1
        assert torch.equal(target.weights["weight"], ONE["weight"])


def test_a_channel_is_checked_as_it_is_given() -> None:
    with pytest.raises(errors.BadConfig, match="transport"):
        FakeRun({"policy": {"sources": ["trainer"], "targets": ["rollout"], "transport": "carrier pigeon"}})


def test_a_broken_connection_resumes(run: FakeRun) -> None:
    trainer, rollout = run.join("trainer"), run.join("rollout")
    for version in (1, 2, 3):
        run.disconnect(trainer)
        pending = trainer.publish(ONE)
        run.disconnect(rollout)
        assert pending.wait().version == version
        with rollout.receive(deadline=20).wait() as update:
            assert update.version == version


@pytest.mark.slow
def test_a_new_coordinator_learns_from_the_members(run: FakeRun) -> None:
    trainer, rollout = run.join("trainer"), run.join("rollout")
    trainer.publish(ONE, version=7).wait()
    rollout.receive().wait().loaded()
    run.restart_coordinator()
    assert trainer.publish(ONE).wait().version == 8
    with rollout.receive(deadline=20).wait() as update:
        assert update.version == 8


@pytest.mark.slow
def test_indices_survive_a_new_coordinator_and_are_one_on_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    parties = {"sources": ["trainer"], "targets": ["rollout"]}
    with FakeRun({"policy": parties, "reward": parties}) as run:
        for name, value in run.environ("rollout", "auto").items():
            monkeypatch.setenv(name, value)
        policy, reward = replicas.join("policy"), replicas.join("reward")
        named = run.join("rollout", 1)
        assert [one.member.replica for one in (policy, reward)] == [0, 0]
        run.join("trainer").publish(ONE).wait()
        policy.receive().wait().loaded()
        run.restart_coordinator()
        late = run.join("rollout", "auto")
        assert late.member.replica == 2
        assert [one.member.replica for one in (named, policy, reward)] == [1, 0, 0]
        assert late.receive(deadline=20).wait().version == 1
        run.disconnect(policy)
        run.join("trainer").publish(ONE).wait()
        assert policy.receive(deadline=20).wait().version == 2


def test_an_iterator_that_was_used_up_is_refused_and_the_model_that_follows_is_not(run: FakeRun) -> None:
    """It gives no tensors: committed, they would be the channel's manifest."""
    trainer, used_up = run.join("trainer"), iter(ONE.items())
    assert len(list(used_up)) == len(ONE)
    with pytest.raises(errors.UsageError, match=r"the weights have no tensors \(an iterator gives its tensors once"):
        trainer.publish(used_up, deadline=20).wait(30)
    assert trainer.publish(ONE, deadline=20).wait(30).nbytes > 0
    with pytest.raises(
        errors.ManifestMismatch, match=r"'weight' was not published.*an iterator gives its tensors once"
    ):
        trainer.publish(used_up, deadline=20).wait(30)


def test_nothing_is_left(run: FakeRun) -> None:
    with FakeRun() as other:
        joined, target = other.join("trainer"), other.target("rollout")
        token = Path(other.environ("trainer")["REPLICAS_TOKEN_FILE"])
        assert token.read_text() == other.token
        frozen = other.join("rollout", 1)
        other.freeze(frozen)
        own = replicas.join("policy", endpoint=other.endpoint, token=other.token, group="rollout", replica=2)
        waiting = own.receive()
    with pytest.raises(errors.UsageError, match="channel policy is closed"):
        joined.publish(ONE)
    with pytest.raises(errors.Fenced):
        waiting.wait(20)
    assert target.error is None
    assert not token.exists()
    with pytest.raises(errors.UsageError, match="is over"):
        other.join("trainer")
    assert list(in_process) == [run.endpoint]
    assert not any(thread.name.startswith("virtual rollout/0") for thread in threading.enumerate())


def test_what_is_refused(run: FakeRun) -> None:
    with pytest.raises(errors.UsageError, match='channel "outer" has peers, whose operations need processes'):
        FakeRun({"outer": {"peers": ["trainer"]}})
    with pytest.raises(errors.BadConfig):
        FakeRun({"policy": {"source": ["trainer"]}})
    with pytest.raises(errors.UsageError, match="this fake run has not begun"):
        FakeRun().join("trainer")
    with pytest.raises(errors.UsageError, match='no channel "polcy"'):
        run.status("polcy")

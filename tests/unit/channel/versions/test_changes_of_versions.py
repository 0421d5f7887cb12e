"""What a reader is told of changes, and loads of them alone, version after version."""

from __future__ import annotations

import pytest
import torch

from replicas import errors
from replicas.channel import Channel, Update
from replicas.testing import FakeRun

CALL_S = 20.0


class Trainer:
    def __init__(self, run: FakeRun) -> None:
        self.channel = run.join("trainer")
        self.weights = {"a": torch.arange(100.0), "b": torch.arange(50).to(torch.bfloat16)}

    def publish(self, *changed: int) -> None:
        """A version in which these elements of ``a`` are others."""
        self.weights["a"][list(changed)] += 1000
        self.channel.publish(self.weights, deadline=CALL_S).wait(CALL_S)


def received(rollout: Channel) -> Update:
    return rollout.receive(deadline=CALL_S).wait(CALL_S)


def load(rollout: Channel, model: dict[str, torch.Tensor]) -> Update:
    with received(rollout) as update:
        update.load_into(model, changed_only=update.base > 0)
    return update


def changed(update: Update) -> dict[str, object]:
    """Positions by name; "whole" for those that come whole."""
    return {
        one.name: "whole" if one.whole is not None else one.positions.tolist()
        for one in update.changes()
        if one.whole is not None or len(one.positions)
    }


WHOLE = {"a": "whole", "b": "whole"}


def test_a_reader_loads_what_has_changed_since_the_version_that_it_loaded_last(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    model = {name: torch.zeros_like(one) for name, one in trainer.weights.items()}
    for version, place in enumerate((0, 7, 99), start=1):
        trainer.publish(place)
        update = load(rollout, model)
        assert (update.version, update.base) == (version, version - 1)
        assert all(torch.equal(model[name], one) for name, one in trainer.weights.items())
    trainer.publish()
    with received(rollout) as update:
        assert changed(update) == {}
    trainer.publish(3, 4)
    model["a"][50] = -1
    with received(rollout) as update:
        assert changed(update) == {"a": [3, 4]}
        values = [one.values.tolist() for one in update.changes()]
        assert values == [trainer.weights["a"][3:5].tolist(), []]
        update.load_into(model, changed_only=True)
    assert model["a"][50] == -1, "what the user writes into it stays"


def test_a_tied_tensor_is_told_under_each_of_its_names(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    trainer.weights = {"c": trainer.weights["a"], **trainer.weights, "d": trainer.weights["a"]}
    model = {name: torch.zeros_like(one) for name, one in trainer.weights.items()}
    trainer.publish()
    with received(rollout) as update:
        assert [spec.name for spec in update.manifest.tensors] == ["c", "b"]
        assert [name for name, _ in update] == ["c", "a", "d", "b"]
        assert update.tensors().keys() == model.keys()
        assert all(torch.equal(one, trainer.weights[name]) for name, one in update)
        update.load_into(model)
    trainer.publish(7)
    with received(rollout) as update:
        assert changed(update) == {"c": [7], "a": [7], "d": [7]}
        for one in update.changes():
            model[one.name][one.positions] = one.values
    assert all(torch.equal(model[name], one) for name, one in trainer.weights.items())


def test_a_reader_that_has_loaded_nothing_is_refused(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    trainer.publish()
    model = {name: torch.zeros_like(one) for name, one in trainer.weights.items()}
    with received(rollout) as update:
        with pytest.raises(errors.UsageError, match="this rank has not loaded a whole version before it") as caught:
            update.load_into(model, changed_only=True)
        assert "changed_only=update.base > 0" in str(caught.value)
        assert changed(update) == WHOLE
        update.load_into(model)
    assert torch.equal(model["a"], trainer.weights["a"])
    with pytest.raises(errors.UsageError, match="has ended"):
        update.changes()


def test_a_load_that_failed_leaves_no_base_and_one_that_was_refused_does(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    model = {name: torch.zeros_like(one) for name, one in trainer.weights.items()}
    trainer.publish()
    load(rollout, model)
    trainer.publish(1)
    received(rollout).refuse("not this one")
    trainer.publish(2)
    with pytest.raises(ZeroDivisionError), received(rollout) as update:
        assert update.base == 1
        assert changed(update) == WHOLE, "its slot has the third version"
        raise ZeroDivisionError
    with received(rollout) as update:
        assert (update.base, changed(update)) == (0, WHOLE)


def test_a_publish_overwrites_the_base_and_waits_for_no_reader(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    model = {name: torch.zeros_like(one) for name, one in trainer.weights.items()}
    trainer.publish()
    load(rollout, model)
    trainer.publish(5)
    with received(rollout) as update:
        ours = iter(update.changes())
        assert next(ours).positions.tolist() == [5]
        wanted = {name: one.clone() for name, one in trainer.weights.items()}
        trainer.publish(6)  # there are two slots
        assert next(ours).whole is not None
        assert changed(update) == WHOLE
        update.load_into(model, changed_only=True)
    assert all(torch.equal(model[name], one) for name, one in wanted.items())
    assert load(rollout, model).base == 2
    assert torch.equal(model["a"], trainer.weights["a"])


def test_other_names_or_shapes_come_whole(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    trainer.publish()
    with received(rollout):
        pass
    trainer.weights["c"] = torch.zeros(3)
    trainer.channel.publish(trainer.weights, new_manifest=True, deadline=CALL_S).wait(CALL_S)
    with received(rollout) as update:
        assert update.base == 1
        assert changed(update) == {**WHOLE, "c": "whole"}


def test_the_same_version_once_more_has_no_changes(run: FakeRun) -> None:
    trainer, rollout = Trainer(run), run.join("rollout")
    trainer.publish()
    for base in (0, 1):
        with rollout.receive(at_least=1, deadline=CALL_S).wait(CALL_S) as update:
            assert update.base == base
            assert changed(update) == ({} if base else WHOLE)


def test_the_memory_of_a_base_that_is_gone_is_not_missed(run: FakeRun) -> None:
    old, rollout = Trainer(run), run.join("rollout")
    old.publish()
    with received(rollout):
        pass
    old.channel.close(wait=False)
    new = Trainer(run)
    new.publish(8)
    with received(rollout) as update:
        assert update.base == 1
        assert changed(update) == WHOLE

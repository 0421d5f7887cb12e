"""A load of names that were loaded before checks less, and finds the same.

Covers: weights/loading.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from replicas import errors
from replicas.channel import Update
from replicas.testing import FakeRun
from replicas.weights import loading
from replicas.weights.copies import streaming

Tensors = dict[str, torch.Tensor]
CALL_S = 20.0


def weights() -> Tensors:
    return {
        "a": torch.arange(24.0).reshape(4, 6),
        "b": torch.arange(5),
        "c": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "d": torch.full((3, 3), 7.0),
    }


def model() -> Tensors:
    return {name: torch.zeros_like(value) for name, value in weights().items()}


def swapped(given: Tensors) -> None:
    given["d"] = given.pop("d")
    given["a"] = given.pop("a")


def of_another_dtype(given: Tensors) -> None:
    given["a"] = given["a"].to(torch.float64)


def of_half_the_range(given: Tensors) -> None:
    given["a"] = given["a"].to(torch.float16)


def tied(given: Tensors) -> None:
    given["d"] = given["a"].view(-1)[:9].view(3, 3)


def with_gaps(given: Tensors) -> None:
    given["a"] = torch.zeros(4, 12)[:, ::2]


def expanded(given: Tensors) -> None:
    given["a"] = torch.zeros(1, 6).expand(4, 6)


def of_another_shape(given: Tensors) -> None:
    given["a"] = torch.zeros(6, 4)


def without_one(given: Tensors) -> None:
    del given["b"]


def with_one_more(given: Tensors) -> None:
    given["e"] = torch.zeros(2)


def of_another_name(given: Tensors) -> None:
    given["z"] = given.pop("d")


def freed(given: Tensors) -> None:
    given["a"].untyped_storage().resize_(0)


def sparse(given: Tensors) -> None:
    given["a"] = given["a"].to_sparse()


def none(given: Tensors) -> None:
    given["a"] = None  # type: ignore[assignment]  # a mapping may have such a value


CHANGES = (
    swapped,
    of_another_dtype,
    of_half_the_range,
    tied,
    with_gaps,
    expanded,
    of_another_shape,
    without_one,
    with_one_more,
    of_another_name,
    freed,
    sparse,
    none,
)


@pytest.fixture(scope="module")
def update() -> Iterator[Update]:
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        trainer.publish(weights()).wait(CALL_S)
        with rollout.receive(deadline=CALL_S).wait(CALL_S) as found:
            yield found


def outcome(update: Update, given: Tensors) -> tuple[str, dict[str, list[float]]]:
    """The error's text, and what the model then has."""
    text = ""
    try:
        update.load_into(given)
    except errors.ManifestMismatch as error:
        text = str(error)
    return text, {
        name: []
        if value is None or value.is_sparse or not value.untyped_storage().nbytes()
        else value.double().tolist()
        for name, value in sorted(given.items())
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_a_model_that_has_changed_since(update: Update, change: Callable[[Tensors], None]) -> None:
    found = []
    for known in (False, True):
        loading._MATCHES.clear()
        if known:
            update.load_into(model())
            assert loading._MATCHES or not streaming.available
        given = model()
        change(given)
        found.append(outcome(update, given))
    assert found[0] == found[1]


def test_a_second_load_asks_no_name(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    if not streaming.available:
        pytest.skip("without the code in C torch copies, tensor by tensor")
    loading._MATCHES.clear()
    update.load_into(model())
    monkeypatch.delattr(loading, "_match_names")
    for change in (lambda given: None, lambda given: given.update(a=torch.ones(4, 6))):
        again = model()
        change(again)
        update.load_into(again)
        assert all(torch.equal(again[name], value) for name, value in weights().items())


def test_few_are_remembered(update: Update) -> None:
    loading._MATCHES.clear()
    with FakeRun() as run:
        trainer, rollout = run.join("trainer"), run.join("rollout")
        for size in range(1, 8):
            trainer.publish({"a": torch.ones(size)}, new_manifest=True).wait(CALL_S)
            with rollout.receive(deadline=CALL_S).wait(CALL_S) as found:
                found.load_into({"a": torch.zeros(size)})
    assert len(loading._MATCHES) == (loading._MATCHES_MOST if streaming.available else 0)

"""Orders about versions from outside: the outcome, once it is on disk.

Covers: coordinator/orders.py, config/canary.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from replicas import errors
from replicas.coordinator.orders import carry_out
from replicas.messages import version_orders as orders
from replicas.messages.version_orders import Steered
from replicas.testing import FakeRun

CHANNELS = {
    "policy": {
        "sources": ["trainer"],
        "targets": ["rollout"],
        "follow": "promoted",
        "slots": 3,
        "canary": {"group": "rollout", "promote": "healthy", "soak": "0s"},
    }
}


@pytest.fixture
def run() -> Iterator[FakeRun]:
    with FakeRun(CHANNELS) as run:
        run.join("trainer").publish({"w": torch.ones(2)}).wait(30)
        yield run


def order(run: FakeRun, order: object) -> Steered:
    return run._loop.run(lambda: carry_out(run._coordinator.engine, order), 10)


def test_an_order_returns_what_was_decided(run: FakeRun) -> None:
    assert order(run, orders.Promote(channel="policy")) == Steered(channel="policy", version=1)
    assert run.status("policy").current == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("promote", "must be an order about versions, not 'promote'"),
        (orders.Promote(channel="polcy"), "no channel 'polcy' with versions"),
        (orders.Promote(channel="policy", version="7"), "policy has no version 7"),
    ],
)
def test_a_wrong_order_is_an_error_that_names_what_is_there(run: FakeRun, given: object, said: str) -> None:
    with pytest.raises(errors.UsageError, match=said):
        order(run, given)


def test_a_healthy_canary_promotes(run: FakeRun) -> None:
    canary = run.join("rollout")
    with canary.receive(deadline=20).wait() as update:
        assert update.version == 1
    other = run.join("rollout", 1)
    with other.receive(deadline=20).wait() as update:
        assert update.version == 1
    assert run.status("policy").current == 1

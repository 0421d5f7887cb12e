"""What ends a training when it begins, and what is logged.

Covers: integrations/weight_sync.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.integrations.trl import WeightTransfer
from replicas.integrations.weight_sync import StepSync
from replicas.testing import FakeRun
from tests.support.waits import eventually

GOOD = {"a": torch.ones(3)}


def where(run: FakeRun) -> dict[str, Any]:
    return {"endpoint": run.endpoint, "token": run.token, "group": "trainer"}


def stepping(run: FakeRun, weights: Callable[[Any], object], **more: Any) -> StepSync:
    options: dict[str, Any] = {"every": 1, "dtype": None, "first": True, **more}
    return StepSync("policy", None, 20.0, where(run), weights=weights, **options)


class Source:
    """As ``hf`` of a module that holds a model of transformers."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        raise errors.UsageError(
            "hf: the Module holds a Model as .inner", hint="pass the model itself: hf(module.inner)"
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.metadata()
        return iter(())


def refused(_: object) -> Source:
    return Source()


def unpublishable(_: object) -> dict[str, torch.Tensor]:
    return {"a": torch.ones(3).to_sparse()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("weights", [refused, unpublishable])
def test_what_cannot_be_published_ends_the_training_when_it_begins(
    run: FakeRun, weights: Callable[[Any], object], first: bool
) -> None:
    sync = stepping(run, weights, first=first)
    with pytest.raises(errors.UsageError) as caught:
        sync.begin_training(0, None)
    assert weights is unpublishable or caught.value.hint.endswith(": weights=lambda module: hf(module.inner)")
    assert sync.channel is None, "it has left"
    assert not sync.figures()


def stream(_: object) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(GOOD.items())


def test_a_stream_is_published_at_its_first_step(run: FakeRun) -> None:
    target = run.target("rollout")
    sync = stepping(run, stream, first=False)
    sync.begin_training(0, None)
    sync.step(1, None)
    assert len(sync.leave()) == 1
    eventually(lambda: target.channel.version == 1, "the load of version 1")


def test_a_model_that_becomes_unpublishable_ends_no_training(run: FakeRun, caplog: pytest.LogCaptureFixture) -> None:
    given: list[object] = [GOOD, Source(), GOOD]
    sync = stepping(run, lambda _: given.pop(0))
    with caplog.at_level(logging.WARNING, "replicas.integrations"):
        for step in range(3):
            (sync.step if step else sync.begin_training)(step, None)
        figures = sync.leave()
    assert [one.get("replicas/failed", 0.0) for one in figures].count(1.0) == 1
    assert "training goes on after a failed publish: hf: the Module holds" in caplog.text


def test_trls_first_sync_raises_what_no_later_one_could_do(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.integrations.shared.releases.check", lambda name: None)
    transfer = WeightTransfer(**where(run))
    twice = [*GOOD.items()] * 2
    with pytest.raises(errors.UsageError, match="'a' appears twice"):
        transfer.send_weights(iter(twice))
    assert transfer.channel is None
    transfer.send_weights(iter(GOOD.items()))
    transfer.send_weights(iter(twice))
    transfer.destroy()

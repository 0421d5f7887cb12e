"""The sources of the vLLM release after the one that runs here, which has no wheel for
processors: its weight sources are published, and its workers' engine has the methods
that ours overrides."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from replicas.integrations.vllm_worker.engine import ReplicasEngine
from replicas.testing import FakeRun
from replicas.weights.feed import Feed, Shard
from tests.engines.install import VLLM_NEXT_BASE


@pytest.fixture(scope="module")
def base() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_next_base", Path(sys.prefix) / VLLM_NEXT_BASE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engine_has_the_methods_of_the_next_release(base: ModuleType) -> None:
    theirs = base.WeightTransferEngine
    called = {*theirs.__abstractmethods__, "__init__", "update_weights"}
    assert called >= {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update"}
    for name in sorted(called):
        ours = inspect.signature(getattr(ReplicasEngine, name)).parameters
        wanted = inspect.signature(getattr(theirs, name)).parameters
        assert [*ours] == [*wanted], name
    assert {name for name in dir(ReplicasEngine) if name in dir(theirs)} >= {"parse_init_info", "parse_update_info"}
    assert hasattr(theirs, "supports_draft_weight_update")


def test_its_own_source_of_a_module_is_published(base: ModuleType) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    with FakeRun() as run:
        trainer, target = run.join("trainer"), run.target("rollout")
        trainer.publish(base.ModuleSource(module)).wait(20)
        trainer.loaded(1).wait(20)
        assert target.weights.keys() == module.state_dict().keys()
        assert all(torch.equal(target.weights[name], value) for name, value in module.state_dict().items())


def test_a_source_of_two_ranks_is_published_as_their_pieces(base: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(15.0).reshape(5, 3)

    class Sharded(base.WeightSource):  # type: ignore[name-defined]  # of a module that is loaded here
        @cached_property
        def metadata(self) -> list[Any]:
            return [base.ParamMeta("w", torch.float32, (5, 3), owners=(0, 1), placements=(base.Shard(0),))]

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", whole.chunk(2)[torch.distributed.get_rank()]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank, rows in enumerate((slice(3), slice(3, 5))):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        ((name, piece),) = iter(Feed(Sharded(), mode="parts").weights)  # type: ignore[call-overload]  # it is a stream
        assert name == "w"
        assert isinstance(piece, Shard)
        assert torch.equal(piece.tensor, whole[rows])
        assert (piece.offsets, piece.shape) == ((rows.start or 0, 0), (5, 3))

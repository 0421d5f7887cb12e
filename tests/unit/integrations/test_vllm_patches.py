"""What a vLLM worker writes of a version, with stand-ins for vLLM's modules and a model
that loads as vLLM's do.

Covers: integrations/vllm_worker/patches.py, integrations/vllm_worker/engine.py.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from replicas.integrations.vllm_worker.patches import EnginePatches
from replicas.integrations.vllm_worker.ties import has_head, without_tied_head
from replicas.testing import FakeRun

PATCHES = "vllm.model_executor.model_loader.checkpoint_weight_patch"
CALL_S = 20.0
One = TypeVar("One")
Other = TypeVar("Other")
Weights = dict[str, torch.Tensor]


class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor
    indices: torch.Tensor


class Patcher:
    """As vLLM's: loads tensors with NaN, by copies that leave what is there.

    :ivar given: elements so far, by name.
    :ivar fails: it raises after its first patch.
    """

    def __init__(self) -> None:
        self.given: dict[str, int] = {}
        self.fails = False

    def load(self, model: Any, patches: list[CheckpointWeightPatch], *, validate_unique_indices: bool) -> None:
        copy = torch.Tensor.copy_

        def copy_known(there: torch.Tensor, given: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            return torch.where(given.isnan(), there, given.to(there.dtype), out=there)

        torch.Tensor.copy_ = copy_known  # type: ignore[method-assign,assignment]  # as vLLM does
        try:
            for patch in patches:
                self.given[patch.name] = self.given.get(patch.name, 0) + len(patch.values)
                flat = torch.full((math.prod(patch.shape),), math.nan, dtype=patch.dtype)
                flat[patch.indices.long()] = patch.values
                with torch.no_grad():
                    model.load_weights([(patch.name, flat.view(patch.shape))])
                if self.fails:
                    raise RuntimeError("it dies half-way")
        finally:
            torch.Tensor.copy_ = copy  # type: ignore[method-assign]


class Model(nn.Module):
    """Two projections in one parameter, of which this rank has the first rows; a norm.

    :ivar how: what its loader does otherwise.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(64))
        self.how = how
        if how == "derived":
            self.layer = nn.Module()
            self.layer.W_UV = torch.zeros(2, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        found = set()
        for name, tensor in weights:
            found.add(name)
            rows = {"q": self.qk.data[:4], "k": self.qk.data[4:], "norm": self.norm.data}[name]
            given = tensor[:4] if name in "qk" else tensor
            if self.how == "assigns" and name == "norm":
                rows[:] = given
            else:
                rows.copy_(given)
            if self.how == "computes":
                rows.copy_(rows * 2)
            if self.how == "packs" and name == "q" and not given.isnan().any():
                rows.copy_(given.flip(0))
        return found

    def holds(self, weights: Weights) -> bool:
        rows = torch.cat([weights["q"][:4], weights["k"][:4]])
        return torch.equal(self.qk, rows) and torch.equal(self.norm, weights["norm"])


def checkpoint() -> Weights:
    generator = torch.Generator().manual_seed(1)
    found = {name: torch.randn(8, 16, generator=generator).bfloat16() for name in "qk"}
    return {**found, "norm": torch.randn(64, generator=generator)}


@pytest.fixture
def patcher(monkeypatch: pytest.MonkeyPatch) -> Patcher:
    made = Patcher()
    parts = PATCHES.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    module: Any = sys.modules[PATCHES]
    module.CheckpointWeightPatch, module.load_checkpoint_weight_patches = CheckpointWeightPatch, made.load
    return made


class Server:
    """A worker that loads each version, by patches if it can."""

    def __init__(self, run: FakeRun, model: Model) -> None:
        self.trainer, self.rollout, self.model = run.join("trainer"), run.join("rollout"), model
        self.patches = EnginePatches(model, torch.device("cpu"))

    def sync(self, weights: Weights) -> bool:
        """Publish and load; whether it was patched."""
        self.trainer.publish(weights, deadline=CALL_S).wait(CALL_S)
        with self.rollout.receive(deadline=CALL_S).wait(CALL_S) as update:
            patched = self.patches.apply(update)
            if not patched:
                with torch.no_grad():
                    self.model.load_weights(update)
            self.patches.loaded(update)
        return patched


def test_what_has_changed_is_all_that_is_written(run: FakeRun, patcher: Patcher) -> None:
    server, weights = Server(run, Model()), checkpoint()
    assert not server.sync(weights), "there is nothing to patch"
    weights["q"][1, 2], weights["q"][6, 2], weights["norm"][5] = 3, 4, 0.5
    assert server.sync(weights)
    assert patcher.given == {"q": 2, "norm": 1}
    assert server.model.holds(weights)
    assert server.sync(weights), "nothing has changed"
    weights["norm"] += 1  # whole, and little of the version
    weights["k"][0, 0] = -0.0
    assert not server.sync(weights), "its norm is half of the bytes"
    assert server.model.holds(weights)


def test_each_name_of_a_tied_tensor_is_patched(run: FakeRun, patcher: Patcher) -> None:
    server, weights = Server(run, Model()), checkpoint()
    weights["k"] = weights["q"]
    assert not server.sync(weights)
    weights["q"][0, 3] = 5
    assert server.sync(weights)
    assert patcher.given == {"q": 1, "k": 1}
    assert server.model.holds(weights)


@pytest.mark.parametrize("first", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_that_is_tied_is_given_no_weight(run: FakeRun, first: str, tied: bool) -> None:
    model, weight = nn.Module(), torch.ones(2)
    model.embed, model.lm_head = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    if tied:
        model.lm_head.weight = model.embed.weight
    names = [first, "lm_head.weight", "model.embed_tokens.weight"]
    run.join("trainer").publish({**dict.fromkeys(names, weight), "lm_head.bias": torch.zeros(1)}).wait(CALL_S)
    with run.join("rollout").receive().wait(CALL_S) as update:
        given = [name for name, _ in without_tied_head(update, update.manifest, head=has_head(model))]
    wanted = {"lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"}
    assert set(given) == (wanted - {"lm_head.weight"} if tied else wanted)


@pytest.mark.parametrize("change", [math.nan, "much"])
def test_what_is_no_patch_is_loaded_whole(run: FakeRun, patcher: Patcher, change: Any) -> None:
    server, weights = Server(run, Model()), checkpoint()
    server.sync(weights)
    if change == "much":
        weights["q"] += 1
    else:
        weights["q"][7, 7] = change  # in a row of another rank
    assert not server.sync(weights)
    assert not patcher.given
    assert server.model.holds(weights) or change != "much"


@pytest.mark.parametrize("how", ["computes", "packs", "derived"])
def test_a_model_that_keeps_its_weights_otherwise_is_never_patched(run: FakeRun, patcher: Patcher, how: str) -> None:
    server, weights = Server(run, Model(how)), checkpoint()
    for value in (1.0, 2.0):
        assert not server.sync(weights)
        weights["q"][0, 0] = value
    assert not patcher.given


def test_a_vllm_without_patches_loads_whole(run: FakeRun) -> None:
    assert PATCHES not in sys.modules
    server, weights = Server(run, Model()), checkpoint()
    assert [server.sync(weights), server.sync(weights)] == [False, False]


def test_a_patch_that_is_not_what_was_meant_is_made_good(run: FakeRun, patcher: Patcher) -> None:
    """A loader that writes NaN where something is to stay; and one that dies."""
    server, weights = Server(run, Model("assigns")), checkpoint()
    server.sync(weights)
    weights["norm"][5] = 0.5
    assert not server.sync(weights)
    assert patcher.given == {"norm": 1}
    assert server.model.holds(weights)
    server.model.how, patcher.fails = "", True
    weights["k"][0, 0] = 1
    assert not server.sync(weights)
    assert server.model.holds(weights)
    patcher.fails = False
    weights["k"][0, 0] = 2
    assert server.sync(weights)
    assert server.model.holds(weights)


# ------------------------------------------------------------ in the worker's engine


class Reload:
    """As :class:`replicas.integrations.vllm_worker.reload.EngineReload`; it can die."""

    def __init__(self, model: Model, model_config: object, device: torch.device) -> None:
        self.model, self.dies = model, False
        self.calls: list[str] = []

    def computes_with_freed_scales(self) -> bool:
        return False

    def fits(self, manifest: str) -> bool:
        return True

    def restore_unfinished(self) -> None:
        self.calls.append("abandon")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("load")
        if self.dies:
            raise RuntimeError("it dies half-way")
        with torch.no_grad():
            self.model.load_weights(weights)

    def finish(self) -> None:
        self.calls.append("finish")


@dataclass
class Info:
    pass


class Base(Generic[One, Other]):
    """As vLLM's weight-transfer engine."""

    def __init__(self, config: object, vllm_config: Any, device: torch.device, model: Model) -> None:
        self.vllm_config, self.device, self.model = vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config


@pytest.fixture
def engine(run: FakeRun, patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> Any:
    base: Any = ModuleType("vllm.distributed.weight_transfer.base")
    base.WeightTransferEngine, base.WeightTransferInitInfo, base.WeightTransferUpdateInfo = Base, Info, Info
    reload: Any = ModuleType("replicas.integrations.vllm_worker.reload")
    reload.EngineReload = Reload
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    monkeypatch.delitem(sys.modules, "replicas.integrations.vllm_worker.engine", raising=False)
    module: Any = importlib.import_module("replicas.integrations.vllm_worker.engine")
    monkeypatch.delitem(sys.modules, "replicas.integrations.vllm_worker.engine")
    config = Mock(spec=[])
    config.parallel_config = SimpleNamespace(
        data_parallel_index=0, world_size=1, rank=-1, pipeline_parallel_size=1, enable_expert_parallel=False
    )
    config.model_config = SimpleNamespace(quantization=None)
    config.compilation_config = SimpleNamespace(static_forward_context={})
    made = module.ReplicasEngine(None, config, torch.device("cpu"), Model())
    where = {"endpoint": run.endpoint, "token": run.token, "group": "rollout", "replica": 0}
    made.init_transfer_engine(module.InitInfo(channel="policy", world_size=1, patches=True, **where))
    assert made._patches is None, "a CPU's layers compute with packed weights"
    made._patches = EnginePatches(made.model, made.device)
    made.info = module.UpdateInfo
    return made


def test_a_worker_patches_and_after_a_load_that_died_loads_whole(run: FakeRun, patcher: Patcher, engine: Any) -> None:
    trainer, weights, reload = run.join("trainer"), checkpoint(), engine._reload

    def sync(version: int) -> list[str]:
        trainer.publish(weights, deadline=CALL_S).wait(CALL_S)
        reload.calls.clear()
        for _ in range(2):
            engine.start_weight_update()
            try:
                engine.receive_weights(engine.info(version, timeout_s=CALL_S))
            except RuntimeError:
                reload.dies = patcher.fails = False
                continue
            break
        engine.finish_weight_update()
        assert engine.model.holds(weights)
        return list(reload.calls)

    assert sync(1) == ["abandon", "load", "finish"]
    weights["q"][0, 0] = 1
    assert sync(2) == ["abandon"]
    assert patcher.given == {"q": 1}
    weights["q"][0, 1] = 2
    reload.dies = patcher.fails = True
    assert sync(3) == ["abandon", "load", "abandon", "load", "finish"]
    weights["q"][0, 2] = 3
    assert sync(4) == ["abandon"]
    engine.shutdown()

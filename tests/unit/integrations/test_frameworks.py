"""The code of docs/frameworks.md, run on a channel, with stand-ins for what is each
framework's own."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import replicas
from replicas.testing import FakeRun

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
WEIGHTS = {"a": torch.ones(10), "b": torch.full((3, 2), 2.0)}


def code(section: str, **given: Any) -> Any:
    """What the python of a section defines, where these names are known."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = dict(given)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"{PAGE}: {section}", "exec"), found)
    return types.SimpleNamespace(**found)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRun]:
    with FakeRun() as run:
        for name, value in run.environ("trainer").items():
            monkeypatch.setenv(name, value)
        yield run


def received(run: FakeRun) -> tuple[dict[str, Any], dict[str, float]]:
    """``meta`` and mean values of the newest version."""
    with run.join("rollout", 5) as rollout, rollout.receive(deadline=20).wait() as update:
        return dict(update.meta), {name: float(tensor.mean()) for name, tensor in update}


def test_slime(run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    mirror = run.target("rollout")
    folder = tmp_path / "weight_v000007"
    folder.mkdir()
    save_file(WEIGHTS, folder / "model.safetensors")
    hook = code("slime")
    hook.publish(None, str(folder), [])
    assert mirror.channel.version == 1
    assert received(run) == ({"number": 7}, {"a": 1.0, "b": 2.0})
    hook.channel().close()


def test_areal(run: FakeRun) -> None:
    mirror, calls = run.target("rollout"), []

    class Rollout:
        def __getattr__(self, name: str) -> Any:
            calls.append((name, mirror.channel.version))
            return lambda *_: types.SimpleNamespace(result=lambda: None)

    with replicas.join("policy") as channel:
        code("AReaL").update_weights(channel, WEIGHTS, Rollout(), types.SimpleNamespace(version=3))
    assert calls == [("pause_generation", 0), ("update_weights_from_disk", 1), ("continue_generation", 1)]


def test_prime_rl(run: FakeRun) -> None:
    class WeightBroadcast:
        def __init__(self, output_dir: Path, lora_config: object) -> None: ...

    made = code(
        "prime-rl",
        replicas=replicas,
        WeightBroadcast=WeightBroadcast,
        gather_weights_parallel=lambda model: model,
        convert_state_dict_to_hf=lambda model, weights: weights,
    ).ChannelWeightBroadcast(None)
    run.target("rollout")
    made.broadcast_weights(WEIGHTS, step=12)
    assert received(run) == ({"step": 12}, {"a": 1.0, "b": 2.0})
    made.channel.close()


def test_openrlhf(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    loaded: list[str] = []
    model = types.SimpleNamespace(load_weights=lambda pairs: loaded.extend(name for name, _ in pairs))
    with replicas.join("policy") as trainer, run.join("rollout") as rollout:
        worker = types.SimpleNamespace(channel=rollout, model_runner=types.SimpleNamespace(model=model))
        functions = code("OpenRLHF", hf=lambda module: module, torch=torch, ray=types.SimpleNamespace(get=list))
        remote = types.SimpleNamespace(remote=lambda version: functions.load_version(worker, version))
        engine = types.SimpleNamespace(load_version=remote)
        actor = types.SimpleNamespace(model=types.SimpleNamespace(module=WEIGHTS))
        functions.broadcast_to_vllm(types.SimpleNamespace(channel=trainer, actor=actor, vllm_engines=[engine]))
        assert (rollout.version, loaded) == (1, ["a", "b"])


def test_skyrl(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    calls: list[tuple[str, Any]] = []

    class Client:
        def __getattr__(self, name: str) -> Any:
            async def call(*given: Any, **named: Any) -> None:
                calls.append((name, *given))

            return call

    run.target("rollout")
    chunks = [types.SimpleNamespace(names=[name], tensors=[tensor]) for name, tensor in WEIGHTS.items()]
    with replicas.join("policy") as channel:
        sender = types.SimpleNamespace(channel=channel, inference_client=Client())
        asyncio.run(code("SkyRL", torch=torch).send_chunks(sender, chunks))
        assert calls == [("start_weight_update",), ("update_weights_nccl", {"version": 1}), ("finish_weight_update",)]
        assert received(run)[1] == {"a": 1.0, "b": 2.0}

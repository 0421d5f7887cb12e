"""What LMDeploy's released server makes of a request for weights: its own model of the
request, and the call of each tensor, as its processes make it.

LMDeploy itself needs a GPU: of its wheel the file of requests is here.
"""

from __future__ import annotations

import base64
import importlib.util
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from replicas.integrations.lmdeploy import LmdeployEngine
from replicas.testing import FakeRun

REQUESTS = Path(sys.prefix) / "lmdeploy/serve/openai/protocol.py"
WEIGHTS = {"model.norm.weight": torch.ones(3), "model.layers.0.up.weight": torch.arange(6.0).view(2, 3)}


def test_a_version_passes_lmdeploys_own_request_and_its_calls_return_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shortuuid", ModuleType("shortuuid"))  # for the names of its answers
    monkeypatch.setattr(sys.modules["shortuuid"], "random", str, raising=False)
    found = importlib.util.spec_from_file_location("lmdeploy_requests", REQUESTS)
    assert found is not None
    assert found.loader is not None
    requests = importlib.util.module_from_spec(found)
    found.loader.exec_module(requests)
    sent: list[Any] = []
    engine = LmdeployEngine("http://127.0.0.1:1")

    def post(path: str, body: Any, **_: Any) -> None:
        assert path == "/update_weights"
        sent.append(requests.UpdateParamsRequest.model_validate(body, extra="forbid"))

    monkeypatch.setattr(engine, "post", post)
    loaded = {}
    with FakeRun() as run:
        trainer, server = run.join("trainer"), run.join("rollout")
        trainer.publish(WEIGHTS).wait()
        with server.receive().wait() as update:
            engine.load(update, 5)
            for request in sent:
                for name, (call, arguments) in ForkingPickler.loads(base64.b64decode(request.serialized_named_tensors)):
                    loaded[name] = call(*arguments[:6], "cpu").clone()
    assert [request.finished for request in sent] == [False, True]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in WEIGHTS.items())
    assert loaded.keys() == WEIGHTS.keys()

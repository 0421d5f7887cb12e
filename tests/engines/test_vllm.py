"""The released vLLM, supervised, with a real model: what it answers with, and when.

One start of the server serves all tests; each leaves it serving the newest version.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import Run, eventually, running

MODEL = Path(sys.prefix) / "model"
START_S = 300.0
TENSOR_PARALLEL = int(os.environ.get("TENSOR_PARALLEL", "1"))
CAPITAL = {"model": str(MODEL), "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}

RUN = f"""
[groups.trainer]
launcher = "exec"
command = ["{Path(__file__).parent}/trainer.py", "port"]
[groups.trainer.env]
MODEL = "{MODEL}"
[groups.server]
launcher = "exec"
command = ["-m", "replicas.integrations.vllm", "serve", "{MODEL}", "--dtype", "bfloat16", "--enforce-eager",
  "--max-model-len", "256", "--tensor-parallel-size", "{TENSOR_PARALLEL}"]
restart = {{ max_restarts = 50, window = "1h" }}
[groups.server.env]
VLLM_CPU_KVCACHE_SPACE = "1"
VLLM_CPU_OMP_THREADS_BIND = "nobind"
HF_HUB_OFFLINE = "1"
[channels.policy]
sources = ["trainer"]
targets = ["server"]
"""


class World:
    """The run, its trainer and its server."""

    def __init__(self, run: Run) -> None:
        self.run = run
        port = run.folder / "port"
        eventually(lambda: port.exists() or not run.running, "the trainer", timeout_s=START_S)
        assert run.running, run.said()
        self._trainer = f"http://127.0.0.1:{port.read_text()}/publish"
        self.committed = 0

    @property
    def url(self) -> str:
        """The server's address, which may change with a restart."""

        def look() -> str:
            members = self.run.status().channels[0].members
            return next((one.info["url"] for one in members if "url" in one.info and one.state != "gone"), "")

        return str(eventually(look, "a follower that has joined", timeout_s=START_S))

    def publish(self, **order: Any) -> dict[str, Any]:
        receipt = ask(self._trainer, order)
        assert isinstance(receipt, dict)
        self.committed = receipt["version"]
        return receipt

    def wait_until_served(self, version: int) -> None:
        """Every rank of the server has loaded it, and the server says so."""
        eventually(lambda: self.run.status().groups[1].replicas[0].versions.get("policy", 0) >= version,
                   f"version {version} is loaded", timeout_s=START_S)  # fmt: skip
        assert int(get(f"{self.url}/weight_info")["weight_version"]) >= version

    def answer(self) -> str:
        return str(ask(f"{self.url}/v1/completions", CAPITAL)["choices"][0]["text"])


def ask(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with running(tmp_path_factory.mktemp("vllm"), RUN) as run:
        yield World(run)
        run.signal(signal.SIGTERM)
        assert run.wait(timeout_s=60) == 0
        run.assert_nothing_left()


def test_a_server_answers_nothing_before_its_first_version(world: World) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}/v1/completions", CAPITAL)
    assert refused.value.code == 503
    assert b"no version has been loaded" in refused.value.read()


def test_it_answers_with_the_trainers_weights_and_says_which(world: World) -> None:
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    assert "Paris" in world.answer()
    receipt = world.publish(scale=0.0)
    world.wait_until_served(world.committed)
    assert "Paris" not in world.answer()  # no cached prefix of the version before, either
    receipt = world.publish(scale=1.0)
    world.wait_until_served(receipt["version"])
    assert "Paris" in world.answer()
    assert len(receipt["members"]) == 1 + TENSOR_PARALLEL


def test_the_engines_metrics_and_the_runs_tell_the_same_version(world: World) -> None:
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    with urllib.request.urlopen(f"{world.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    assert f"replicas_engine_version {float(world.committed)}" in lines
    assert "replicas_engine_ready 1.0" in lines


@pytest.mark.parametrize("path", ["/pause", "/update_weights", "/collective_rpc", "/sleep"])
def test_control_routes_are_the_followers_alone(world: World, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}{path}")
    assert refused.value.code == 403

"""A released SGLang that somebody else started, without a gate, and a follower in
another process: what happens to the requests in flight, and what a comparison of the
server's tensors with a version finds.

Covers: integrations/sglang/serve.py, integrations/shared/model_folder.py.
"""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

import replicas
from replicas.engine import PauseMode
from replicas.integrations.sglang import SglangEngine, follow
from tests.engines.plain_server import TrainerSide, plain_server
from tests.engines.sglang_cpu.world import (
    OPTIONS,
    PROMPT,
    ROUNDING,
    VARIABLES,
    answer,
    distance,
    make_model,
    running_requests,
)
from tests.engines.world import ask, get
from tests.support.waits import eventually

OTHER = list(range(300, 364))


class Pair(TrainerSide):
    """A server and what a trainer's program has: a coordinator, a channel, weights."""

    def __init__(self, url: str, model: Path, stack: ExitStack) -> None:
        super().__init__(url, stack)
        self.model = model
        self.weights = load_file(model / "model.safetensors")

    def publish(self, scale: float, **changed: torch.Tensor) -> int:
        weights = {name: tensor * scale for name, tensor in {**self.weights, **changed}.items()}
        return self.trainer.publish(weights, new_manifest=True).wait(60).version

    def following(self, mode: PauseMode) -> AbstractContextManager[object]:
        """A follower of the server."""
        return self.running(partial(follow, self.url, "policy", mode=mode, verify_load="always"))

    def wait_until_served(self, version: int) -> None:
        def served() -> bool:
            said = get(f"{self.url}/model_info")["weight_version"]
            return bool(said == f"{version}" and ready(self.url))

        eventually(served, f"version {version} is served", timeout_s=120)


def ready(url: str) -> bool:
    """The server is not paused."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=30):
        return True
    return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    folder = tmp_path_factory.mktemp("plain")
    command = ["-m", "sglang.launch_server", "--model-path", str(model), *OPTIONS, "--skip-server-warmup"]
    with (
        plain_server(folder, command, "/model_info", {**VARIABLES, "TMPDIR": str(folder)}) as (url, _),
        ExitStack() as stack,
    ):
        yield Pair(url, model, stack)


@pytest.mark.parametrize("mode", get_args(PauseMode))
def test_requests_in_flight_meet_a_load_as_the_mode_says(pair: Pair, mode: PauseMode) -> None:
    with pair.following(mode), ThreadPoolExecutor() as pool:
        before = pair.publish(1.0)
        pair.wait_until_served(before)
        assert answer(pair.url, OTHER)["meta_info"]["weight_version"] == f"{before}"
        request = pool.submit(answer, pair.url, tokens=300)
        eventually(lambda: running_requests(pair.url) == 1, "the request is running", timeout_s=60)
        version = pair.publish(1.5)
        told = request.result(120)["meta_info"]
        pair.wait_until_served(version)
        computed = {
            "keep": ("length", [f"{before}", f"{version}"]),
            "wait": ("length", [f"{before}"]),
            "abort": ("abort", [f"{before}"]),
        }
        assert (told["finish_reason"]["type"], [one["version"] for one in told["weight_versions"]]) == computed[mode]
        found = answer(pair.url, OTHER)
        assert found["meta_info"]["cached_tokens"] == 0
        assert distance(pair.model, 1.5, OTHER, found) < ROUNDING


def test_a_server_that_a_killed_follower_has_left_paused_serves_the_next_version(pair: Pair) -> None:
    for mode in get_args(PauseMode):
        ask(f"{pair.url}/pause_generation", {"mode": "retract"})
        with pair.following(mode):
            pair.wait_until_served(pair.publish(1.0))
            assert distance(pair.model, 1.0, PROMPT, answer(pair.url)) < ROUNDING


def test_a_tensor_that_is_another_than_the_versions_is_named(pair: Pair) -> None:
    engine = SglangEngine(pair.url)
    name = "model.layers.1.mlp.down_proj.weight"
    with replicas.join("policy", group="server", replica=99, **pair.address) as channel:
        engine.wait_until_up(60)
        try:
            pair.publish(1.0)
            with channel.receive().wait(60) as good:
                engine.load(good, 60)
                assert engine.version() == good.version
                assert engine.checksum(good, 60) == ""
            pair.publish(1.0, **{name: pair.weights[name] + 1})
            with channel.receive().wait(60) as other:
                found = engine.checksum(other, 60)
                assert found == f"{name} differ"
        finally:
            engine.close()

"""The released vLLM, supervised, with a real model: what it answers with, and when.

One start of the server serves all tests; each leaves it serving the newest version.

Covers: integrations/vllm_worker/engine.py, integrations/vllm_gate.py.
"""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from tests.engines.world import CAPITAL, TENSOR_PARALLEL, EngineWorld, ask

CONTROL = ["/pause", "/update_weights", "/collective_rpc", "/sleep"]
CONTROL += ["/scale_elastic_ep", "/start_profile", "/stop_profile", "/fault_tolerance/apply"]


def test_a_server_answers_nothing_before_its_first_version(world: EngineWorld) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}/v1/completions", CAPITAL)
    assert refused.value.code == 503
    assert b"no version has been loaded" in refused.value.read()


def test_it_answers_with_the_trainers_weights_and_says_which(world: EngineWorld) -> None:
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


def test_the_engines_metrics_and_the_runs_tell_the_same_version(world: EngineWorld) -> None:
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    with urllib.request.urlopen(f"{world.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    assert f"replicas_engine_version {float(world.committed)}" in lines
    assert "replicas_engine_ready 1.0" in lines


@pytest.mark.parametrize("path", [*CONTROL, "/pause%0a"])
def test_control_routes_are_the_followers_alone(world: EngineWorld, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}{path}")
    assert refused.value.code == (400 if "%" in path else 403)

"""LoRA adapters of a channel in the released vLLM."""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator

import pytest

from tests.engines.world import CAPITAL, ONE_PROCESS, START_S, EngineWorld, ask, running_world
from tests.support.waits import eventually


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWorld]:
    with running_world(tmp_path_factory.mktemp("lora"), "--lora", *ONE_PROCESS) as world:
        yield world


def test_adapters_are_named_by_version_and_the_newest_one_answers(world: EngineWorld) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}/v1/completions", CAPITAL)
    assert refused.value.code == 503  # no adapter yet
    loud, still = (world.publish(adapter=scale)["version"] for scale in (1.0, 0.0))
    eventually(lambda: world.adapters() == [f"math@{still}"], "the newest adapter alone is served", timeout_s=START_S)
    found = world.complete(model="math")
    assert found["model"] == f"math@{still}"
    assert "Paris" in found["choices"][0]["text"]  # an adapter of zeros
    again = world.publish(adapter=1.0)["version"]
    eventually(lambda: world.adapters() == [f"math@{again}"], "the next one", timeout_s=30)
    assert "Paris" not in world.answer(model="math")
    assert "Paris" in world.answer()
    assert again > still > loud


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/adapters", "/adapters/math"])
def test_adapters_come_from_the_follower_alone(world: EngineWorld, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}{path}", {"lora_name": "x", "lora_path": "/tmp", "name": "x", "src": "/tmp"})
    assert refused.value.code == 403

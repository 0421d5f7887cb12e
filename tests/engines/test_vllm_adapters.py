"""Adapters of ``hf(model, adapter="only")`` in the released vLLM, by kind: the server
then answers as transformers with PEFT does, or refuses the adapter, and goes on.

Covers: integrations/vllm_adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from replicas.engine import Refused
from replicas.integrations.vllm_adapters import VllmAdapters
from replicas.sources import hf
from replicas.testing import FakeRun
from tests.engines.plain_server import plain_vllm
from tests.engines.programs.architectures import ARCHITECTURES, IDS, TOKENS, greedy_error, make, true_answer
from tests.engines.world import MODEL, ask, get

ROUNDING = 1e-3
"""Of log-probabilities in float32; those of another adapter differ by 0.2 or more."""
TARGETS = ["q_proj", "down_proj"]
TAKEN: Mapping[str, Mapping[str, Any]] = {
    "LoRA": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "all linear layers": {"target_modules": "all-linear"},
    "one layer": {"layers_to_transform": [1]},
}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA"),
    "a saved head": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "biases of the model": ({"bias": "lora_only"}, "bias"),
    "biases of the adapter": ({"lora_bias": True}, "LoRA bias"),
}
KIND, CONFIG, _ = ARCHITECTURES["Qwen2"]


def tuned(**options: Any) -> Any:
    """The server's model with a random adapter."""
    base = make(KIND, {**CONFIG, "vocab_size": 49152}, 0, torch.float32)
    made = get_peft_model(base, LoraConfig(r=4, **{"target_modules": TARGETS, **options})).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.3)
    return made


class World:
    """A server and its verbs."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._verbs = url, VllmAdapters(url, folder)

    def load(self, kind: str, model: Any) -> str:
        """Publish and load an adapter; its name in the server."""
        with FakeRun() as run:  # another kind has other tensors
            rollout, trainer = run.join("rollout"), run.join("trainer")
            trainer.publish(hf(model, adapter="only"), adapter=kind.replace(" ", "-")).wait(60)
            with rollout.receive().wait() as update:
                self._verbs.load(update, 60)
        return self._verbs.model()

    def error(self, name: str, of: Any) -> float:
        """Of log-probabilities of the prompt, on average, against transformers'."""
        rows = self._complete(name, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        served = [row[f"{token}"]["logprob"] for row, token in zip(rows[1:], IDS[1:], strict=True)]
        return float((torch.tensor(served) - true_answer(of)).abs().mean())

    def decoded(self, name: str) -> list[int]:
        told = self._complete(name, max_tokens=TOKENS, logprobs=0, return_tokens_as_token_ids=True)
        return [int(token.partition(":")[2]) for token in told["logprobs"]["tokens"]]

    def _complete(self, name: str, **options: Any) -> Any:
        asked = {"model": name, "prompt": IDS, "temperature": 0, "ignore_eos": True, **options}
        return ask(f"{self.url}/v1/completions", asked)["choices"][0]

    def adapters(self) -> set[str]:
        return {one["id"] for one in get(f"{self.url}/v1/models")["data"] if one.get("parent")}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("vllm")
    tuned().unload().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder / "model")
    options = ["--dtype", "float32", "--max-model-len", "128", "--enable-lora", "--max-lora-rank", "8"]
    (folder / "adapters").mkdir()
    with plain_vllm(folder, folder / "model", *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as (url, _):
        yield World(url, folder / "adapters")


@pytest.mark.parametrize("kind", TAKEN)
def test_an_adapter_answers_as_with_peft(world: World, kind: str) -> None:
    model = tuned(**TAKEN[kind])
    name = world.load(kind, model)
    assert world.error(name, model) < ROUNDING
    assert greedy_error(model, world.decoded(name)) < ROUNDING
    with model.disable_adapter():
        assert world.error(name, model) > 0.2


@pytest.mark.parametrize("kind", REFUSED)
def test_an_adapter_that_vllm_does_not_know_is_refused(world: World, kind: str) -> None:
    options, word = REFUSED[kind]
    before = world.adapters()
    with pytest.raises(Refused, match=word):
        world.load(kind, tuned(**options))
    assert world.adapters() == before

"""A released vLLM with a small random model, that somebody else started and that a
trainer in the test's process publishes to: loads and answers take milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from replicas import errors
from replicas.engine import PauseMode
from replicas.integrations.vllm import follow
from replicas.integrations.vllm_verbs import VllmEngine
from replicas.sources import hf
from tests.engines.plain_server import TrainerSide, plain_vllm
from tests.engines.programs.small_model import CONFIG, fill
from tests.engines.world import MODEL, get
from tests.support.field.worlds import ask
from tests.support.waits import eventually

__all__ = ["ANSWER_S", "Server", "clear_nothing_in_a_pause", "difference", "server"]

OPTIONS = ["--max-model-len", "512", "--served-model-name", "small"]
ADAPTER = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
ANSWER_S = 600.0
"""On a busy machine a step takes half a second."""


class Server(TrainerSide):
    """The server, and what the trainer's program has: a coordinator, a channel, a
    model.

    :ivar pid: of the API process.
    """

    def __init__(self, url: str, pid: int, model: PreTrainedModel, stack: ExitStack) -> None:
        super().__init__(url, stack)
        self.pid, self._model = pid, model
        self._adapted: Any = None
        self._seed = 0

    def publish(self) -> int:
        """Publish other random weights; the version."""
        self._seed += 1
        fill(self._model, self._seed)
        return self.trainer.publish(hf(self._model)).wait(60).version

    def publish_adapter(self, seed: int) -> int:
        """Publish a random LoRA adapter, the same one for the same seed; the version
        (the adapter's name is ``math@VERSION``)."""
        if self._adapted is None:
            self._adapted = get_peft_model(self._model, ADAPTER)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, value in self._adapted.named_parameters():
                if "lora_" in name:
                    value.normal_(std=0.3)
        return self.trainer.publish(hf(self._adapted, adapter="only"), adapter="math").wait(60).version

    def adapters(self) -> list[str]:
        """Names of the adapters that the server lists."""
        return [one["id"] for one in get(f"{self.url}/v1/models")["data"] if one.get("parent")]

    def following(
        self, mode: PauseMode = "keep", *, through: str = "", fails: bool = False, **more: Any
    ) -> AbstractContextManager[list[errors.ReplicasError]]:
        """A follower on a thread, perhaps through a proxy; what it failed of.

        :param more: of :func:`replicas.integrations.vllm.follow`.
        """
        follows = partial(follow, through or self.url, "policy", mode=mode, min_serving=0, **more)
        return self.running(follows, fails=fails)

    def wait_until_served(self, version: int) -> None:
        def served() -> bool:
            return bool(get(f"{self.url}/weight_info")["weight_version"] == str(version)) and not self.is_paused()

        eventually(served, f"version {version} is served", timeout_s=300)

    def is_paused(self) -> bool:
        return bool(get(f"{self.url}/is_paused")["is_paused"])

    def complete(self, prompt: list[int], **more: Any) -> Any:
        """The first choice after a prompt of token ids, with log-probabilities."""
        asked = {"model": "small", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        asked |= {"return_tokens_as_token_ids": True, "ignore_eos": True}
        return ask(f"{self.url}/v1/completions", {**asked, **more}, timeout_s=ANSWER_S)["choices"][0]


def text_model(folder: Path) -> PreTrainedModel:
    """Write a small model of text, and return it."""
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def server(
    folder: Path, *options: str, written: Callable[[Path], PreTrainedModel] = text_model, **environment: str
) -> Iterator[Server]:
    """One with these options of vLLM's, ended at the end.

    :param written: writes the model into a folder.
    """
    model = written(folder / "model")
    with (
        plain_vllm(folder, folder / "model", *OPTIONS, *options, dies=True, **environment) as (url, process),
        ExitStack() as stack,
    ):
        yield Server(url, process.pid, model, stack)


def difference(some: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Between log-probabilities of the best tokens that both have; on average."""
    both = some.keys() & others.keys()
    return sum(abs(some[token] - others[token]) for token in both) / len(both) if both else math.inf


def clear_nothing_in_a_pause(patch: pytest.MonkeyPatch) -> None:
    """Let a pause leave all caches alone; this release clears them by default."""

    def pause(self: VllmEngine, mode: PauseMode, timeout_s: float) -> None:
        self.post("/pause", query={"mode": mode, "clear_cache": "false"}, timeout_s=timeout_s, serving=True)

    patch.setattr(VllmEngine, "pause", pause)

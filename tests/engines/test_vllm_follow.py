"""A released vLLM that somebody else started, without a gate, and a follower in another
process: what happens to the requests in flight when a version is loaded."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas import Update, engine
from replicas.engine import Engine, PauseMode
from replicas.integrations.vllm import follow
from replicas.sources import hf
from tests.engines.plain_server import TrainerSide, plain_vllm
from tests.engines.world import CAPITAL, MODEL, ask, get
from tests.support.waits import eventually

TEXT = "The sum of 7 and 12 is 19, and the capital of France is Paris."
NOISE = 0.2
ROUNDING = 0.1
"""Of log-probabilities in bfloat16, on average."""
LONG = {**CAPITAL, "max_tokens": 100, "ignore_eos": True}


class Pair(TrainerSide):
    """A server and what a trainer's program has: a coordinator, a channel, a model."""

    def __init__(self, url: str, stack: ExitStack, **channel: Any) -> None:
        super().__init__(url, stack, **channel)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)

    def publish(self, *, without: str = "no name has this") -> int:
        """Publish the model's weights, but those with a part of their names."""
        weights = {name: tensor for name, tensor in hf(self.model) if without not in name}
        return self.trainer.publish(weights, new_manifest=True).wait(60).version

    def logprobs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the tokens of a text, by the trainer's model and by the server."""
        ids = AutoTokenizer.from_pretrained(MODEL)(TEXT)["input_ids"]
        with torch.no_grad():
            found = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        asked = {"model": str(MODEL), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = ask(f"{self.url}/v1/completions", asked)["choices"][0]["prompt_logprobs"]
        served = [row[str(token)]["logprob"] for row, token in zip(answer[1:], ids[1:], strict=True)]
        return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], torch.tensor(served)

    def following(self, mode: PauseMode, **more: Any) -> AbstractContextManager[object]:
        """A follower of the server."""
        return self.running(partial(follow, self.url, "policy", mode=mode, **more))

    def served(self) -> str:
        return str(get(f"{self.url}/weight_info")["weight_version"])

    def wait_until_served(self, version: int) -> None:
        eventually(lambda: self.served() == f"{version}", f"version {version} is served", timeout_s=120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("plain")
    with plain_vllm(folder, MODEL, "--max-model-len", "256") as (url, _), ExitStack() as stack:
        yield Pair(url, stack)


@pytest.mark.parametrize("part", ["embed_tokens", "self_attn", "mlp", "norm"])
def test_the_server_computes_with_every_part_of_the_new_version(pair: Pair, part: str) -> None:
    """The output layer shares the embedding's weight, and has a packed copy of it."""
    parameters = [value for name, value in pair.model.named_parameters() if part in name]
    before = [value.detach().clone() for value in parameters]
    torch.manual_seed(1)
    with pair.following("keep"), torch.no_grad():
        old, _ = pair.logprobs()
        for value in parameters:
            value += NOISE * value.float().std() * torch.randn(value.shape)
        pair.wait_until_served(pair.publish())
        new, served = pair.logprobs()
        for value, good in zip(parameters, before, strict=True):
            value.copy_(good)
        assert (new - served).abs().mean() < (new - old).abs().mean() / 3  # rounding grows with the noise
        pair.wait_until_served(pair.publish())
        assert (old - pair.logprobs()[1]).abs().mean() < ROUNDING


@pytest.mark.parametrize("mode", get_args(PauseMode))
def test_requests_in_flight_meet_a_load_as_the_mode_says(pair: Pair, mode: PauseMode) -> None:
    with pair.following(mode), ThreadPoolExecutor() as pool:
        pair.wait_until_served(pair.publish())
        request: Future[Any] = pool.submit(ask, f"{pair.url}/v1/completions", LONG)
        eventually(lambda: running_requests(pair.url) == 1, "the request is running", timeout_s=60)
        version = pair.publish()
        (choice,) = request.result(120)["choices"]
        pair.wait_until_served(version)
        if mode == "abort":
            assert choice["finish_reason"] == "abort"
        else:
            assert choice["finish_reason"] == "length"
            assert choice["text"].strip().startswith("Paris")
        assert ask(f"{pair.url}/v1/completions", CAPITAL)["choices"][0]["text"].strip().startswith("Paris")


def running_requests(url: str) -> float:
    """By the engine's own metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


class Picky(Engine):
    """A target without a server, that takes versions with these names only, and says so
    when it may. It is asked once for each set of tensors.

    :ivar says: it is clear while that is not to be known.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.says = threading.Event()
        self.says.set()
        self.asked: list[int] = []
        self.loaded: list[int] = []

    def check(self, update: Update, timeout_s: float) -> str:
        self.asked.append(update.version)
        assert self.says.wait(60)
        missing = self._names - {spec.name for spec in update.manifest.tensors}
        return f"it has no {min(missing)}" if missing else ""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        pass

    def load(self, update: Update, timeout_s: float) -> None:
        self.loaded.append(update.version)

    def reset_caches(self, timeout_s: float) -> None:
        pass

    def resume(self, timeout_s: float) -> None:
        pass


def test_a_server_loads_a_version_when_the_other_target_can_or_not_at_all(pair: Pair) -> None:
    """The channel has ``adopt_together``; the server takes versions without norms."""
    picky = Picky({name for name, _ in hf(pair.model) if "norm" in name})
    with ExitStack() as stack:
        together = Pair(pair.url, stack, adopt_together=True)
        stack.enter_context(together.following("keep", complete=False))
        stack.enter_context(together.running(partial(engine.follow, picky, "policy", min_serving=0.0)))
        eventually(lambda: len(together.trainer.members) == 4, "server, its worker, the other and the trainer")
        first = together.publish()
        together.wait_until_served(first)
        second = together.publish(without="norm")
        eventually(lambda: second in picky.asked, "the other refuses it")
        assert together.served() == f"{first}"
        assert "Paris" in ask(f"{pair.url}/v1/completions", CAPITAL)["choices"][0]["text"]
        picky.says.clear()
        third = together.publish(without="embed_tokens")
        eventually(lambda: third in picky.asked, "the other looks at it")
        assert together.served() == f"{first}", "it waits for the other"
        assert "Paris" in ask(f"{pair.url}/v1/completions", CAPITAL)["choices"][0]["text"], "and is not paused"
        picky.says.set()
        together.wait_until_served(third)
        eventually(lambda: picky.loaded == [first, third], "the other has it, too")

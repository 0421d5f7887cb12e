"""A released vLLM that somebody else started, without a gate, and a follower in another
process: what happens to the requests in flight when a version is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import replicas
from replicas import Coordinator, errors
from replicas.engine import PauseMode
from replicas.integrations.vllm import follow
from replicas.linux.processes import die_with_parent
from replicas.sources import hf
from tests.engines.world import CAPITAL, MODEL, START_S, VLLM_OPTIONS, ask, get
from tests.support.waits import eventually

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
TEXT = "The sum of 7 and 12 is 19, and the capital of France is Paris."
NOISE = 0.2
ROUNDING = 0.1
"""Of log-probabilities in bfloat16, on average."""
LONG = {**CAPITAL, "max_tokens": 100, "ignore_eos": True}
DRAFT = '{"model": "%s", "method": "draft_model", "num_speculative_tokens": 2}'


@contextmanager
def plain_vllm(folder: Path, *options: str, **environment: str) -> Iterator[str]:
    """vLLM's own server with the backend "replicas"; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL), *VLLM_OPTIONS, *options]
    command += ["--host", "127.0.0.1", "--port", f"{port}", "--weight-transfer-config", '{"backend": "replicas"}']
    log = folder / "vllm.log"
    with log.open("wb") as file:
        parent, variables = os.getpid(), {**os.environ, **ENVIRONMENT, **environment}
        process = subprocess.Popen(
            command, env=variables, stdout=file, stderr=file, preexec_fn=lambda: die_with_parent(parent)
        )

    def healthy() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            get(f"http://127.0.0.1:{port}/health")
        except ValueError:  # the answer has no body
            return True
        except OSError:
            return False
        return True

    try:
        eventually(healthy, "a healthy server", timeout_s=START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


class Pair:
    """A server and what a trainer's program has: a coordinator, a channel, a model."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self.url = url
        channels = {"policy": {"sources": ["trainer"], "targets": ["server"], "slots": 3}}
        coordinator = stack.enter_context(Coordinator(channels, groups={"server": 100}).in_thread())
        self.address: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        self.trainer = stack.enter_context(replicas.join("policy", group="trainer", **self.address))
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        self._followers = 0

    def publish(self) -> int:
        return self.trainer.publish(hf(self.model)).wait(60).version

    def logprobs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the tokens of a text, by the trainer's model and by the server."""
        ids = AutoTokenizer.from_pretrained(MODEL)(TEXT)["input_ids"]
        with torch.no_grad():
            found = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        asked = {"model": str(MODEL), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = ask(f"{self.url}/v1/completions", asked)["choices"][0]["prompt_logprobs"]
        served = [row[str(token)]["logprob"] for row, token in zip(answer[1:], ids[1:], strict=True)]
        return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], torch.tensor(served)

    @contextmanager
    def following(self, mode: PauseMode) -> Iterator[None]:
        """A follower in a thread; each is a replica of its own."""
        stop, failed = threading.Event(), []
        identity = {"group": "server", "replica": self._followers, **self.address}
        self._followers += 1

        def run() -> None:
            try:
                follow(self.url, "policy", mode=mode, stop=stop, **identity)
            except errors.ReplicasError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)
        assert not failed
        assert not thread.is_alive()

    def served(self) -> str:
        return str(get(f"{self.url}/weight_info")["weight_version"])

    def wait_until_served(self, version: int) -> None:
        eventually(lambda: self.served() == f"{version}", f"version {version} is served", timeout_s=120)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack.enter_context(plain_vllm(tmp_path_factory.mktemp("plain"))), stack)


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


def test_a_server_with_a_draft_model_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(stack.enter_context(plain_vllm(tmp_path, "--speculative-config", DRAFT % MODEL)), stack)
        with pytest.raises(errors.SyncError, match="decodes speculatively with a draft model"):
            follow(pair.url, "policy", group="server", replica=0, **pair.address)

"""A released vLLM with a small random model, that somebody else started and that a
trainer in the test's process publishes to: loads and answers take milliseconds."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import replicas
from replicas import Coordinator, errors
from replicas.engine import PauseMode
from replicas.integrations.vllm import follow
from replicas.linux.processes import die_with_parent
from replicas.sources import hf
from tests.engines.world import MODEL, START_S, get
from tests.support.field.worlds import ask
from tests.support.waits import eventually

__all__ = ["ANSWER_S", "ENVIRONMENT", "Server", "server"]

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1"]
OPTIONS += ["--weight-transfer-config", '{"backend": "replicas"}', "--served-model-name", "small"]
ANSWER_S = 600.0
"""On a busy machine a step takes half a second."""
CONFIG = LlamaConfig(
    vocab_size=49152,  # of the tokenizer
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


class Server:
    """The server, and what the trainer's program has: a coordinator, a channel, a
    model.

    :ivar pid: of the API process.
    """

    def __init__(self, url: str, pid: int, stack: ExitStack) -> None:
        self.url, self.pid = url, pid
        channels = {"policy": {"sources": ["trainer"], "targets": ["server"], "slots": 3}}
        coordinator = stack.enter_context(Coordinator(channels, groups={"server": 100}).in_thread())
        self._address: dict[str, Any] = {"endpoint": coordinator.endpoint, "token": coordinator.token}
        self.trainer = stack.enter_context(replicas.join("policy", group="trainer", **self._address))
        self._model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
        self._seed = self._followers = 0

    def publish(self) -> int:
        """Publish other random weights; the version."""
        self._seed += 1
        torch.manual_seed(self._seed)
        with torch.no_grad():
            for value in self._model.parameters():
                if value.ndim > 1:
                    value.normal_(std=0.3)
        return self.trainer.publish(hf(self._model)).wait(60).version

    def identity(self) -> dict[str, Any]:
        """Of the next follower: each is a replica of its own."""
        self._followers += 1
        return {"group": "server", "replica": self._followers, **self._address}

    @contextmanager
    def following(
        self, mode: PauseMode = "keep", *, through: str = "", fails: bool = False
    ) -> Iterator[list[errors.ReplicasError]]:
        """A follower on a thread, perhaps through a proxy; what it failed of."""
        stop, failed, identity = threading.Event(), list[errors.ReplicasError](), self.identity()

        def run() -> None:
            try:
                follow(through or self.url, "policy", mode=mode, min_serving=0, stop=stop, **identity)
            except errors.ReplicasError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield failed
        finally:
            stop.set()
            thread.join(120)
        assert not thread.is_alive()
        assert bool(failed) is fails, failed

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


@contextmanager
def server(folder: Path, *options: str, **environment: str) -> Iterator[Server]:
    """One with these options of vLLM's, ended at the end."""
    model = folder / "model"
    LlamaForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(model)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *OPTIONS, *options]
    log, parent = folder / "vllm.log", os.getpid()
    with log.open("wb") as file, ExitStack() as stack:
        process = subprocess.Popen(
            [*command, "--port", f"{port}"],
            env={**os.environ, **ENVIRONMENT, **environment},
            stdout=file,
            stderr=file,
            preexec_fn=lambda: die_with_parent(parent),
        )
        stack.callback(_end, process)

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                get(f"http://127.0.0.1:{port}/health")
            except ValueError:  # the answer has no body
                return True
            except OSError:
                return False
            return True

        eventually(healthy, "a healthy server", timeout_s=START_S)
        yield Server(f"http://127.0.0.1:{port}", process.pid, stack)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):  # its engine may be dead
        process.wait(30)
    process.kill()
    process.wait()

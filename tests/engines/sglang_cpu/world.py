"""SGLang's released server on a CPU: supervised by a run, or on its own, with a tiny
model whose answers show which version computed them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.engines.world import MODEL, EngineWorld, _children, ask, get

__all__ = [
    "OPTIONS",
    "ROUNDING",
    "START_S",
    "VARIABLES",
    "SglangWorld",
    "answer",
    "distance",
    "make_model",
    "run_text",
    "running_requests",
    "serve",
]

HERE = Path(__file__).parent
START_S = 1800.0
"""SGLang imports for a minute on two cores, and for many on busy ones."""
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-overlap-schedule", "--cuda-graph-backend-decode=disabled"),
    *("--cuda-graph-backend-prefill=disabled", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
]
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE / "stand_ins"), os.environ.get("PYTHONPATH")))),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}
PROMPT = list(range(100, 164))
ROUNDING = 0.2
"""Of log-probabilities in bfloat16, on average; those of other versions are off by
more than 1."""


def make_model(folder: Path) -> None:
    """A model of two layers with random weights, and SmolLM2's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)


def run_text(model: Path, *options: str, **environment: str) -> str:
    """A run of a trainer and one SGLang server with further options and variables."""
    command = ["-m", "replicas.integrations.sglang", "serve", str(model), *OPTIONS, *options]
    variables = "\n".join(f"{name} = {json.dumps(value)}" for name, value in {**VARIABLES, **environment}.items())
    return f"""
[groups.trainer]
launcher = "exec"
command = ["{HERE.parent}/programs/trainer.py", "port"]
[groups.trainer.env]
MODEL = "{model}"
[groups.server]
launcher = "exec"
command = {json.dumps(command)}
restart = {{ max_restarts = 100, window = "1h", initial_delay = "0s", no_progress_cycles = 0 }}
health = {{ start_timeout = "30m" }}
[groups.server.env]
{variables}
[channels.policy]
sources = ["trainer"]
targets = ["server"]
slots = 3
"""


class SglangWorld(EngineWorld):
    """A run with a SGLang server."""

    def says(self, replica: int) -> int:
        return int(get(f"{self.url_of(replica)}/model_info")["weight_version"])

    def processes(self, replica: int = 0) -> dict[str, int]:
        """The living processes of a server, by role: follower, server, detokenizer,
        scheduler0 and so on."""
        follower = self.servers()[replica].pid
        assert follower is not None
        (server,) = _children(follower, "replicas.integrations.sglang.server")
        (detokenizer,) = _children(server, "sglang::detokenizer")
        controllers = _children(server, "sglang::data_parallel")  # of several replicas of the model
        found = [pid for parent in (server, *controllers) for pid in _children(parent, "sglang::scheduler")]
        schedulers = {f"scheduler{number}": pid for number, pid in enumerate(found)}
        return {"follower": follower, "server": server, "detokenizer": detokenizer, **schedulers}


def serve(world: SglangWorld, scale: float) -> int:
    """Publish the weights times a factor; return the version, which is served."""
    world.publish(scale=scale)
    world.wait_until_served(world.committed)
    return world.committed


def answer(url: str, prompt: list[int] = PROMPT, *, tokens: int = 8) -> Mapping[str, Any]:
    """Greedy tokens after a prompt of token ids: ``output_ids`` and ``meta_info``."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    found: dict[str, Any] = ask(
        f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    )
    return found


def running_requests(url: str) -> int:
    """By the server's own account."""
    return sum(int(one["num_running_reqs"]) for one in get(f"{url}/v1/loads")["loads"])


def distance(model: Path, scale: float, prompt: list[int], found: Mapping[str, Any]) -> float:
    """How far an answer's log-probabilities are from those of the model, whose weights
    are multiplied by a factor; on average."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(scale)
        ids = [*prompt, *found["output_ids"]]
        told = reference(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    ours = told[len(prompt) - 1 : -1].gather(1, torch.tensor(found["output_ids"])[:, None])[:, 0]
    theirs = torch.tensor([one[0] for one in found["meta_info"]["output_token_logprobs"]])
    return float((ours - theirs).abs().mean())

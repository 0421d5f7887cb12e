"""A real vLLM that follows LoRA adapters, with room for a single one: reports of group
F in docs/field.md.

One server serves all scenes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas import errors
from replicas.integrations.vllm import follow
from replicas.linux.processes import descendants
from tests.engines.test_vllm_follow import running_requests
from tests.engines.world import ask
from tests.field.engines.small import ANSWER_S, Server, server
from tests.support.waits import eventually

pytestmark = pytest.mark.timeout(1800)

VERSIONS = int(os.environ.get("FIELD_VERSIONS", "200"))
WARM = VERSIONS // 4
GROWS_MAX = 24 * 2**20
"""Bytes of all processes of the server over 150 adapters of 33 kB, of which 2 MiB are
of the adapters if each is kept once."""
IN_FLIGHT, LOADS = 3, 2
TOKENS = int(os.environ.get("FIELD_TOKENS", "250"))
FRESH, STALE = 0.2, 0.5
"""Mean difference of log-probabilities in bfloat16, of the same adapter and of
another."""
PROMPT = [int(word) for word in (torch.arange(40) * 37 % 20000 + 100).tolist()]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1", "--max-lora-rank", "8")
    with server(tmp_path_factory.mktemp("adapters"), *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as found:
        found.complete(PROMPT)  # a first one with log-probabilities compiles
        yield found


def load(vllm: Server, seed: int) -> str:
    """Publish an adapter; its name, which the server lists alone."""
    name = f"math@{vllm.publish_adapter(seed)}"
    eventually(lambda: vllm.adapters() == [name], f"{name} alone is served", timeout_s=300)
    return name


def memory(vllm: Server) -> int:
    """Bytes of all processes of the server, what they share counted once."""
    found = 0
    for pid in (vllm.pid, *descendants(vllm.pid)):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return found


def scored(vllm: Server, name: str, tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens after the prompt, by an adapter."""
    asked = {"model": name, "prompt": [*PROMPT, *tokens], "max_tokens": 1, "prompt_logprobs": 0}
    answer = ask(f"{vllm.url}/v1/completions", asked)["choices"][0]["prompt_logprobs"]
    return [answer[len(PROMPT) + at][str(token)]["logprob"] for at, token in enumerate(tokens)]


def test_trl_7017_requests_of_an_old_adapter_end_with_it_where_one_has_room(vllm: Server) -> None:
    """A new adapter is loaded before the old one is unloaded, and requests of the old
    one are in flight over several loads: each ends, with its own adapter."""
    with vllm.following(lora=True), ThreadPoolExecutor() as pool:
        old = load(vllm, seed=1)
        prompts = [[*PROMPT, 1000 + number] for number in range(IN_FLIGHT)]
        flying = [pool.submit(vllm.complete, prompt, model=old, max_tokens=TOKENS) for prompt in prompts]
        eventually(lambda: running_requests(vllm.url) == IN_FLIGHT, "the requests run", timeout_s=60)
        new = [load(vllm, seed) for seed in range(2, 2 + LOADS)]
        assert not any(request.done() for request in flying), "the loads came too late: let the requests be longer"
        waiting = pool.submit(vllm.complete, PROMPT, model=new[-1])
        choices = [request.result(ANSWER_S) for request in flying]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * IN_FLIGHT
        assert waiting.result(ANSWER_S)["finish_reason"] == "length"
        again = load(vllm, seed=1)
        for prompt, choice in zip(prompts, choices, strict=True):
            assert away(vllm, again, prompt, choice) < FRESH
        other = load(vllm, seed=2)
        assert min(away(vllm, other, *pair) for pair in zip(prompts, choices, strict=True)) > STALE


def away(vllm: Server, name: str, prompt: list[int], choice: Any) -> float:
    """How far an answer's log-probabilities are from those by an adapter, on
    average."""
    tokens = [int(token.partition(":")[2]) for token in choice["logprobs"]["tokens"]]
    told = torch.tensor(scored(vllm, name, [*prompt[len(PROMPT) :], *tokens])[len(prompt) - len(PROMPT) :])
    return float((told - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().mean())


def test_areal_1385_adapters_of_many_steps_are_unloaded(vllm: Server) -> None:
    with vllm.following(lora=True):
        began: list[float] = []
        for number in range(VERSIONS + 1):
            began.append(time.monotonic())
            if number == WARM:
                before = memory(vllm)
            name = load(vllm, seed=number)
            vllm.complete(PROMPT, model=name)
        grown = memory(vllm) - before
        took = torch.tensor(began).diff()
        first, last = (float(some.quantile(0.1)) for some in (took[:WARM], took[-WARM:]))  # of an idle machine
        print(f"{grown / 2**20:.1f} MiB more; a version took {first:.3f} s at first and {last:.3f} s at last")
        assert grown < GROWS_MAX
        assert last < 2 * first


def test_areal_1385_a_server_of_adapters_is_not_followed_for_weights(vllm: Server) -> None:
    with pytest.raises(errors.SyncError, match="started with --enable-lora"):
        follow(vllm.url, "policy", **vllm.identity())

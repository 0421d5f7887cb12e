"""What a real vLLM remembers of old weights, and what it does when its follower or its
engine dies between two control calls: reports of groups A and B in docs/field.md.

One server serves all scenes, and the last one kills it; it has a counting connector to
an external store.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.engine import PauseMode
from replicas.integrations.vllm_verbs import VllmEngine
from replicas.linux.processes import descendants, die_with_parent
from tests.engines.test_vllm_follow import running_requests
from tests.field.engines.small import ANSWER_S, Server, clear_nothing_in_a_pause, difference, server
from tests.support.field.proxies import ControlProxy
from tests.support.runs import alive
from tests.support.waits import eventually

pytestmark = pytest.mark.timeout(1500)

CONNECTOR = {
    "kv_connector": "CountingConnector",
    "kv_connector_module_path": "tests.field.engines.counting",
    "kv_role": "kv_both",
}
PREFIX = [int(word) for word in (torch.arange(160) * 37 % 20000 + 100).tolist()]
"""Ten blocks of the prefix cache."""
CORE = (b"VLLM::EngineCore", b"spawn_main")
"""What the core calls itself, and what it was called before."""
IN_FLIGHT, LOADS = 3, 2
TOKENS = int(os.environ.get("FIELD_TOKENS", "300"))
"""Of each request: more than are computed until the load begins."""
FRESH, STALE = 0.2, 1.0
"""Mean difference of log-probabilities in bfloat16: of the same computation in other
batches, and of one with keys and values of other weights."""
FOLLOWS = """
import json, sys
from replicas.integrations.vllm import follow
follow(sys.argv[1], "policy", **json.loads(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line for each time that the external store was told to forget."""
    return tmp_path_factory.mktemp("store") / "forgotten"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, forgotten: Path) -> Iterator[Server]:
    options = ("--kv-transfer-config", json.dumps(CONNECTOR))
    with server(tmp_path_factory.mktemp("caches"), *options, FORGOTTEN=str(forgotten)) as found:
        yield found


def fresh_logprobs(vllm: Server, prompt: list[int]) -> dict[str, float]:
    """Of the next token, by an answer that can use nothing that is remembered."""
    choice = vllm.complete(prompt, cache_salt=f"{time.monotonic_ns()}")
    return dict(choice["logprobs"]["top_logprobs"][0])


def gap(vllm: Server, prompt: list[int]) -> float:
    """Between an answer that may use what is remembered, and one that cannot."""
    found = vllm.complete(prompt)["logprobs"]["top_logprobs"][0]
    return difference(found, fresh_logprobs(vllm, prompt))


def gap_of_kept(vllm: Server, prompt: list[int], choice: Any) -> float:
    """The same for the last token of a request that was in flight during the load."""
    assert choice["finish_reason"] == "length"
    tokens = [int(token.partition(":")[2]) for token in choice["logprobs"]["tokens"]]
    return difference(choice["logprobs"]["top_logprobs"][-1], fresh_logprobs(vllm, [*prompt, *tokens[:-1]]))


def gaps(vllm: Server, mode: PauseMode, loads: int) -> list[float]:
    """After each load with requests in flight: of the shared prefix, and of them."""
    found = []
    with vllm.following(mode), ThreadPoolExecutor() as pool:
        vllm.wait_until_served(vllm.publish())
        for _ in range(loads):
            vllm.complete(PREFIX)
            prompts = [[*PREFIX, 1000 + number] for number in range(IN_FLIGHT)]
            flying = [pool.submit(vllm.complete, prompt, max_tokens=TOKENS) for prompt in prompts]
            eventually(lambda: running_requests(vllm.url) == IN_FLIGHT, "the requests run", timeout_s=60)
            vllm.wait_until_served(vllm.publish())
            found.append(gap(vllm, PREFIX))
            for prompt, request in zip(prompts, flying, strict=True):
                choice = request.result(ANSWER_S)
                if mode == "keep":
                    found.append(gap_of_kept(vllm, prompt, choice))
                else:
                    assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    return found


def test_nemo_4018_no_prefix_of_an_old_version_is_served_after_loads_in_flight(
    vllm: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same server without the reset answers with old keys and values."""
    found = gaps(vllm, "keep", LOADS)
    print("after each load:", found)
    assert max(found) < FRESH

    def finish(self: VllmEngine, timeout_s: float) -> None:
        self.post("/finish_weight_update", {"weight_version": str(self._version)}, timeout_s=timeout_s)
        self._open = False

    clear_nothing_in_a_pause(monkeypatch)
    monkeypatch.setattr(VllmEngine, "reset_caches", finish)
    stale = gaps(vllm, "keep", 1)
    print("without a reset:", stale)
    assert max(stale) > STALE


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_skyrl_2246_nor_in_the_other_modes_on_a_server_that_somebody_else_started(
    vllm: Server, mode: PauseMode
) -> None:
    found = gaps(vllm, mode, 1)
    print("after each load:", found)
    assert max(found) < FRESH


def test_vllm_42695_external_stores_and_the_encoders_cache_forget_too(vllm: Server, forgotten: Path) -> None:
    with ControlProxy(vllm.url) as proxy, vllm.following(through=proxy.url):
        vllm.wait_until_served(vllm.publish())
        before = len(forgotten.read_text().splitlines())
        proxy.calls.clear()
        vllm.wait_until_served(vllm.publish())
        assert len(forgotten.read_text().splitlines()) > before
        assert "/reset_encoder_cache" in proxy.calls
        assert any("/reset_prefix_cache" in call and "reset_external=true" in call for call in proxy.calls)


def test_areal_1160_a_follower_that_dies_between_pause_and_resume(vllm: Server) -> None:
    """Without a supervisor the server stays paused, until another follower comes: that
    one loads the newest version and resumes."""
    with ControlProxy(vllm.url) as proxy, ThreadPoolExecutor(1) as pool:
        parent, command = os.getpid(), [sys.executable, "-c", FOLLOWS, proxy.url, json.dumps(vllm.identity())]
        with subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent)) as process:
            try:
                vllm.wait_until_served(vllm.publish())
                proxy.before["/start_weight_update"] = process.kill
                version = vllm.publish()
                process.wait(300)
            finally:
                process.kill()
        assert vllm.is_paused()
        waiting = pool.submit(vllm.complete, PREFIX)
        with vllm.following(through=proxy.url):
            vllm.wait_until_served(version)
            assert waiting.result(120)["finish_reason"] == "length", "it was held up, not lost"
        assert gap(vllm, PREFIX) < FRESH


def test_vllm_57854_an_engine_that_dies_between_two_calls_of_an_update(vllm: Server) -> None:
    """The last scene of this server. The follower gives it up by name, and does not
    wait for a timeout; the trainer's next version commits."""
    with ControlProxy(vllm.url) as proxy, vllm.following(through=proxy.url, fails=True) as failed:
        vllm.wait_until_served(vllm.publish())
        core = next(pid for pid in descendants(vllm.pid) if any(word in command_line_of(pid) for word in CORE))
        proxy.before["/update_weights"] = lambda: os.kill(core, signal.SIGKILL)
        vllm.publish()
        eventually(lambda: failed, "the follower gives up", timeout_s=60)
        assert vllm.publish() == vllm.trainer.latest, "the trainer goes on"
        print(f"given up: {failed[0]}; the API process lives: {alive(vllm.pid)}")
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        vllm.complete(PREFIX)


def command_line_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

"""The released SGLang on a CPU, supervised: what it answers with, what it refuses, and
what a kill costs.

One start of the server serves all tests but the last two, which kill it.

Covers: integrations/sglang/engine.py, integrations/sglang/server.py,
integrations/sglang/checksum.py.
"""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.sglang_cpu.world import (
    PROMPT,
    ROUNDING,
    SglangWorld,
    answer,
    distance,
    make_model,
    run_text,
    running_requests,
    serve,
)
from tests.engines.world import ask, demand, get
from tests.support.runs import running
from tests.support.waits import eventually

REQUESTS = 16
KILLED_S = 1.0
"""How much longer than a sync of all alive the next one may take after a kill."""
CONTROL = ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/update_weight_version"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[SglangWorld]:
    """Each test leaves the server with the newest version, or on its way to it."""
    with running(tmp_path_factory.mktemp("sglang"), run_text(model)) as run:
        yield SglangWorld(run)
        run.end(timeout_s=60)


def test_a_server_answers_nothing_before_its_first_version(world: SglangWorld) -> None:
    for path in ("/generate", "/v1/completions"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{world.url}{path}", {"text": "a", "model": "m", "prompt": "a"})
        assert refused.value.code == 503
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{world.url}/readyz")
    assert refused.value.code == 503


def test_it_answers_with_the_trainers_weights_and_says_which(world: SglangWorld, model: Path) -> None:
    for scale in (1.0, 1.5):
        version = serve(world, scale)
        found = answer(world.url)
        assert distance(model, scale, PROMPT, found) < ROUNDING
        assert found["meta_info"]["weight_version"] == f"{version}"
    assert get(f"{world.url}/readyz") == {"version": version}


def test_a_demand_is_kept_and_a_load_cuts_off_what_it_interrupts(world: SglangWorld) -> None:
    number = serve(world, 1.0)
    url, prompt = f"{world.url}/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}}
    assert demand(url, f"{number}", prompt)[:2] == (200, f"{number}")
    assert demand(url, f">={number + 1}", prompt)[:2] == (409, f"{number}")
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    long = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    found = demand(url, f"{number}", long, lambda: serve(world, 1.5), first_nbytes=64)
    assert (found.status, found.served, found.cut) == (200, f"{number}", True)
    found = demand(url, f">={number}", long, lambda: serve(world, 1.0), first_nbytes=64)
    assert (found.status, found.served, found.cut) == (200, f"{number + 1}", False)


def test_a_prefix_that_was_cached_before_a_load_is_not_used_after_it(world: SglangWorld, model: Path) -> None:
    serve(world, 1.0)
    answer(world.url)
    assert answer(world.url)["meta_info"]["cached_tokens"] > 0
    serve(world, 1.5)
    found = answer(world.url)
    assert found["meta_info"]["cached_tokens"] == 0
    assert distance(model, 1.5, PROMPT, found) < ROUNDING


def test_no_request_in_flight_is_aborted_by_a_load(world: SglangWorld) -> None:
    before, url = serve(world, 1.0), world.url
    prompts = [[number + 1000, *PROMPT] for number in range(REQUESTS)]
    with ThreadPoolExecutor(REQUESTS) as pool:
        requests = [pool.submit(answer, url, prompt, tokens=200) for prompt in prompts]
        eventually(lambda: running_requests(url) == REQUESTS, "all requests are running", timeout_s=120)
        version = serve(world, 1.5)
        told = [request.result(120)["meta_info"] for request in requests]
    assert [one["finish_reason"]["type"] for one in told] == ["length"] * REQUESTS
    assert [one["completion_tokens"] for one in told] == [200] * REQUESTS
    spans = [[span["version"] for span in one["weight_versions"]] for one in told]
    assert spans == [[f"{before}", f"{version}"]] * REQUESTS


@pytest.mark.parametrize("misfit", [{"rows": 1000}, {"layers": 1}], ids=["another shape", "no weights for a layer"])
def test_a_version_that_does_not_fit_is_refused_and_the_server_goes_on(
    world: SglangWorld, model: Path, misfit: dict[str, int]
) -> None:
    good, before = serve(world, 1.0), world.processes()
    world.publish(**misfit)

    def refusing() -> bool:
        (replica,) = world.run.status().groups[1].replicas
        return replica.state == "ready" and "was not loaded" in replica.reason

    eventually(refusing, "the reason in the status", timeout_s=120)
    assert world.loaded() == good
    assert distance(model, 1.0, PROMPT, answer(world.url)) < ROUNDING
    assert "model." in world.publish(scale=1.5)["not_loaded"]["server/0"]
    world.wait_until_served(world.committed)
    assert distance(model, 1.5, PROMPT, answer(world.url)) < ROUNDING
    assert world.processes() == before


@pytest.mark.parametrize("path", [*CONTROL, "/pause_generation%0a"])
def test_control_routes_are_the_followers_alone(world: SglangWorld, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}{path}")
    assert refused.value.code == (400 if "%" in path else 403)


def test_a_control_route_that_can_be_read_is_the_followers_too(world: SglangWorld) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{world.url}/release_memory_occupation")
    assert refused.value.code == 403


@pytest.mark.parametrize("role", ["scheduler0", "follower"])
def test_a_killed_process_costs_the_trainer_a_second_and_the_server_a_restart(
    world: SglangWorld, model: Path, role: str
) -> None:
    serve(world, 1.5)
    usual = world.publish(scale=1.0)["committed_s"]
    world.wait_until_served(world.committed)
    before = world.processes()
    os.kill(before[role], signal.SIGKILL)
    assert world.publish(scale=1.5)["committed_s"] < usual + KILLED_S
    world.wait_until_restarted(before)
    assert distance(model, 1.5, PROMPT, answer(world.url)) < ROUNDING

"""A supervised SGLang with several schedulers: shards of one model, and replicas of it.

One start of each kind; its test ends by killing one scheduler.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.sglang_cpu.world import (
    PROMPT,
    SglangWorld,
    answer,
    distance,
    make_model,
    run_text,
    running_requests,
    serve,
)
from tests.support.runs import running
from tests.support.waits import eventually

pytestmark = pytest.mark.timeout(1800)

SCHEDULERS = 2
REQUESTS = 8
ROUNDING, OTHERS = 0.5, 1.0
"""Of log-probabilities in bfloat16, where sums of shards are rounded once more, and at
least of another version."""
THREADS = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * SCHEDULERS)}
"""Else SGLang wants a NUMA node for each scheduler."""


def assert_all_answer_with(world: SglangWorld, model: Path, scale: float, not_with: float) -> None:
    """Requests that follow each other go to one scheduler after the other."""
    for number in range(2 * SCHEDULERS):
        prompt = [*PROMPT, 2000 + number]
        found = answer(world.url, prompt)
        assert distance(model, scale, prompt, found) < ROUNDING
        assert distance(model, not_with, prompt, found) > OTHERS
        assert found["meta_info"]["weight_version"] == f"{world.committed}"


@pytest.mark.parametrize("option", [pytest.param("--tp-size", marks=pytest.mark.long), "--dp-size"])
def test_all_schedulers_of_a_server_have_the_version_or_none(tmp_path: Path, option: str) -> None:
    model = tmp_path / "model"
    make_model(model)
    with running(tmp_path, run_text(model, option, f"{SCHEDULERS}", **THREADS)) as run:
        world = SglangWorld(run)
        before = serve(world, 1.0)
        processes = world.processes()
        assert f"scheduler{SCHEDULERS - 1}" in processes
        assert_all_answer_with(world, model, 1.0, 1.5)

        prompts = [[number + 1000, *PROMPT] for number in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            requests = [pool.submit(answer, world.url, prompt, tokens=200) for prompt in prompts]
            eventually(lambda: running_requests(world.url) == REQUESTS, "all requests are running", timeout_s=120)
            version = serve(world, 1.5)
            told = [request.result(120)["meta_info"] for request in requests]
        assert [one["completion_tokens"] for one in told] == [200] * REQUESTS
        spans = [[span["version"] for span in one["weight_versions"]] for one in told]
        assert spans == [[f"{before}", f"{version}"]] * REQUESTS
        assert_all_answer_with(world, model, 1.5, 1.0)

        world.publish(rows=1000)
        eventually(lambda: "was not loaded" in world.servers()[0].reason, "the refusal", timeout_s=120)
        assert world.loaded() == version
        assert distance(model, 1.5, PROMPT, answer(world.url)) < ROUNDING
        serve(world, 1.0)
        assert_all_answer_with(world, model, 1.0, 1.5)
        assert world.processes() == processes, "nothing was restarted"

        os.kill(processes[f"scheduler{SCHEDULERS - 1}"], signal.SIGKILL)
        world.wait_until_restarted(processes)
        assert_all_answer_with(world, model, 1.0, 1.5)
        run.end(timeout_s=60)

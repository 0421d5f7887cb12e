"""LMDeploy's released server behind the gate: all of it but its engine, which needs a
GPU.

Covers: integrations/lmdeploy/serve.py, integrations/lmdeploy/server.py,
integrations/lmdeploy/engine.py.
"""

from __future__ import annotations

import json
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.sglang_cpu.world import make_model
from tests.engines.world import EngineWorld, ask, demand, get
from tests.support.runs import running

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "programs"
FOLLOWER_ALONE = [
    "/update_weights",
    "/sleep",
    "/wakeup",
    "/terminate",
    "/distserve/free_cache",
    "/update_weights_from_ipc",
]


def run_text(folder: Path, *options: str) -> str:
    """A run of a trainer and one LMDeploy server of a tiny model."""
    make_model(folder / "model")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}/lmdeploy_server.py" "$@"\n')
    script.chmod(0o755)
    model = str(folder / "model")
    command = [f"{HERE}/lmdeploy_server.py", str(script), "serve", model, *options]
    return f"""
[groups.trainer]
launcher = "exec"
command = ["{PROGRAMS}/trainer.py", "port"]
[groups.trainer.env]
MODEL = "{model}"
[groups.server]
launcher = "exec"
command = {json.dumps([*command, "--backend", "pytorch", "--max-batch-size", "4"])}
restart = {{ max_restarts = 1, initial_delay = "0s" }}
health = {{ start_timeout = "30m" }}
[groups.server.env]
HF_HUB_OFFLINE = "1"
[channels.policy]
sources = ["trainer"]
targets = ["server"]
"""


class LmdeployWorld(EngineWorld):
    """A run with a LMDeploy server."""

    def says(self, replica: int) -> int:
        return int(get(f"{self.url_of(replica)}/readyz")["version"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmdeployWorld]:
    folder = tmp_path_factory.mktemp("lmdeploy")
    with running(folder, run_text(folder)) as run:
        yield LmdeployWorld(run)
        run.end(timeout_s=60)


def serve(world: LmdeployWorld, scale: float) -> int:
    """Publish the weights times a factor; return the version, which is served."""
    world.publish(scale=scale)
    world.wait_until_served(world.committed)
    return world.committed


def test_a_server_answers_nothing_before_its_first_version(world: LmdeployWorld) -> None:
    for path in ("/generate", "/v1/completions", "/v1/messages"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{world.url}{path}", {"prompt": "a", "model": "m", "max_tokens": 1})
        assert refused.value.code == 503
        assert b"replicas: no version has been loaded yet" in refused.value.read()


def test_a_demand_is_kept_and_each_answer_says_its_version(world: LmdeployWorld) -> None:
    number = serve(world, 1.5)
    url, prompt = f"{world.url}/generate", {"prompt": "a", "max_tokens": 3}
    found = demand(url, f"{number}", prompt)
    assert found[:2] == (200, f"{number}")
    assert json.loads(found.body)["text"] == "1.5 " * 3
    assert demand(url, f">={number + 1}", prompt)[:2] == (409, f"{number}")
    assert get(f"{world.url}/readyz") == {"version": number}


def test_an_answer_that_a_load_aborts_is_of_one_version(world: LmdeployWorld) -> None:
    number = serve(world, 2.0)
    long = {"prompt": "a", "max_tokens": 4000, "stream": True}
    found = demand(f"{world.url}/generate", f"{number}", long, lambda: serve(world, 3.0), first_nbytes=64)
    assert (found.status, found.served) == (200, f"{number}")
    assert b'"text":"2 "' in found.body
    assert b'"text":"3 "' not in found.body


@pytest.mark.parametrize("path", FOLLOWER_ALONE)
def test_control_routes_are_the_followers_alone(world: LmdeployWorld, path: str) -> None:
    """``GET /terminate`` ends a server that allows it, so reading is no less."""
    for request in (get, lambda url: ask(url, {})):
        with pytest.raises(urllib.error.HTTPError) as refused:
            request(f"{world.url}{path}")
        assert refused.value.code == 403


def test_a_client_may_still_read_and_end_its_own_requests(world: LmdeployWorld) -> None:
    assert get(f"{world.url}/is_sleeping") == {"is_sleeping": False}
    assert get(f"{world.url}/health")["status"] == "healthy"
    with pytest.raises(urllib.error.HTTPError) as unsupported:
        ask(f"{world.url}/abort_request", {"session_id": 1})
    assert unsupported.value.code == 501  # by LMDeploy: it was started without --enable-abort-handling

"""Two servers of the released vLLM, supervised, with a real model: what they answer
with, and when; and each of their processes killed, and frozen: what the trainer
notices, and what answers afterwards.

One start of the servers serves all tests; each leaves them serving the newest version.
Two faults at a time hit one server each, as a restart takes most of a test.

Covers: integrations/vllm_worker/engine.py, integrations/vllm_gate.py.
"""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.engines.world import CAPITAL, TENSOR_PARALLEL, EngineWorld, ask, demand, running_world
from tests.support.waits import eventually

SERVERS = 2
KILLED_S = 1.0
"""How much longer than a sync of all alive the next one may take after a kill."""
FROZEN_S = 12.0
ROLES = [("follower", "api"), pytest.param(("core", "worker0"), marks=pytest.mark.long)]
"""Of the first server, and of the second."""

CONTROL = ["/pause", "/update_weights", "/collective_rpc", "/sleep"]
CONTROL += ["/scale_elastic_ep", "/start_profile", "/stop_profile", "/fault_tolerance/apply"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWorld]:
    options = ("--tensor-parallel-size", str(TENSOR_PARALLEL))
    with running_world(tmp_path_factory.mktemp("vllm"), *options, servers=SERVERS) as world:
        yield world


@pytest.fixture
def served(world: EngineWorld) -> EngineWorld:
    """The run, whose servers have the newest version."""
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    return world


def test_a_server_answers_nothing_before_its_first_version(world: EngineWorld) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}/v1/completions", CAPITAL)
    assert refused.value.code == 503
    assert b"no version has been loaded" in refused.value.read()


def test_it_answers_with_the_trainers_weights_and_says_which(world: EngineWorld) -> None:
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    assert "Paris" in world.answer()
    receipt = world.publish(scale=0.0)
    world.wait_until_served(world.committed)
    assert "Paris" not in world.answer()  # no cached prefix of the version before, either
    receipt = world.publish(scale=1.0)
    world.wait_until_served(receipt["version"])
    assert "Paris" in world.answer()
    assert len(receipt["members"]) == SERVERS * (1 + TENSOR_PARALLEL)


LONG = {**CAPITAL, "max_tokens": 150, "ignore_eos": True, "stream": True}


def test_an_answer_names_its_version_and_a_demand_is_kept(served: EngineWorld) -> None:
    served.publish(scale=1.0)
    served.wait_until_served(served.committed)
    url, number = f"{served.url}/v1/completions", served.committed
    for demanded in ("", f"{number}", f">={number}", ">= 1"):
        found = demand(url, demanded, CAPITAL)
        assert (found.status, found.served) == (200, f"{number}"), demanded
        assert b"Paris" in found.body
    for demanded in (f"{number + 1}", f">={number + 1}", "1"):
        found = demand(url, demanded, CAPITAL)
        assert (found.status, found.served) == (409, f"{number}"), demanded
        assert f"answers with version {number}, and {demanded} is demanded".encode() in found.body
    assert demand(url, "newest", CAPITAL).status == 400


def test_a_load_cuts_off_an_answer_that_demands_the_version_before(served: EngineWorld) -> None:
    """Others go on, and name the version with which they began."""
    world, url, number = served, f"{served.url}/v1/completions", served.committed

    def load() -> None:
        version = world.publish(scale=1.0)["version"]
        world.wait_until_served(version)

    found = demand(url, f"{number}", LONG, load, first_nbytes=64)
    assert (found.status, found.served, found.cut) == (200, f"{number}", True)
    assert b"[DONE]" not in found.body
    now = world.committed
    found = demand(url, f">={now}", LONG, load, first_nbytes=64)
    assert (found.status, found.served, found.cut) == (200, f"{now}", False)
    assert b"[DONE]" in found.body
    found = demand(url, "", LONG, load, first_nbytes=64)
    assert (found.status, found.served, found.cut) == (200, f"{world.committed - 1}", False)
    assert b"[DONE]" in found.body


def test_the_engines_metrics_and_the_runs_tell_the_same_version(world: EngineWorld) -> None:
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    with urllib.request.urlopen(f"{world.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    assert f"replicas_engine_version {float(world.committed)}" in lines
    assert "replicas_engine_ready 1.0" in lines


@pytest.mark.parametrize("path", [*CONTROL, "/pause%0a"])
def test_control_routes_are_the_followers_alone(world: EngineWorld, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{world.url}{path}")
    assert refused.value.code == (400 if "%" in path else 403)


@pytest.mark.parametrize("roles", ROLES)
def test_a_killed_process_costs_the_trainer_a_second_and_the_server_a_restart(
    served: EngineWorld, roles: tuple[str, str]
) -> None:
    world, usual = served, served.publish(scale=0.0)["committed_s"]
    world.wait_until_served(world.committed)
    before = strike(world, roles, signal.SIGKILL)
    assert world.publish(scale=1.0)["committed_s"] < usual + KILLED_S
    world.wait_until_restarted(*before)
    assert all("Paris" in answer for answer in world.answers())


@pytest.mark.parametrize("roles", ROLES)
def test_a_frozen_process_is_given_up_and_the_server_is_restarted(served: EngineWorld, roles: tuple[str, str]) -> None:
    world, before = served, strike(served, roles, signal.SIGSTOP)
    assert world.publish(scale=0.0)["committed_s"] < FROZEN_S
    assert world.publish(scale=1.0)["committed_s"] < KILLED_S
    world.wait_until_restarted(*before)
    assert all("Paris" in answer for answer in world.answers())


def strike(world: EngineWorld, roles: tuple[str, str], number: signal.Signals) -> list[dict[str, int]]:
    """Send a signal to one process of each server; the processes before that."""
    before = [world.processes(replica) for replica in range(SERVERS)]
    for processes, role in zip(before, roles, strict=True):
        os.kill(processes[role], number)
    return before


@pytest.mark.parametrize("misfit", [{"layers": 20}, {"rows": 1000}], ids=["no weights for some layers", "other shapes"])
def test_a_version_that_does_not_fit_is_refused_and_costs_the_server_nothing(
    served: EngineWorld, misfit: dict[str, int]
) -> None:
    world, good = served, served.committed
    before = [world.processes(replica) for replica in range(SERVERS)]
    world.publish(**misfit)

    def refusing() -> bool:
        return all(one.state == "ready" and "was not loaded" in one.reason for one in world.servers())

    eventually(refusing, "the reason in the status", timeout_s=120)
    assert world.loaded() == good
    assert all("Paris" in answer for answer in world.answers())
    told = world.publish(scale=0.0)["not_loaded"]
    assert all("it " in told[f"server/{replica}"] for replica in range(SERVERS))
    world.wait_until_served(world.committed)
    assert not any("Paris" in answer for answer in world.answers())
    assert [world.processes(replica) for replica in range(SERVERS)] == before


def test_a_publisher_that_dies_in_mid_update_changes_no_answer(served: EngineWorld) -> None:
    world = served
    world.kill_trainer_while_it_publishes()
    assert "Paris" in world.answer()
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    assert "Paris" in world.answer()

"""Each process of a real vLLM killed, and frozen: what its trainer notices, and what
answers afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from tests.engines.world import EngineWorld
from tests.support.waits import eventually

KILLED_S = 1.0
"""How much longer than a sync of all alive the next one may take after a kill."""
FROZEN_S = 12.0
ROLES = ["follower", "api", "core", "worker0"]


@pytest.fixture
def served(world: EngineWorld) -> EngineWorld:
    """The run, whose server has the newest version."""
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    return world


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_costs_the_trainer_a_second_and_the_server_a_restart(served: EngineWorld, role: str) -> None:
    world, usual = served, served.publish(scale=0.0)["committed_s"]
    world.wait_until_served(world.committed)
    before = world.processes()
    os.kill(before[role], signal.SIGKILL)
    assert world.publish(scale=1.0)["committed_s"] < usual + KILLED_S
    world.wait_until_restarted(before)
    assert "Paris" in world.answer()


@pytest.mark.parametrize("role", ROLES)
def test_a_frozen_process_is_given_up_and_the_server_is_restarted(served: EngineWorld, role: str) -> None:
    world, before = served, served.processes()
    os.kill(before[role], signal.SIGSTOP)
    assert world.publish(scale=0.0)["committed_s"] < FROZEN_S
    assert world.publish(scale=1.0)["committed_s"] < KILLED_S
    world.wait_until_restarted(before)
    assert "Paris" in world.answer()


@pytest.mark.parametrize("misfit", [{"layers": 20}, {"rows": 1000}], ids=["no weights for some layers", "other shapes"])
def test_a_version_that_does_not_fit_is_refused_and_costs_the_server_nothing(
    served: EngineWorld, misfit: dict[str, int]
) -> None:
    world, before, good = served, served.processes(), served.committed
    world.publish(**misfit)

    def refusing() -> bool:
        (replica,) = world.run.status().groups[1].replicas
        return replica.state == "ready" and "was not loaded" in replica.reason

    eventually(refusing, "the reason in the status", timeout_s=120)
    assert world.loaded() == good
    assert "Paris" in world.answer()
    told = world.publish(scale=0.0)["not_loaded"]
    assert "it " in told["server/0"]
    world.wait_until_served(world.committed)
    assert "Paris" not in world.answer()
    assert world.processes() == before


def test_a_publisher_that_dies_in_mid_update_changes_no_answer(served: EngineWorld) -> None:
    world = served
    world.kill_trainer_while_it_publishes()
    assert "Paris" in world.answer()
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    assert "Paris" in world.answer()

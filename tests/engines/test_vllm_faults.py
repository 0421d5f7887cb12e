"""Each process of a real vLLM killed, and frozen: what its trainer notices, and what
answers afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from tests.engines.world import World

KILLED_S = 1.0
"""How much longer than a sync of all alive the next one may take after a kill."""
FROZEN_S = 12.0
ROLES = ["follower", "api", "core", "worker0"]


@pytest.fixture
def served(world: World) -> World:
    """The run, whose server has the newest version."""
    world.publish(scale=1.0)
    world.wait_until_served(world.committed)
    return world


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_process_costs_the_trainer_a_second_and_the_server_a_restart(served: World, role: str) -> None:
    world, usual = served, served.publish(scale=0.0)["committed_s"]
    world.wait_until_served(world.committed)
    before = world.processes()
    os.kill(before[role], signal.SIGKILL)
    assert world.publish(scale=1.0)["committed_s"] < usual + KILLED_S
    world.wait_until_restarted(before)
    assert "Paris" in world.answer()


@pytest.mark.parametrize("role", ROLES)
def test_a_frozen_process_is_given_up_and_the_server_is_restarted(served: World, role: str) -> None:
    world, before = served, served.processes()
    os.kill(before[role], signal.SIGSTOP)
    assert world.publish(scale=0.0)["committed_s"] < FROZEN_S
    assert world.publish(scale=1.0)["committed_s"] < KILLED_S
    world.wait_until_restarted(before)
    assert "Paris" in world.answer()

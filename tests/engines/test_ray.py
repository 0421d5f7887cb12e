"""An embedded coordinator between actors of a real Ray on three nodes: versions, kills
of actors, of the coordinator, of a node and of the driver.

Covers: integrations/ray.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import replicas
from replicas import errors
from replicas.integrations.ray import Handle, coordinator, find, options
from replicas.linux.processes import command_line, descendants
from tests.engines.programs.ray_cluster import Raylets, raylets
from tests.support.runs import alive
from tests.support.waits import eventually

CHANNELS = {"policy": {"sources": ["trainer"], "targets": ["rollout"]}}
AGAIN = {"max_restarts": -1, "max_task_retries": -1}
KILLED_S = 1.0
"""What a kill may add to the next commit."""


class Member:
    """A program that knows of nothing but the channel."""

    def __init__(self) -> None:
        self.channel = replicas.join("policy")

    def who(self) -> tuple[str, int, str]:
        return self.channel.member.name, os.getpid(), ray.get_runtime_context().get_node_id()

    def publish(self, value: float) -> tuple[int, tuple[str, ...], float]:
        began = time.monotonic()
        receipt = self.channel.publish({"w": torch.full((1000,), value)}).wait()
        return receipt.version, receipt.lost, time.monotonic() - began

    def receive(self, at_least: int) -> tuple[int, float]:
        with self.channel.receive(at_least=at_least).wait() as update:
            ((_, tensor),) = update
            return update.version, float(tensor.mean())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(1, 2, 2) as cluster:
        yield cluster


@pytest.fixture
def connected(cluster: Raylets) -> Iterator[Raylets]:
    """Each test is a job of its own, after which nothing of ours is left."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.wait_until_free()


def member(handle: Handle, group: str, replica: int | str = 0, **more: Any) -> Any:
    found = options(handle, group=group, replica=replica)  # type: ignore[arg-type]  # "auto"
    return ray.remote(Member).options(**{"num_cpus": 1, **AGAIN, **more, **found}).remote()


def get(*references: Any) -> list[Any]:
    found = ray.get(list(references), timeout=90)
    assert isinstance(found, list)
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def members(handle: Handle) -> tuple[Any, list[Any]]:
    trainer = member(handle, "trainer")
    rollouts = [member(handle, "rollout", "auto", scheduling_strategy="SPREAD") for _ in range(2)]
    get(trainer.who.remote(), *(one.who.remote() for one in rollouts))
    return trainer, rollouts


def test_actors_exchange_versions_and_one_that_is_killed_holds_up_nobody(connected: Raylets) -> None:
    handle = coordinator(CHANNELS, groups={"rollout": 2})
    assert find().endpoint == handle.endpoint
    assert handle.token not in repr(handle)
    trainer, rollouts = members(handle)
    names = [name for name, _, _ in get(*(one.who.remote() for one in rollouts))]
    assert sorted(names) == ["rollout/0/0", "rollout/1/0"]
    assert get(trainer.publish.remote(1.0))[0][:2] == (1, ())
    assert get(*(one.receive.remote(1) for one in rollouts)) == [(1, 1.0), (1, 1.0)]
    ((name, pid, _),) = get(rollouts[0].who.remote())
    kill(pid)
    ((version, lost, took_s),) = get(trainer.publish.remote(2.0))
    assert (version, lost) in [(2, (name,)), (2, ())], "its death was known in the sync, or before it"
    assert took_s < KILLED_S
    assert get(*(one.receive.remote(2) for one in rollouts)) == [(2, 2.0), (2, 2.0)]
    assert get(rollouts[0].who.remote())[0][1] != pid


def test_a_coordinator_that_is_killed_comes_back_to_its_members(connected: Raylets) -> None:
    handle = coordinator(CHANNELS, groups={"rollout": 2}, name="restarted")
    trainer, rollouts = members(handle)
    assert get(trainer.publish.remote(1.0))[0][:2] == (1, ())
    (pid,) = [pid for pid, line in connected.ours().items() if line.startswith("ray::CoordinatorActor")]
    kill(pid)
    assert get(trainer.publish.remote(2.0))[0][:2] == (2, ())
    assert get(*(one.receive.remote(2) for one in rollouts)) == [(2, 2.0), (2, 2.0)]
    assert find("restarted").endpoint == handle.endpoint


def test_a_node_that_dies_takes_only_its_actors_with_it(connected: Raylets) -> None:
    added = connected.cluster.add_node(num_cpus=0, resources={"doomed": 1}, object_store_memory=80 << 20)
    handle = coordinator(CHANNELS, groups={"rollout": 2}, name="node")
    trainer, (stays, _) = members(handle)
    doomed = member(handle, "rollout", "auto", resources={"doomed": 1}, num_cpus=0)
    ((name, pid, node),) = get(doomed.who.remote())
    assert get(trainer.publish.remote(1.0))[0][:2] == (1, ())
    connected.cluster.remove_node(added, allow_graceful=False)
    eventually(lambda: pid not in connected.ours(), "the end of the node's actors")
    ((version, lost, _),) = get(trainer.publish.remote(2.0))
    assert (version, set(lost) - {name}) == (2, set()), "it may have been lost before"
    assert get(stays.receive.remote(2)) == [(2, 2.0)]
    connected.cluster.add_node(num_cpus=0, resources={"doomed": 1}, object_store_memory=80 << 20)
    assert get(doomed.receive.remote(2)) == [(2, 2.0)]
    ((_, _, other),) = get(doomed.who.remote())
    assert other != node


DRIVER = """
import ray, sys, time
from tests.engines.test_ray import CHANNELS, coordinator, get, members
ray.init(address=sys.argv[1], log_to_driver=False)
handle = coordinator(CHANNELS, groups={"rollout": 2})
trainer, rollouts = members(handle)
assert get(trainer.publish.remote(1.0))[0][0] == 1
print("published", flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_driver_that_is_killed(cluster: Raylets) -> None:
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "published\n"
            (pid,) = [pid for pid, line in cluster.ours().items() if line.startswith("ray::CoordinatorActor")]
            (store,) = [one for one in descendants(pid) if "store_process" in command_line(one, 1000)]
        finally:
            driver.kill()
    cluster.wait_until_free()
    eventually(lambda: not alive(store), "the end of the store")


def test_what_is_wrong_is_said_in_the_call(cluster: Raylets) -> None:
    with pytest.raises(errors.UsageError, match=r"not connected to Ray.*\n?.*ray.init"):
        coordinator(CHANNELS)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with pytest.raises(errors.BadConfig, match="unknown key"):
            coordinator({"policy": {"sauces": ["trainer"]}})
        with pytest.raises(errors.UsageError, match="no coordinator is named elsewhere"):
            find("elsewhere")
        handle = coordinator(CHANNELS)
        with pytest.raises(errors.UsageError, match="replicas"):
            coordinator(CHANNELS)
        port = int(handle.endpoint.rpartition(":")[2])
        with pytest.raises(errors.WorldError, match=f"{port}"):
            coordinator(CHANNELS, name="other", port=port)
        handle.close()
        with pytest.raises(errors.UsageError, match="is not a handle"):
            options("handle", group="rollout")  # type: ignore[arg-type]  # the error itself
        given = {"env_vars": {"A": "1"}, "working_dir": "."}
        found = options(handle, group="rollout", rank=1, world_size=2, runtime_env=given)["runtime_env"]
        assert found["working_dir"] == "."
        assert found["env_vars"].items() > {"A": "1", "REPLICA_ID": "0", "RANK": "1", "WORLD_SIZE": "2"}.items()
        found = options(handle, group="rollout", token_file="/etc/token")["runtime_env"]["env_vars"]
        assert found["REPLICAS_TOKEN_FILE"] == "/etc/token"
        assert handle.token not in found.values()
    finally:
        ray.shutdown()
        cluster.wait_until_free()

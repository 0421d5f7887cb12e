"""verl's released ``CheckpointEngineManager`` over a channel: the plugin is found, and
an actor or a rollout worker dies between and within each call of the manager.

Covers: integrations/verl.py, integrations/shared/refit.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from replicas import errors
from tests.engines.programs.ray_cluster import Raylets, raylets
from tests.engines.programs.verl_adapter import Adapter
from tests.engines.programs.verl_workers import NAMES, Rollout, Trainer

CALL_S = 120.0
"""A call of the manager that takes longer hangs; the first starts a process."""


class TrainerMethods:
    """What verl's worker group calls, and how, as in verl's ActorRolloutRefWorker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> None: ...


class Replica:
    """A server of verl's with one worker; its requests are nobody's."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]

    async def nothing(self, reject_request: bool = False) -> None: ...

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


class World:
    """A manager with its trainers and rollout workers."""

    def __init__(self, trainers: int = 1, rollouts: int = 2, **options: Any) -> None:
        again = {"num_cpus": 0, "max_restarts": -1}
        self.trainers = [ray.remote(Trainer).options(**again).remote(**options) for _ in range(trainers)]
        self.rollouts = [ray.remote(Rollout).options(**again).remote(**options) for _ in range(rollouts)]
        self.replicas = [Replica(worker) for worker in self.rollouts]
        config = CheckpointEngineConfig(backend="replicas", engine_kwargs={"replicas": options})
        methods = RayClassWithInitArgs(cls=ray.remote(TrainerMethods))
        group = RayWorkerGroup(worker_handles=self.trainers, ray_cls_with_init=methods)
        self.manager = CheckpointEngineManager(config=config, actor_wg=group, replicas=list(self.replicas))
        self.step = 0
        ask(*self.trainers, *self.rollouts)

    def sync(self, *, to: list[Any] | None = None) -> dict[str, float]:
        """One sync; the rollout workers (default: all) have its values then."""
        self.step += 1
        figures = self._update()
        for count, values in ask(*(self.rollouts if to is None else to), call="values"):
            assert (count, values) == (len(NAMES), {float(self.step)})
        return figures

    def sync_of_the_dead(self) -> None:
        self.step += 1
        with pytest.raises((RayActorError, errors.PeersLost)):
            self._update()

    def _update(self) -> dict[str, float]:
        began = time.monotonic()
        try:
            found = self.manager.update_weights(global_steps=self.step)
        finally:
            assert time.monotonic() - began < CALL_S
        assert isinstance(found, dict)
        return found


def ask(*workers: Any, call: str = "who") -> list[Any]:
    """Their answers, when they live again."""
    found = [getattr(worker, call).options(max_task_retries=-1).remote() for worker in workers]
    answers = ray.get(found, timeout=120)
    assert isinstance(answers, list)
    return answers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets(4) as cluster:
        yield cluster


@contextlib.contextmanager
def job(cluster: Raylets) -> Iterator[None]:
    """A job of its own, after which nothing of ours is left."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.wait_until_free()


@pytest.fixture(scope="module")
def world(cluster: Raylets) -> Iterator[World]:
    with job(cluster):
        world = World()
        world.sync()
        yield world


FIND = """
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
config = CheckpointEngineConfig(backend="replicas", custom_backend_module=MODULE)
print(CheckpointEngineManager(config, None, []).backend_cls.__name__)
"""


@pytest.mark.parametrize(("plugins", "module"), [("auto", None), ("none", "replicas.integrations.verl")])
def test_the_backend_is_found(plugins: str, module: str | None) -> None:
    run = [sys.executable, "-W", "ignore", "-c", FIND.replace("MODULE", repr(module))]
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    found = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert found.stdout.split() == ["ReplicasCheckpointEngine"]


def test_versions_reach_all_rollouts_and_the_figures_reach_verl(world: World) -> None:
    figures = world.sync()
    assert figures["replicas/lost"] == 0
    assert figures["replicas/members"] == 2
    assert world.sync()["replicas/version"] == figures["replicas/version"] + 1


def test_a_step_that_goes_back_is_a_new_version(world: World) -> None:
    world.step = 1  # a training that is resumed from an early checkpoint
    world.sync()
    world.step -= 1  # the same step once more
    world.sync()


CALLS = {"prepare": ("entry", "exit"), "init_process_group": ("entry", "exit"), "finalize": ("entry", "exit")}
MOMENTS = [
    *((call, moment) for call, moments in CALLS.items() for moment in moments),
    *(("update_weights", moment) for moment in ("entry", "middle", "exit")),
]


@pytest.mark.parametrize(("call", "moment"), MOMENTS)
def test_a_rollout_that_dies_in_a_call_holds_up_nobody(world: World, call: str, moment: str) -> None:
    dies, stays = world.rollouts
    ray.get(dies.doom.remote(call, moment))
    world.sync_of_the_dead()
    world.manager.remove_replicas([world.replicas[0]])
    world.sync(to=[stays])
    ask(dies)
    world.manager.add_replicas([world.replicas[0]])
    world.sync()


@pytest.mark.parametrize(("call", "moment"), MOMENTS)
def test_an_actor_that_dies_in_a_call_leaves_the_rollouts_as_they_were(world: World, call: str, moment: str) -> None:
    ray.get(world.trainers[0].doom.remote(call, moment))
    world.sync_of_the_dead()
    ask(*world.trainers)
    world.sync()


def test_a_killed_coordinator_comes_back(cluster: Raylets, world: World) -> None:
    (pid,) = [pid for pid, line in cluster.ours().items() if line.startswith("ray::CoordinatorActor")]
    os.kill(pid, 9)
    world.sync()
    world.sync()


def test_replicas_are_added(world: World) -> None:
    added = ray.remote(Rollout).options(num_cpus=0).remote()
    world.manager.add_replicas([Replica(added)])
    assert world.sync(to=[*world.rollouts, added])["replicas/members"] == 3
    world.manager.remove_replicas(world.manager.replicas[2:])
    world.sync()


def test_verls_own_rollout_worker_takes_the_versions(world: World, tmp_path: Path) -> None:
    settings = RolloutConfig(name="vllm", checkpoint_engine=world.manager.config)
    made = RayClassWithInitArgs(
        cls=ray.remote(CheckpointEngineWorker),
        rollout_config=settings,
        model_config=None,
        server_adapter=Adapter(tmp_path / "noted"),
    )
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=made, name_prefix="rollout_standalone_9", use_gpu=False, device_name="cpu"
    )
    world.manager.add_replicas([Replica(group.workers[0])])
    world.sync()
    noted = json.loads((tmp_path / "noted").read_text())
    assert noted == [world.step, "named_tensors", len(NAMES), [float(world.step)]]
    world.manager.remove_replicas(world.manager.replicas[2:])


def test_all_trainers_publish_a_share_each(world: World) -> None:
    """On a channel of its own, and so with a coordinator of its own."""
    shared = World(trainers=2, ranks="all", channel="shares")
    assert shared.sync()["replicas/version"] == 1
    ray.get(shared.trainers[1].doom.remote("update_weights", "middle"))
    shared.sync_of_the_dead()
    ask(*shared.trainers)
    shared.sync()
    world.sync()
